"""A framework's own rates of matrix multiplies and of attention: of products in fp8 apart, of attention by its generation on this chip."""

import pytest

from perfmodel.cost.estimate import with_rates_of
from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import load_calibration, load_cluster

MATMUL, FP8 = 0.9, 0.8
PROFILE = load_profile("megatron").having(matmul_rate_fraction=MATMUL, fp8_matmul_rate_fraction=FP8, attention_rate_fraction=0.6,
)  # fmt: skip


@pytest.mark.parametrize("dtype, matmul", [(Dtype.BF16, MATMUL), (Dtype.FP8, MATMUL * FP8)])
def test_rates_are_the_frameworks(dtype, matmul):
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=dtype)
    scaled = with_rates_of(PROFILE, machine)
    assert scaled.grouped_matmul.matmul.flop_rate / machine.grouped_matmul.matmul.flop_rate == pytest.approx(
        scaled.matmul.flop_rate / machine.matmul.flop_rate, rel=1e-12
    )
    assert scaled.matmul.flop_rate == pytest.approx(machine.matmul.flop_rate * matmul, rel=1e-12)
    assert scaled.attention["flash"].flop_rate == pytest.approx(machine.attention["flash"].flop_rate * 0.6, rel=1e-12)
    assert scaled.matmul.bandwidth == machine.matmul.bandwidth


@pytest.mark.parametrize("chip, cluster", [("a100", "dgx-a100"), ("h100", "dgx-h100")])
@pytest.mark.parametrize("kernel", ["flash1", "flash2", "flash3"])
def test_an_older_generation_of_attention_reaches_what_the_chip_says(chip, cluster, kernel):
    calibration = load_calibration(chip)
    machine = resolve_machine(load_cluster(cluster), calibration, dtype=Dtype.BF16)
    scaled = with_rates_of(PROFILE.having(attention_kernel=kernel, attention_rate_fraction=1.0), machine)
    rate = calibration.sustained.attention_generations.get(kernel, 1.0)
    assert scaled.attention["flash"].flop_rate == machine.attention["flash"].flop_rate * rate
    assert (rate < 1.0) == (kernel == "flash1" or (kernel, chip) == ("flash2", "h100"))


def test_products_of_eight_bits_have_a_clock_of_their_own():
    calibration = load_calibration("h100")
    machines = [resolve_machine(load_cluster("dgx-h100"), calibration, dtype=dtype) for dtype in (Dtype.BF16, Dtype.FP8)]
    fractions = [calibration.kernels.matmul[machine.dtype].peak_fraction for machine in machines]
    assert [machine.matmul.flop_rate for machine in machines] == [
        machines[0].peak_flop_rate * calibration.sustained.sustained_clock_fraction * fractions[0],
        machines[1].peak_flop_rate * calibration.sustained.clock_fractions[Dtype.FP8] * fractions[1],
    ]


def test_no_framework_multiplies_faster_than_the_peak():
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=Dtype.BF16)
    fast = PROFILE.having(matmul_rate_fraction=1.9)
    assert machine.matmul.flop_rate * 1.9 > machine.peak_flop_rate
    assert with_rates_of(fast, machine).matmul.flop_rate == machine.peak_flop_rate


def test_the_calibrated_rates_stay_where_a_framework_has_none_of_its_own():
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=Dtype.FP8)
    assert with_rates_of(load_profile("llm-c"), machine) is machine


RATES = ("matmul_rate_fraction", "fp8_matmul_rate_fraction", "context_attention_rate_fraction")


@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_nothing_is_refused(name):
    with pytest.raises(InputError, match=f"{name}=0.*: must be positive"):
        PROFILE.having(**{name: 0.0})
