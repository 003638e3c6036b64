"""A framework's own rates of matrix multiplies and of attention: by the chip's year, and of fp8 apart."""

from dataclasses import replace

import pytest

from perfmodel.cost.estimate import with_rates_of
from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.profile import load_profile

BEFORE, SINCE, FP8 = 0.8, 0.9, 1.25
PROFILE = replace(
    load_profile("megatron"), matmul_rate_fraction=BEFORE, matmul_rate_fraction_since_2022=SINCE, fp8_matmul_rate_fraction=FP8,
    attention_rate_fraction=0.5, attention_rate_fraction_since_2022=0.6,
)  # fmt: skip


@pytest.mark.parametrize(
    "year, dtype, matmul, attention",
    [(2020, Dtype.BF16, BEFORE, 0.5), (2022, Dtype.BF16, SINCE, 0.6), (2022, Dtype.FP8, SINCE * FP8, 0.6)],
)
def test_rates_are_the_frameworks(year, dtype, matmul, attention):
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=dtype)
    found = with_rates_of(PROFILE, machine, year)
    assert found.grouped_matmul.matmul.flop_rate / machine.grouped_matmul.matmul.flop_rate == pytest.approx(
        found.matmul.flop_rate / machine.matmul.flop_rate, rel=1e-12
    )
    assert found.matmul.flop_rate == pytest.approx(machine.matmul.flop_rate * matmul, rel=1e-12)
    assert found.attention["flash"].flop_rate == pytest.approx(machine.attention["flash"].flop_rate * attention, rel=1e-12)
    assert found.matmul.bandwidth == machine.matmul.bandwidth


def test_no_framework_multiplies_faster_than_the_peak():
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=Dtype.BF16)
    fast = replace(PROFILE, matmul_rate_fraction_since_2022=1.9)
    assert machine.matmul.flop_rate * 1.9 > machine.peak_flop_rate
    assert with_rates_of(fast, machine, 2022).matmul.flop_rate == machine.peak_flop_rate


def test_the_calibrated_rates_stay_where_a_framework_has_none_of_its_own():
    machine = resolve_machine(load_cluster("dgx-h100"), dtype=Dtype.FP8)
    assert with_rates_of(load_profile("llm-c"), machine, 2022) is machine


RATES = ("matmul_rate_fraction", "matmul_rate_fraction_since_2022", "fp8_matmul_rate_fraction", "context_attention_rate_fraction")


@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_nothing_is_refused(name):
    with pytest.raises(InputError, match=f"{name}=0.*: must be positive"):
        replace(PROFILE, **{name: 0.0})
