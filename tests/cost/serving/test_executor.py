"""The serving executor's steps, predicted: each part is the sum of what was measured of the machine, of elements of 32 bits."""

from dataclasses import replace
from math import prod

import pytest

from perfmodel.cost.compute import attention_decode_time, matmul_time
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.serving.executor import executor_times, predicted_parts
from perfmodel.cost.serving.memory import weight_bytes
from perfmodel.cost.serving.program import serving_program
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import (
    VECTOR_BANDWIDTH,
    WEIGHT_BANDWIDTH,
    Calibration,
    DecodeAttentionModel,
    HostTimes,
    KernelClass,
    KernelModels,
    MatmulModel,
    Provenance,
    StreamingModel,
)
from perfmodel.hardware.local import local_cluster
from perfmodel.parallel.results import StepShape
from perfmodel.workload.kinds.cache import UPDATE_KERNELS, state_bytes, state_shapes
from perfmodel.workload.quantization import QUANTIZATIONS
from tests.execute.jobs import tiny

HERE = Calibration(
    name="here",
    chips=(local_cluster(num_chips=1).chip.name,),
    software="",
    source="",
    date="2026-01-01",
    provenance=Provenance.CALIBRATED,
    kernels=KernelModels(
        matmul={Dtype.FP32: MatmulModel(peak_fraction=1.0, memory_fraction=0.5, sharpness=1.0)},
        decode_attention={"flash": DecodeAttentionModel(memory_fraction=0.25, floor_time=1e-6)},
    ),
    peaks={"flop_rate.fp32": 1e11, "memory_bandwidth": 4e10, WEIGHT_BANDWIDTH: 1e10, VECTOR_BANDWIDTH: 2e10},
    host=HostTimes(launch_time=1e-5),
)


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_decode_step_is_the_sum_of_its_kernels(sequences):
    model, cluster = tiny("llama"), local_cluster(num_chips=1)
    parts = predicted_parts(model, cluster, HERE, StepShape(sequences=sequences, cached=40, new=1))
    machine = resolve_machine(cluster, HERE, dtype=Dtype.FP32)
    bandwidth = 2e10 if sequences == 1 else 1e10
    machine = replace(machine, matmul=replace(machine.matmul, bandwidth=bandwidth))

    def product(n, k):
        return matmul_time(batch=1.0, m=sequences, n=n, k=k, itemsize=4, machine=machine)

    # q and o, k and v, gate and up, down: each a call of its own
    layer = 2 * product(64, 64) + 2 * product(32, 64) + 2 * product(96, 64) + product(64, 96)
    assert parts["products"] == pytest.approx(4 * layer, rel=1e-9)
    attention = attention_decode_time(batch=sequences, heads=8, kv_heads=4, key_length=41, head_dim=8, itemsize=4, machine=machine)
    assert parts["attention"] == pytest.approx(4 * attention, rel=1e-9)
    assert parts["logits"] > product(131, 64)
    # at least the seven products and the attention of each layer
    assert parts["host"] > 4 * 8 * 1e-5


#: Of each class a time for an element alone [s], and of updates a bandwidth.
MEASURED = {KernelClass.CAUSAL_CONV: 2e-9, KernelClass.STATE_SCAN: 3e-10, KernelClass.DELTA_SCAN: 1e-9}
STREAMING = {
    KernelClass.DEFAULT: StreamingModel(bandwidth_fraction=1.0),
    **{kernel: StreamingModel(bandwidth_fraction=1e9, element_time=time) for kernel, time in MEASURED.items()},
    **{kernel: StreamingModel(bandwidth_fraction=0.01, floor_time=1e-4) for kernel in UPDATE_KERNELS.values()},
}
WITH_STATES = replace(HERE, kernels=replace(HERE.kernels, streaming=STREAMING))


SCANS = {"mamba": KernelClass.STATE_SCAN, "delta": KernelClass.DELTA_SCAN}


@pytest.mark.parametrize("name, mixer", [("hybrid", "mamba"), ("qwen3-next", "delta")])
def test_states_take_what_was_measured_of_them(name, mixer):
    """Two layers of four: a decode step reads and writes their states as they lie, a prompt runs the scan for each position of it."""
    model, cluster, scan = tiny(name), local_cluster(num_chips=1), SCANS[mixer]
    decode, prompt = StepShape(sequences=3, cached=40, new=1), StepShape(sequences=1, cached=0, new=32)

    def parts(shape, kernel=KernelClass.DEFAULT, **changes):
        streaming = {**STREAMING, kernel: replace(STREAMING[kernel], **changes)}
        return predicted_parts(model, cluster, replace(HERE, kernels=replace(HERE.kernels, streaming=streaming)), shape)

    def more(shape, part, kernel, **changes):
        return parts(shape, kernel, **changes)[part] - parts(shape)[part]

    assert more(decode, "attention", UPDATE_KERNELS[mixer], floor_time=1e-4 + 1e-3) == pytest.approx(2 * 1e-3)
    assert more(decode, "passes", KernelClass.CAUSAL_CONV, floor_time=1e-3) == pytest.approx(2 * 1e-3)
    assert more(prompt, "passes", scan, floor_time=1e-3) == pytest.approx(2 * 1e-3)
    assert more(decode, "passes", scan, floor_time=1e-3) == 0
    for_each = 2 * 32 * prod(state_shapes(model, mixer)[1])
    assert more(prompt, "passes", scan, element_time=2 * MEASURED[scan]) == pytest.approx(for_each * MEASURED[scan])
    machine = resolve_machine(cluster, HERE, dtype=Dtype.FP32)
    attention = attention_decode_time(batch=3, heads=8, kv_heads=4, key_length=41, head_dim=8, itemsize=4, machine=machine)
    states = 1e-4 + 2 * 3 * state_bytes(model, mixer) / (0.01 * 4e10)
    assert parts(decode)["attention"] == pytest.approx(2 * states + 2 * attention, rel=1e-6)


def test_products_of_a_scan_are_not_counted_in_addition_to_it():
    program = serving_program(tiny("hybrid"), is_prompt=True, fuses=False)
    assert not any("scan" in name for name in program.rows.matmul.names)
    assert any("scan" in name for name in serving_program(tiny("hybrid"), is_prompt=True).rows.matmul.names)


def test_a_calibration_without_states_is_refused():
    with pytest.raises(InputError, match="calibration=here: has measured no layers with a state, which tiny-hybrid has"):
        predicted_parts(tiny("hybrid"), local_cluster(num_chips=1), HERE, StepShape(sequences=1, cached=1, new=1))


def test_weights_are_held_in_32_bits():
    model = tiny("mixtral")
    program = executor_times(model, local_cluster(num_chips=1), HERE, rows=1).decode_program
    held = weight_bytes(program, QUANTIZATIONS["bf16"], tp=1, pp=1, expert_cut=1)
    assert float(held) == 4 * model.num_parameters
