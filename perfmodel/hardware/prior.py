"""Prior of an unmeasured chip from the calibrations of its vendor's neighbouring generations.

Parameters are fractions of the chip's own peaks, lengths and latencies. The prior is their mean over the last earlier and the first later
generation. The latencies of collectives differ by a factor of 1.7 between machines, without a trend over the generations: their mean
is over all generations. Two parameters are transferred with a correction:

- the work of fused attention other than matrix products (softmax, the start of a block of queries): a compute unit does it at about the
  same speed in every generation, so as a length of matrix product it is proportional to the FLOP rate of a compute unit;
- the sustained clock, which depends on the power of a chip relative to its peak (`power_clock_ratio`).

`perfmodel validate CASES --calibration prior` predicts every chip as if its own generation had not been measured.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import Calibration, Provenance, SustainedRates
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.power import matrix_rate, power_clock_ratio


def neighbours(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Return the (calibration, measured chip) pairs of the vendor's last generation launched no later, and of the first later one."""
    ordered = sorted(generations(chip, known), key=lambda pair: (pair[1].launch_year, pair[0].name))
    before = [pair for pair in ordered if pair[1].launch_year <= chip.launch_year][-1:]
    after = [pair for pair in ordered if pair[1].launch_year > chip.launch_year][:1]
    return before + after


def generations(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Return one pair per FLOP rate of the vendor's measured chips (H100 and H200 are one), the one launched nearest to `chip`.

    These chips have the same kind of compute units, and equally have, or lack, separate matrix units. If the chip's own FLOP rate was
    measured on another chip, only that generation is returned.
    """

    def kind(candidate: Chip) -> tuple[str, str, bool]:
        return candidate.vendor, candidate.units.unit_kind, matrix_rate(candidate) > candidate.peak_flop_rate.get(Dtype.FP32, 0.0)

    alike = [pair for pair in known if kind(pair[1]) == kind(chip) and pair[1].name != chip.name]
    by_rate: dict[float, tuple[Calibration, Chip]] = {}
    for pair in sorted(alike, key=lambda pair: (abs(pair[1].launch_year - chip.launch_year), pair[0].name)):
        by_rate.setdefault(matrix_rate(pair[1]), pair)
    same_rate = by_rate.get(matrix_rate(chip))
    return [same_rate] if same_rate else list(by_rate.values())


def other_generations(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Return the calibrations of chips with another FLOP rate: those available if the chip's own generation were unmeasured."""
    return [pair for pair in known if matrix_rate(pair[1]) != matrix_rate(chip)]


def prior_calibration(chip: Chip, known: Sequence[tuple[Calibration, Chip]]) -> Calibration | None:
    """Return the mean calibration of `chip`'s neighbours, as a prior; None without neighbours."""
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
        kernels=dataclasses.replace(
            mean.kernels,
            collectives=_mean([calibration.kernels.collectives for calibration, _ in generations(chip, known)]),
            serving=dataclasses.replace(mean.kernels.serving, points={}, errors={}),
        ),
        fit=dataclasses.replace(mean.fit, points={}, errors={}),
        notes="",
    )


def _carried(calibration: Calibration, source: Chip, chip: Chip) -> Calibration:
    """Transfer a calibration: scale clocks by the power limit, and attention offsets by the compute unit's 16-bit rate."""
    growth, power = _unit_rate(chip) / _unit_rate(source), power_clock_ratio(chip, source)
    attention = {
        name: dataclasses.replace(model, head_dim_offset=model.head_dim_offset * growth, sequence_offset=model.sequence_offset * growth)
        for name, model in calibration.kernels.attention.items()
    }
    sustained = calibration.sustained
    if matrix_rate(chip) != matrix_rate(source):  # other silicon, on which softmax takes another share of the time
        sustained = dataclasses.replace(sustained, long_attention={})
    kernels = dataclasses.replace(calibration.kernels, attention=attention)
    return dataclasses.replace(calibration, kernels=kernels, sustained=sustained.at_clock(power))


def as_measured(mean: Calibration, chip: Chip) -> Calibration:
    """Return the calibration with the best product measured on `chip` as its peak fraction, and attention scaled in proportion.

    Workstation chips sustain a clock above the data sheet's reference clock, so no clock is lost.
    """
    model = mean.kernels.matmul.get(Dtype.BF16)
    if not chip.matmul_fraction or model is None:
        return mean
    kernels, growth = mean.kernels, chip.matmul_fraction / model.peak_fraction
    return dataclasses.replace(
        mean,
        kernels=dataclasses.replace(
            kernels,
            matmul={**kernels.matmul, Dtype.BF16: dataclasses.replace(model, peak_fraction=min(chip.matmul_fraction, 1.0))},
            attention={
                name: dataclasses.replace(parameters, peak_fraction=min(parameters.peak_fraction * growth, chip.matmul_fraction, 1.0))
                for name, parameters in kernels.attention.items()
            },
            grouped_matmul={
                dtype: dataclasses.replace(group, rate_fraction=min(group.rate_fraction, 1.0))
                for dtype, group in kernels.grouped_matmul.items()
            },
        ),
        sustained=SustainedRates(
            clock_fractions=dict.fromkeys(mean.sustained.clock_fractions, 1.0),
            # without products of warp groups, FlashAttention 2 is the native kernel
            attention_generations={name: rate for name, rate in mean.sustained.attention_generations.items() if name != "flash2"},
            exposed_floor_fraction=mean.sustained.exposed_floor_fraction,
        ),
    )


def _unit_rate(chip: Chip) -> float:
    return matrix_rate(chip) / chip.units.compute_units


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean: geometric for numbers (arithmetic if one is 0), by field for records and mappings, else the first value."""
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
