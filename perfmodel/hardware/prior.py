"""What to expect of a chip that nobody measured, from the calibrations of its maker's neighbouring generations.

Parameters are fractions of the chip's own peaks, lengths and latencies: the mean of the last generation before and the first one after
carries over. The latencies of collectives differ by a factor of 1.7 between machines, with no trend over the generations: there the mean
is over all of them. What does not carry over is the work of a fused attention that is no matrix multiply (softmax, the start of a block
of queries): a compute unit does it at about the same pace in every generation, so as a length of matrix multiply it grows with the FLOP
rate of a compute unit.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.dtypes import Dtype
from perfmodel.hardware.calibration import AttentionModel, Calibration, Provenance
from perfmodel.hardware.chip import Chip


def neighbours(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """Of (calibration, chip that it was measured on): the same maker's latest one launched no later, and its first one later."""
    found = sorted(_same_maker(chip, known), key=lambda pair: (pair[1].launch_year, pair[0].name))
    before = [pair for pair in found if pair[1].launch_year <= chip.launch_year][-1:]
    after = [pair for pair in found if pair[1].launch_year > chip.launch_year][:1]
    return before + after


def generations(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    """One of each FLOP rate among the same maker's measured chips (H100 and H200 are one): the one launched nearest to `chip`."""
    found: dict[float, tuple[Calibration, Chip]] = {}
    for pair in sorted(_same_maker(chip, known), key=lambda pair: (abs(pair[1].launch_year - chip.launch_year), pair[0].name)):
        found.setdefault(pair[1].flop_rate(Dtype.BF16), pair)
    return list(found.values())


def _same_maker(chip: Chip, known: Iterable[tuple[Calibration, Chip]]) -> list[tuple[Calibration, Chip]]:
    return [pair for pair in known if pair[1].vendor == chip.vendor and pair[1].unit_kind == chip.unit_kind and pair[1].name != chip.name]


def prior_calibration(chip: Chip, known: Sequence[tuple[Calibration, Chip]]) -> Calibration | None:
    """The mean of the calibrations of `chip`'s neighbours, as a prior; None where it has none."""
    near = neighbours(chip, known)
    if not near:
        return None
    carried = [_carried(calibration, source, chip) for calibration, source in near]
    names = " and ".join(calibration.name for calibration in carried)
    first = carried[0]
    return dataclasses.replace(
        first,
        name=f"mean of {names}" if len(carried) > 1 else first.name,
        chips=(),
        relatives=(chip.name,),
        provenance=Provenance.PRIOR,
        source=f"the mean of the calibrations of its maker's neighbouring generations ({names})",
        matmul=_mean([calibration.matmul for calibration in carried]),
        streaming=_mean([calibration.streaming for calibration in carried]),
        attention=_mean([calibration.attention for calibration in carried]),
        collectives=_mean([calibration.collectives for calibration, _ in generations(chip, known)]),
        sustained_clock_fraction=_mean([calibration.sustained_clock_fraction for calibration in carried]),
        exposed_floor_fraction=_mean([calibration.exposed_floor_fraction for calibration in carried]),
        context_bytes=_mean([calibration.context_bytes for calibration in carried]),
        points={},
        errors={},
        notes="",
    )


def _carried(calibration: Calibration, source: Chip, chip: Chip) -> Calibration:
    """With the attention's offsets in the lengths of `chip`: flash kernels compute in bf16 or fp16 (`dtype` of the fits)."""
    growth = _unit_rate(chip) / _unit_rate(source)
    attention = {name: _rescaled(model, growth) for name, model in calibration.attention.items()}
    return dataclasses.replace(calibration, attention=attention)


def _unit_rate(chip: Chip) -> float:
    return chip.flop_rate(Dtype.BF16) / chip.compute_units


def _rescaled(model: AttentionModel, growth: float) -> AttentionModel:
    return dataclasses.replace(model, head_dim_offset=model.head_dim_offset * growth, sequence_offset=model.sequence_offset * growth)


def _mean(values: Sequence[Any]) -> Any:
    """Of numbers the geometric mean (the plain one where one is 0); of records and mappings field by field, of anything else the first."""
    first = values[0]
    if len(values) == 1 or isinstance(first, (bool, str)):
        return first
    if isinstance(first, (int, float)):
        return math.prod(values) ** (1.0 / len(values)) if min(values) > 0 else sum(values) / len(values)
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values if key in value]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = {field.name: _mean([getattr(value, field.name) for value in values]) for field in dataclasses.fields(first)}
        return dataclasses.replace(first, **fields)
    return first
