"""Clock that a chip's power limit sustains, relative to a measured chip."""

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.chip import Chip


def power_clock_ratio(chip: Chip, measured: Chip) -> float:
    """Return the clock that a chip's power limit sustains over that of another chip, both as shares of their full clocks. [-]

    x = ((W / F) / (W' / F'))^(1/3)

    W, F    the chip's power limit [W] and its dense 16-bit peak [FLOP/s];  W', F'  those of the measured chip

    Dynamic power is proportional to clock times voltage squared, and voltage to the clock. 1 if a power limit or a 16-bit peak is unknown.
    Assumes that a FLOP at full clock costs both the same energy: W / (F clock^3) is 1.5, 1.2 and 1.4 pJ on A100, H100 and B200.
    """
    rates = [matrix_rate(side) for side in (chip, measured)]
    if not all(rates) or not (chip.tdp_watts and measured.tdp_watts):
        return 1.0
    return float((chip.tdp_watts / rates[0] * rates[1] / measured.tdp_watts) ** (1 / 3))


def power_limited_fraction(chip: Chip, relative: Chip) -> float:
    """Return the sustained clock of a chip over that of a relative, at most 1, both as shares of their full clocks. [-]

    More power per peak FLOP than the relative's has no effect: it may come from another process, or from a host in the same package. A 500
    W H100 has .89 of the 700 W part's clock. Chips with equal numbers of compute units are one die: the clock depends on the power alone,
    not on the advertised full clock. A GB200, whose full clock is 1.11 of a B200's, sustains 1.06 of a B200's, with 1,200 W for 1,000 W.
    """
    ratio = power_clock_ratio(chip, relative)
    if ratio != 1.0 and chip.units.compute_units == relative.units.compute_units:
        ratio *= (matrix_rate(relative) / matrix_rate(chip)) ** (2 / 3)
    return min(1.0, ratio)


def matrix_rate(chip: Chip) -> float:
    """Return the dense peak in bf16, on older chips in fp16; 0 without either. [FLOP/s]"""
    return chip.peak_flop_rate.get(Dtype.BF16) or chip.peak_flop_rate.get(Dtype.FP16, 0.0)
