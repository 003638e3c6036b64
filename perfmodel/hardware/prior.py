"""Prior of an unmeasured chip from the calibrations of its vendor's neighbouring generations.

Parameters are fractions of the chip's own peaks, lengths and latencies: the mean of the last generation before and the first one after
carries over. The latencies of collectives differ by a factor of 1.7 between machines, with no trend over the generations: there the mean
is over all of them. Two things do not carry over as they are:

- the work of a fused attention that is no matrix multiply (softmax, the start of a block of queries): a compute unit does it at about the
  same pace in every generation, so as a length of matrix multiply it grows with the FLOP rate of a compute unit;
- the sustained clock, which follows the power that a chip has for its peak (`power_clock_ratio`).

`perfmodel validate CASES --calibration prior` predicts every chip as if its own generation had not been measured.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import AttentionModel, Calibration, LongAttention, Provenance
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.power import matrix_rate, power_clock_ratio


def neighbours(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Neighbours among (calibration, measured chip): the vendor's latest generation launched no later, and the first one later."""
    found = sorted(generations(chip, known), key=lambda pair: (pair[1].launch_year, pair[0].name))
    before = [pair for pair in found if pair[1].launch_year <= chip.launch_year][-1:]
    after = [pair for pair in found if pair[1].launch_year > chip.launch_year][:1]
    return before + after


def generations(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """One of each FLOP rate among the same maker's measured chips (H100 and H200 are one): the one launched nearest to `chip`.

    A chip whose own FLOP rate was measured, on a sister, has that generation alone.
    """
    found: dict[float, tuple[Calibration, Chip]] = {}
    for pair in sorted(_same_kind(chip, known), key=lambda pair: (abs(pair[1].launch_year - chip.launch_year), pair[0].name)):
        found.setdefault(matrix_rate(pair[1]), pair)
    own = found.get(matrix_rate(chip))
    return [own] if own else list(found.values())


def other_generations(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Calibrations of chips with another FLOP rate: what would be known without the chip's own generation."""
    return [pair for pair in known if matrix_rate(pair[1]) != matrix_rate(chip)]


def _same_kind(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Measured chips of the same maker, with the same compute units, that multiply matrices in units of their own as this one does."""

    def kind(each: Chip) -> tuple[str, str, bool]:
        return each.vendor, each.unit_kind, matrix_rate(each) > each.peak_flop_rate.get(Dtype.FP32, 0.0)

    return [pair for pair in known if kind(pair[1]) == kind(chip) and pair[1].name != chip.name]


def prior_calibration(chip: Chip, known: Sequence[tuple[Calibration, Chip]]) -> Calibration | None:
    """The mean of the calibrations of `chip`'s neighbours, as a prior; None where it has none."""
    near = neighbours(chip, known)
    if not near:
        return None
    carried = [_carried(calibration, source, chip) for calibration, source in near]
    names = " and ".join(calibration.name for calibration in carried)
    mean = as_measured(_mean(carried), chip)
    return dataclasses.replace(
        mean,
        name=f"mean of {names}" if len(carried) > 1 else names,
        chips=(),
        relatives=(chip.name,),
        borrowed=(),
        provenance=Provenance.PRIOR,
        source=f"the mean of the calibrations of its maker's neighbouring generations ({names})",
        collectives=_mean([calibration.collectives for calibration, _ in generations(chip, known)]),
        serving=dataclasses.replace(mean.serving, points={}, errors={}),
        points={},
        errors={},
        notes="",
    )


def _carried(calibration: Calibration, source: Chip, chip: Chip) -> Calibration:
    """With the clock that `chip` has the power for, and the attention's offsets in its lengths: flash kernels compute in bf16 or fp16."""
    growth, power = _unit_rate(chip) / _unit_rate(source), power_clock_ratio(chip, source)
    return dataclasses.replace(
        calibration,
        attention={name: _rescaled(model, growth) for name, model in calibration.attention.items()},
        sustained_clock_fraction=min(1.0, calibration.sustained_clock_fraction * power),
        clock_fractions={dtype: min(1.0, clock * power) for dtype, clock in calibration.clock_fractions.items()},
        attention_clock_fraction=min(1.0, calibration.attention_clock_fraction * power),
        long_attention=_long_attention(calibration, source, chip),
    )


def as_measured(mean: Calibration, chip: Chip) -> Calibration:
    """With the best product that was measured on `chip` in the place of its neighbours', and attention that much nearer to the peak.

    The clock that a data sheet counts with is below the one that chips of a workstation sustain: none is lost on it.
    """
    model = mean.matmul.get(Dtype.BF16)
    if not chip.matmul_fraction or model is None:
        return mean
    growth = chip.matmul_fraction / model.peak_fraction
    return dataclasses.replace(
        mean,
        matmul={**mean.matmul, Dtype.BF16: dataclasses.replace(model, peak_fraction=min(chip.matmul_fraction, 1.0))},
        attention={
            name: dataclasses.replace(each, peak_fraction=min(each.peak_fraction * growth, chip.matmul_fraction, 1.0))
            for name, each in mean.attention.items()
        },
        # without products of warp groups the second FlashAttention is their own kernel
        attention_generations={name: rate for name, rate in mean.attention_generations.items() if name != "flash2"},
        long_attention={},
        grouped_matmul={
            dtype: dataclasses.replace(each, rate_fraction=min(each.rate_fraction, 1.0)) for dtype, each in mean.grouped_matmul.items()
        },
        sustained_clock_fraction=1.0,
        clock_fractions=dict.fromkeys(mean.clock_fractions, 1.0),
        attention_clock_fraction=1.0,
    )


def _long_attention(calibration: Calibration, source: Chip, chip: Chip) -> Mapping[str, LongAttention]:
    """Rates over many keys from a chip of the same silicon. On others softmax takes another share of the time: none."""
    if matrix_rate(chip) != matrix_rate(source):
        return {}
    clock = min(1.0, power_clock_ratio(chip, source))
    return {kernel: rates.at_clock(clock) for kernel, rates in calibration.long_attention.items()}


def _unit_rate(chip: Chip) -> float:
    return matrix_rate(chip) / chip.compute_units


def _rescaled(model: AttentionModel, growth: float) -> AttentionModel:
    return dataclasses.replace(model, head_dim_offset=model.head_dim_offset * growth, sequence_offset=model.sequence_offset * growth)


def _mean(values: Sequence[Any]) -> Any:
    """Mean of values: geometric for numbers (arithmetic if one is 0), by field for records and mappings, else the first value."""
    first = values[0]
    if len(values) == 1 or isinstance(first, (bool, str)):
        return first
    if isinstance(first, (int, float)):
        return math.prod(values) ** (1.0 / len(values)) if min(values) > 0 else sum(values) / len(values)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _mean([value[key] for value in values if key in value]) for key in keys}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = {field.name: _mean([getattr(value, field.name) for value in values]) for field in dataclasses.fields(first)}
        return dataclasses.replace(first, **fields)
    return first
