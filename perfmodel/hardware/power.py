"""The clock that a chip's power limit sustains, from that of a chip on which it was measured."""

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.chip import Chip


def power_clock_ratio(chip: Chip, measured: Chip) -> float:
    """Clock that a chip's power limit sustains over that which another's does, both as shares of their full clocks. [-]

    x = ((W / F) / (W' / F'))^(1/3)

    W, F    the chip's power limit [W] and its dense 16-bit peak [FLOP/s];  W', F'  the measured one's

    Dynamic power grows with clock times voltage squared, and voltage with the clock. 1 where a power limit or a 16-bit peak is unknown.
    Assumes that a FLOP at full clock costs both the same energy: W / (F clock^3) is 1.5, 1.2 and 1.4 pJ on A100, H100 and B200.
    """
    rates = [matrix_rate(each) for each in (chip, measured)]
    if not all(rates) or not (chip.tdp_watts and measured.tdp_watts):
        return 1.0
    return float((chip.tdp_watts / rates[0] * rates[1] / measured.tdp_watts) ** (1 / 3))


def power_limited_fraction(chip: Chip, relative: Chip) -> float:
    """Sustained clock of a chip over that of a relative with more power for its peak, both as shares of their full clocks. [-]

    More power than the relative's is not counted: it may be another process, or a host in the same package. A 500 W H100 has .89 of the
    700 W part's clock. Chips with as many units of one kind are one die: their power sets the clock itself, whatever is sold as the full
    one. A GB200, whose full clock is 1.11 of a B200's, sustains 1.06 times as much with its 1,200 W for 1,000.
    """
    ratio = power_clock_ratio(chip, relative)
    if ratio != 1.0 and chip.compute_units == relative.compute_units:
        ratio *= (matrix_rate(relative) / matrix_rate(chip)) ** (2 / 3)
    return min(1.0, ratio)


def matrix_rate(chip: Chip) -> float:
    """Dense peak in bf16, on older chips in fp16; 0 without either. [FLOP/s]"""
    return chip.peak_flop_rate.get(Dtype.BF16) or chip.peak_flop_rate.get(Dtype.FP16, 0.0)
