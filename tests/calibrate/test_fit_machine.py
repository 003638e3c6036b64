"""A fit gives back the machine that the samples were made on."""

import numpy as np
import pytest

from perfmodel.calibrate.fit_machine import fit_machine
from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import (
    attention_decode_time,
    attention_time,
    convolution_time,
    matmul_time,
    streaming_time,
)
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import SCALE_UP, VECTOR_BANDWIDTH, WEIGHT_BANDWIDTH, KernelClass
from perfmodel.hardware.reader import load_calibration
from perfmodel.hardware.samples import (
    AttentionSample,
    CollectiveSample,
    ContentionSample,
    ConvolutionSample,
    DecodeSample,
    HostSample,
    MatmulSample,
    StreamingSample,
    WeightSample,
)
from perfmodel.hardware.writer import save_calibration
from tests.cost.machines import make_machine, make_tier


def noise(seed, spread=0.03):
    generator = np.random.default_rng(seed)
    return lambda time: float(time * np.exp(spread * generator.standard_normal()))


def matmul_samples(wobble):
    """A CPU core: 212 GFLOP/s in fp32 above 128 cubed, 0.9 us a call."""
    shapes = [(size, size, size) for size in (64, 128, 256, 512, 1024)] + [(2048, 384, 384), (2048, 1024, 384), (384, 2048, 1024)]
    shapes += [(256, 384, 1152), (512, 2048, 384), (1024, 384, 2048), (128, 512, 256)]
    return [
        MatmulSample(m=m, n=n, k=k, batch=1, dtype=Dtype.FP32, time=wobble(0.9e-6 + 2 * m * n * (k + 20) / 212e9)) for m, n, k in shapes
    ]


def convolution_samples(wobble):
    """Twice as fast as products; 6 GB/s on the three tensors."""
    shapes = [(m, n, k, 4.0 * (m * 8 + n * k + m * n)) for m in (392, 1568, 6272, 12544) for n, k in ((64, 576), (192, 1200), (512, 2304))]
    return [
        ConvolutionSample(
            m=m, n=n, k=k, batch=1, num_bytes=moved, dtype=Dtype.FP32, time=wobble(2e-6 + 2 * m * n * k / 420e9 + moved / 6e9)
        )
        for m, n, k, moved in shapes
    ]


def test_convolutions_have_a_rate_of_their_own():
    samples = [*matmul_samples(noise(1)), *streaming_samples(noise(2)), *convolution_samples(noise(3))]
    calibration = fit_machine(samples, name="cpu", chip="test-chip", software="test")
    machine = make_machine(calibration=calibration, dtype=Dtype.FP32)
    shape = {"batch": 1.0, "m": 3136.0, "n": 128.0, "k": 1152.0, "itemsize": 4.0}
    expected = 2e-6 + 2 * 3136 * 128 * 1152 / 420e9 + 4e6 / 6e9
    assert convolution_time(**shape, num_bytes=4e6, machine=machine) == pytest.approx(expected, rel=0.1)
    assert matmul_time(**shape, machine=machine) > 1.5 * expected


def test_without_samples_a_convolution_is_a_matrix_multiply():
    calibration = fit_machine([*matmul_samples(noise(1)), *streaming_samples(noise(2))], name="cpu", chip="test-chip", software="test")
    assert not calibration.kernels.convolution
    machine = make_machine(calibration=calibration, dtype=Dtype.FP32)
    shape = {"batch": 1.0, "m": 3136.0, "n": 128.0, "k": 1152.0, "itemsize": 4.0}
    assert convolution_time(**shape, num_bytes=4e6, machine=machine) == matmul_time(**shape, machine=machine)


def true_stream(num_bytes):
    """120 GB/s in cache, 40 beyond 1 MB, 13 beyond 64 MB."""
    steps = ((2.0**20, 1 / 40e9 - 1 / 120e9), (2.0**26, 1 / 13e9 - 1 / 40e9))
    return 0.8e-6 + num_bytes * (1 / 120e9 + sum(step * (num_bytes / c) ** 2 / (1 + (num_bytes / c) ** 2) for c, step in steps))


def streaming_samples(wobble):
    sizes = 2.0 ** np.arange(10, 29)
    plain = [
        StreamingSample(kernel_class=KernelClass.DEFAULT, num_bytes=size, num_elements=size / 12, time=wobble(true_stream(size)))
        for size in sizes
    ]
    gelu = [
        StreamingSample(
            kernel_class=KernelClass.GELU, num_bytes=size, num_elements=size / 8, time=wobble(true_stream(size) + size / 8 * 2.2e-9)
        )
        for size in sizes
    ]
    return plain + gelu


def attention_samples(wobble):
    samples = []
    for batch, heads, length, head_dim in [(1, 6, 64, 64), (8, 6, 256, 64), (4, 12, 256, 64), (4, 6, 512, 64), (2, 6, 1024, 64),
                                           (8, 4, 128, 128), (2, 8, 512, 128), (1, 8, 1024, 128), (4, 8, 256, 32)]:  # fmt: skip
        time = 5e-6 + 4 * batch * heads * length * 0.5 * length * (head_dim + 20) / 90e9
        samples.append(
            AttentionSample(
                batch=batch, heads=heads, kv_heads=heads, query_length=length, key_length=length, head_dim=head_dim,
                causal_fraction=0.5, dtype=Dtype.FP32, time=wobble(time), backward_time=wobble(5e-6 + (time - 5e-6) * 3.0),
            )
        )  # fmt: skip
    return samples


GLOO = {
    CollectiveKind.ALL_REDUCE: (214e-6, 1.56e9),
    CollectiveKind.ALL_GATHER: (278e-6, 1.79e9),
    CollectiveKind.REDUCE_SCATTER: (408e-6, 0.89e9),
    CollectiveKind.ALL_TO_ALL: (196e-6, 3.09e9),
    CollectiveKind.SEND_RECV: (53e-6, 3.34e9),
}


def collective_samples(wobble):
    return [
        CollectiveSample(kind=kind, num_bytes=num_bytes, group_size=2, time=wobble(alpha + num_bytes / bandwidth))
        for kind, (alpha, bandwidth) in GLOO.items()
        for num_bytes in 2.0 ** np.arange(8, 26, 2)
    ]


def decode_samples(wobble):
    """12 GB/s of keys and values, 8 us a call."""
    shapes = [
        (1, 8, 8, 128, 64),
        (1, 16, 4, 512, 64),
        (8, 16, 4, 512, 64),
        (16, 16, 4, 128, 128),
        (2, 16, 4, 2048, 64),
        (16, 8, 8, 512, 64),
    ]
    return [
        DecodeSample(
            batch=b, heads=h, kv_heads=g, key_length=z, head_dim=d, dtype=Dtype.FP32, time=wobble(8e-6 + 8 * b * d * (g * z + h) / 12e9)
        )
        for b, h, g, z, d in shapes
    ]  # fmt: skip


def weight_samples(wobble):
    """Rows with weights at 16 GB/s plus the products for a few rows, and 20 GB/s for one row."""
    return [
        WeightSample(
            rows=rows, outputs=n, inputs=k, dtype=Dtype.FP32,
            time=wobble(4 * n * k / 20e9 if rows == 1 else 4 * n * k / 16e9 + 2 * rows * n * k / 212e9),
        )
        for n, k in ((2816, 1024), (1024, 1024)) for rows in (1, 4, 8, 16, 32)
    ]  # fmt: skip


def all_samples(spread):
    wobble = noise(1, spread)
    host = [HostSample(name="launch", time=6e-6), *(HostSample(name="step", time=time) for time in (2e-3, 3e-3, 9e-3))]
    return [
        *matmul_samples(wobble), *streaming_samples(wobble), *attention_samples(wobble), *collective_samples(wobble),
        *decode_samples(wobble), *weight_samples(wobble), *host, ContentionSample(name="compute.2", factor=1.08),
    ]  # fmt: skip


@pytest.fixture(scope="module", params=[0.0, 0.05], ids=["exact", "noisy"])
def fitted(request):
    calibration = fit_machine(all_samples(request.param), name="here", chip="test-chip", software="torch")
    tier = make_tier(bandwidth=1e9)
    return calibration, make_machine(tier, calibration=calibration, dtype=Dtype.FP32), 0.02 if request.param == 0 else 0.12


def test_matmuls_come_back(fitted):
    _, machine, tolerance = fitted
    for sample in matmul_samples(noise(0, 0.0)):
        time = matmul_time(batch=1, m=sample.m, n=sample.n, k=sample.k, itemsize=4, machine=machine)
        assert time == pytest.approx(sample.time, rel=tolerance)


def test_streaming_comes_back_in_cache_and_in_memory(fitted):
    _, machine, tolerance = fitted
    for sample in streaming_samples(noise(0, 0.0)):
        operands = {"num_bytes": sample.num_bytes, "num_elements": sample.num_elements, "kernel_class": sample.kernel_class}
        assert streaming_time(**operands, machine=machine) == pytest.approx(sample.time, rel=2 * tolerance)


def test_attention_comes_back_both_ways(fitted):
    _, machine, tolerance = fitted
    for sample in attention_samples(noise(0, 0.0)):
        shape = {
            name: getattr(sample, name)
            for name in ("batch", "heads", "kv_heads", "query_length", "key_length", "head_dim", "causal_fraction")
        }
        assert attention_time(**shape, itemsize=4, machine=machine) == pytest.approx(sample.time, rel=2 * tolerance)
        backward = attention_time(**shape, itemsize=4, machine=machine, is_backward=True)
        assert backward == pytest.approx(sample.backward_time, rel=2 * tolerance)


def test_decoding_comes_back(fitted):
    calibration, machine, tolerance = fitted
    for sample in decode_samples(noise(0, 0.0)):
        shape = {name: getattr(sample, name) for name in ("batch", "heads", "kv_heads", "key_length", "head_dim")}
        assert attention_decode_time(**shape, itemsize=4, machine=machine) == pytest.approx(sample.time, rel=2 * tolerance)
    assert calibration.peaks[WEIGHT_BANDWIDTH] == pytest.approx(16e9, rel=2 * tolerance)
    assert calibration.peaks[VECTOR_BANDWIDTH] == pytest.approx(20e9, rel=2 * tolerance)


def test_collectives_come_back_each_with_its_own_figures(fitted):
    _, machine, tolerance = fitted
    for sample in collective_samples(noise(0, 0.0)):
        time = collective_time(sample.kind, sample.num_bytes, group_size=2.0, inside=[2.0], machine=machine)
        assert time == pytest.approx(sample.time, rel=2 * tolerance)
    large = {"num_bytes": 1e8, "group_size": 2.0, "inside": [2.0], "machine": machine}
    assert collective_time(CollectiveKind.REDUCE_SCATTER, **large) > collective_time(CollectiveKind.ALL_REDUCE, **large)


def test_the_rest_is_medians(fitted):
    calibration, machine, _ = fitted
    assert calibration.host.launch_time == 6e-6
    assert dict(calibration.host.host_times) == {"step": 3e-3}
    assert machine.contention["compute.2"] == 1.08
    assert machine.basis.parts[SCALE_UP] == "calibrated: here"


def test_errors_and_points_are_recorded(fitted):
    calibration, _, tolerance = fitted
    parts = {"matmul.fp32", "streaming.default", "streaming.gelu", "attention.flash.fp32", "scale_up.all_reduce"}
    assert parts <= set(calibration.fit.errors)
    assert all(calibration.fit.errors[part] < 2 * tolerance and calibration.fit.points[part] > 4 for part in parts)


def test_the_file_gives_back_the_calibration(fitted, tmp_path):
    calibration, _, _ = fitted
    save_calibration(calibration, tmp_path / "here.yaml")
    assert load_calibration(tmp_path / "here.yaml") == calibration


def test_a_few_samples_are_enough():
    samples = [
        MatmulSample(m=512, n=512, k=512, batch=1, dtype=Dtype.FP32, time=2e-3),
        StreamingSample(kernel_class=KernelClass.DEFAULT, num_bytes=1e8, num_elements=1e7, time=1e-2),
        CollectiveSample(kind=CollectiveKind.ALL_REDUCE, num_bytes=1e6, group_size=2, time=1e-3),
    ]
    machine = make_machine(make_tier(), calibration=fit_machine(samples, name="here", chip="test-chip", software=""), dtype=Dtype.FP32)
    assert matmul_time(batch=1, m=512, n=512, k=512, itemsize=4, machine=machine) == pytest.approx(2e-3, rel=0.05)
    stream = {"num_bytes": 1e8, "num_elements": 1e7, "kernel_class": KernelClass.DEFAULT}
    assert streaming_time(**stream, machine=machine) == pytest.approx(1e-2, rel=0.05)
    time = collective_time(CollectiveKind.ALL_REDUCE, 1e6, group_size=2.0, inside=[2.0], machine=machine)
    assert time == pytest.approx(1e-3, rel=0.05)


def test_products_that_were_all_seen_slow_have_a_peak_above_them():
    """A millisecond around each of them: none comes near the rate that their differences tell."""
    samples = [
        MatmulSample(m=m, n=512, k=512, batch=1, dtype=Dtype.FP32, time=1e-3 + 2 * m * 512 * 512 / 200e9) for m in (16, 64, 128, 256, 512)
    ]
    calibration = fit_machine(samples, name="here", chip="test-chip", software="")
    assert calibration.kernels.matmul[Dtype.FP32].peak_fraction == pytest.approx(1.2)
    assert calibration.peaks["flop_rate.fp32"] > max(2 * s.m * 512 * 512 / s.time for s in samples)


def test_nothing_measured_leaves_the_spec_sheet():
    machine = make_machine(make_tier(), calibration=fit_machine([], name="here", chip="test-chip", software=""))
    assert set(machine.basis.parts.values()) == {"spec sheet"}


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(time):
    with pytest.raises(InputError, match="not a positive number"):
        fit_machine([HostSample(name="step", time=time)], name="here", chip="test-chip", software="")
