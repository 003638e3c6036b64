"""The clock that a power limit sustains."""

from dataclasses import replace

import pytest

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.power import matrix_rate, power_clock_ratio, power_limited_fraction
from perfmodel.hardware.reader import load_chip

H100 = load_chip("h100-sxm-80gb")


def test_a_chip_sustains_what_itself_sustains():
    assert power_clock_ratio(H100, H100) == 1.0


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.5, 8.0])
def test_the_clock_is_the_cube_root_of_the_power_for_the_peak(factor):
    assert power_clock_ratio(replace(H100, tdp_watts=H100.tdp_watts * factor), H100) == pytest.approx(factor ** (1 / 3))


def test_there_and_back_is_no_change():
    a100 = load_chip("a100-sxm-80gb")
    assert power_clock_ratio(a100, H100) * power_clock_ratio(H100, a100) == pytest.approx(1.0)


def test_more_power_than_a_relatives_is_not_counted():
    """A GH200's 900 W are those of a CPU too."""
    assert power_limited_fraction(load_chip("gh200-96gb"), H100) == 1.0
    assert power_limited_fraction(load_chip("h100-sxm-96gb-hbm2e"), H100) == pytest.approx((500 / 700) ** (1 / 3))


def test_chips_of_one_die_have_the_clock_that_their_power_sustains():
    """A GB200's full clock is 10/9 of a B200's: of its 1,200 W for 1,000 it keeps 1.2^(1/3) of the other's sustained clock."""
    b200, gb200 = load_chip("b200-180gb"), load_chip("gb200-nvl72")
    clocks = power_limited_fraction(gb200, b200) * matrix_rate(gb200) / matrix_rate(b200)
    assert clocks == pytest.approx(1.2 ** (1 / 3))
    assert power_limited_fraction(load_chip("gb300-nvl72"), b200) == 1.0
    units = replace(gb200.units, compute_units=gb200.units.compute_units - 8)  # another die: a FLOP costs both the same
    other = replace(gb200, units=units)
    assert power_limited_fraction(other, b200) == 1.0


def test_an_unknown_power_or_peak_changes_nothing():
    assert power_clock_ratio(replace(H100, tdp_watts=0.0), H100) == 1.0
    assert power_clock_ratio(replace(H100, peak_flop_rate={Dtype.FP32: 1e13}), H100) == 1.0


def test_an_older_chip_multiplies_in_fp16():
    assert matrix_rate(H100) == H100.flop_rate(Dtype.BF16)
    assert matrix_rate(load_chip("v100-sxm2-32gb")) == 125e12
