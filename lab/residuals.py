"""Write strategies/residuals.yaml, the residuals of published runs; with failed runs, `memory_uncertainty.yaml` too.

    python -m lab.residuals CASES.jsonl [--left-out FILE.csv] [--out-of-memory FAILED.jsonl] [--out strategies/residuals.yaml]

`--left-out` is the output of `python -m lab.left_out`: predictions by fits that did not see a run's model. With it the
residuals of these runs are of unseen models; without it they are in-sample.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from lab.accuracy import predicted_as, read_left_out
from lab.cases import is_primary, planned_cases
from lab.command import command_parser, exits_on_errors
from lab.memory_outcomes import likeliest_uncertainty, own_figures, own_outcomes, uncertainty_over
from lab.unseen import SWEPT, UnseenFrameworks, quantiles_of, unseen_residuals
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.memory_headroom import MemoryUncertainty
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.profile import KNOWN, UNKNOWN
from perfmodel.uncertainty.residuals import ModelResiduals, Residuals, RunFeatures, UnseenResiduals, shape_of, unseen_interval
from perfmodel.uncertainty.run_features import features_of
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.judgement import best_releases
from perfmodel.validation.plan_choice import BROKEN_NVLINK
from perfmodel.validation.rows import NO_TIMES, TrainingRow
from perfmodel.validation.validate import CasePredictor

_FEWEST_OF_A_MODEL = 3
"""Least number of runs of a median over a model or a source."""

#: Chip -> chip whose calibration replaces it if it had none: of the next generation, or of the previous one.
OTHER_CALIBRATIONS: Mapping[str, str] = {"a100": "h100", "h100": "b200", "h200": "a100", "b200": "h100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """log(measured / predicted) of one run. is_primary: every input that matters is known."""

    id: str
    family: str
    source: str
    model: str
    chip: str
    scale: str
    bits: int
    is_primary: bool
    value: float


def residual_of(row: TrainingRow) -> Residual | None:
    """Return the residual of a row; None without a meaningful time (launch-bound tests, broken NVLink) or for adapter training."""
    case = row.case
    if case.is_apart or not row.has_time or case.group in NO_TIMES or case.noted_all_reduce < BROKEN_NVLINK:
        return None
    features = _features(row)
    return Residual(
        id=row.id,
        family="" if row.run.framework.borrows else row.run.framework.profile,
        source=row.group,
        model=shape_of(row.run.plan.job.transformer),
        chip=row.labels.chip,
        scale=features.scale,
        bits=features.bits,
        is_primary=row.tier == "primary",
        value=_value(row),
    )


def _features(row: TrainingRow) -> RunFeatures:
    return features_of(row.run.plan, row.run.hardware.chip)


def _value(row: TrainingRow) -> float:
    """Return log(measured / predicted)."""
    return math.log(row.measured_step_time / row.predicted_step_time)


def kept_residuals(rows: Iterable[TrainingRow]) -> list[Residual]:
    """Return the primary runs of each family; for a family without any, its runs with an assumed input."""
    every = [residual for row in rows if (residual := residual_of(row)) is not None]
    has_primary = {residual.family for residual in every if residual.is_primary}
    kept = [residual for residual in every if residual.family and residual.is_primary == (residual.family in has_primary)]
    if not kept:
        raise InputError("cases: no run has both a predicted and a measured time; give published training runs")
    return kept


def residuals_of(
    kept: Sequence[Residual],
    *,
    source: str,
    date: str,
    between_calibrations: float,
    unseen_frameworks: tuple[UnseenResiduals, ...] = (),
    experts: tuple[UnseenResiduals, ...] = (),
    features: tuple[tuple[str, float], ...] = (),
) -> Residuals:
    """Return the shipped residuals."""
    primary = [residual for residual in kept if residual.is_primary]
    groups = grouped(kept, lambda residual: (residual.family, residual.model, residual.chip, residual.scale, residual.bits))
    models = tuple(
        ModelResiduals(
            **{name: getattr(runs[0], name) for name in ("family", "model", "chip", "scale", "bits")},
            num_runs=len(runs),
            quantiles=quantiles_of([run.value for run in runs]),
        )
        for _, runs in sorted(groups.items(), key=lambda item: item[0])
    )
    return Residuals(
        source=source,
        date=date,
        num_runs=len(kept),
        between_models=_scatter(primary, lambda residual: residual.model),
        between_chips=_scatter(primary, lambda residual: residual.chip),
        between_calibrations=between_calibrations,
        models=models,
        unseen_frameworks=unseen_frameworks,
        experts=experts,
        features=features,
    )


def spreads_of_features(rows: Iterable[TrainingRow]) -> tuple[tuple[str, float], ...]:
    """Return the RMS log(measured / predicted) of runs with one rare feature or low-precision matmuls, each source weighing one."""
    squares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if not row.has_time or row.group in NO_TIMES or row.case.has_experts:
            continue
        features = _features(row)
        names = list(features.rare or features.named())
        if len(names) == 1:
            squares.setdefault(names[0], {}).setdefault(row.group, []).append(_value(row) ** 2)
    return tuple((name, math.sqrt(fmean([fmean(values) for values in sources.values()]))) for name, sources in sorted(squares.items()))


def residuals_of_experts(rows: Iterable[TrainingRow]) -> tuple[UnseenResiduals, ...]:
    """Return residuals of models with experts by source: the fastest release of each setting, without launch-bound tests."""
    best = best_releases([row for row in rows if row.case.has_experts and row.group not in NO_TIMES])
    groups = grouped([row for row in best if row.has_time], lambda row: row.group)
    return tuple(
        UnseenResiduals(
            group=group,
            family=rows[0].run.framework.profile,
            num_runs=len(rows),
            quantiles=quantiles_of(list(map(_value, rows))),
        )
        for group, rows in sorted(groups.items(), key=lambda item: item[0])
    )


def _scatter(residuals: Sequence[Residual], part: Callable[[Residual], str]) -> float:
    """Return the standard deviation of the parts' medians about the mean of their family, over families of two parts or more."""
    deviations, freedom = [], 0
    for runs in grouped(residuals, lambda residual: residual.family).values():
        parts = [[residual.value for residual in members] for members in grouped(runs, part).values()]
        medians = [median(values) for values in parts if len(values) >= _FEWEST_OF_A_MODEL]
        if len(medians) > 1:
            centre = sum(medians) / len(medians)
            deviations += [(value - centre) ** 2 for value in medians]
            freedom += len(medians) - 1
    return math.sqrt(sum(deviations) / freedom) if freedom else 0.0


def by_other_calibrations(cases: Iterable[Case]) -> dict[str, list[float]]:
    """Return chip -> residuals of its primary runs predicted with another chip's calibration, as for an unmeasured chip."""
    predictors = {name: CasePredictor(calibration=name, has_intervals=False) for name in set(OTHER_CALIBRATIONS.values())}
    by_chip: dict[str, list[float]] = {}
    for case, planned in planned_cases(cases, is_primary):
        chip = str(case.inputs.get("chip"))
        other = OTHER_CALIBRATIONS.get(chip.partition("-")[0])
        if other is not None:
            time = predictors[other].predict(planned).step_time
            by_chip.setdefault(chip.partition("-")[0], []).append(math.log(case.measured("step_time") / time))
    return by_chip


def scatter_of_medians(residuals: Mapping[str, Sequence[float]]) -> float:
    """Return the root mean square of the medians about 0, because the calibration was fitted to other chips."""
    squares = [median(values) ** 2 for values in residuals.values() if len(values) >= _FEWEST_OF_A_MODEL]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def residuals_text(residuals: Residuals) -> str:
    """As YAML."""
    lines = [
        "# log(measured / predicted) of published training runs, by family (execution profile), model, chip and scale.",
        "# Written by `python -m lab.residuals`; intervals are made from it (perfmodel/uncertainty/residuals.py).",
        f"source: {_quoted(residuals.source)}",
        f"date: {_quoted(residuals.date)}",
        f"num_runs: {residuals.num_runs}",
        f"between_models: {residuals.between_models:.4f}",
        f"between_chips: {residuals.between_chips:.4f}",
        f"between_calibrations: {residuals.between_calibrations:.4f}",
        *(["features:", *(f"  {name}: {value:.4f}" for name, value in residuals.features)] if residuals.features else []),
        "families:",
    ]
    for family, models in grouped(residuals.models, lambda entry: entry.family).items():
        lines.append(f"  {family}:")
        for entry in models:
            bits = f"bits: {entry.bits}, " if entry.bits != 16 else ""
            head = f"model: {_quoted(entry.model)}, chip: {entry.chip}, scale: {entry.scale}, {bits}num_runs: {entry.num_runs}"
            lines.append(f"    - {{{head}, quantiles: [{', '.join(f'{value:g}' for value in entry.quantiles)}]}}")
    unseen = "# Unseen frameworks: residuals by group of runs, predicted with a `generic` that their framework is left out of."
    experts = "# Models with experts: residuals by source; nothing is fitted to these runs."
    for note, name, groups in ((unseen, "unseen", residuals.unseen_frameworks), (experts, "experts", residuals.experts)):
        lines += [note, f"{name}:"] if groups else []
        for group in groups:
            left_open = ", ".join(f"{value:.3g}" for value in group.open)
            head = f"group: {_quoted(group.group)}, family: {group.family}, num_runs: {group.num_runs}, open: [{left_open}]"
            lines.append(f"  - {{{head}, quantiles: [{', '.join(f'{value:g}' for value in group.quantiles)}]}}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def memory_uncertainties(cases: Sequence[Case]) -> dict[str, MemoryUncertainty]:
    """Return the uncertainty of known frameworks, by their profiles, and of unseen ones, by leave-one-framework-out."""
    predictor, frameworks = CasePredictor(has_intervals=False), UnseenFrameworks()
    swept, hidden = list(own_outcomes(cases, predictor, SWEPT)), frameworks.outcomes(cases)
    held = list(own_figures(cases, predictor, HELD))
    counts = Counter(outcome.ran for outcome in swept)
    sweep = f"{counts[True]} runs of {SWEPT} that ran and {counts[False]} that ran out of memory"
    known = uncertainty_over(
        [likeliest_uncertainty(swept), *([likeliest_uncertainty((), held)] if held else [])],
        rests_on=f"{sweep}, and what {len(held)} of {HELD} held, with their own profiles",
    )
    unknown = uncertainty_over(
        [likeliest_uncertainty(hidden)], rests_on=f"{sweep}, predicted with the mean of other frameworks; no surer than known ones"
    )
    return {KNOWN: known, UNKNOWN: replace(unknown, scale=max(unknown.scale, known.scale))}


HELD = "torchtitan"
"""Framework whose runs report the memory of its allocator."""


def memory_uncertainties_text(uncertainties: Mapping[str, MemoryUncertainty]) -> str:
    """As YAML."""
    lines = [
        "# log(needed / predicted) of the memory that is allocated within a step (not resident): a logistic distribution.",
        "# Written by `python -m lab.residuals --out-of-memory`; probabilities of fitting are made from it",
        "# (perfmodel/foundation/memory_headroom.py).",
    ]
    for kind, uncertainty in uncertainties.items():
        lines.append(f"{kind}: {{centre: {uncertainty.centre:g}, scale: {uncertainty.scale:g}, rests_on: {_quoted(uncertainty.rests_on)}}}")
    return "\n".join(lines) + "\n"


def with_left_out(rows: Iterable[TrainingRow], left_out: Mapping[str, float]) -> list[TrainingRow]:
    """Return the rows, with predictions of fits that did not see their model where these exist."""
    return [predicted_as(row, left_out[row.id]) if row.id in left_out and row.is_predicted else row for row in rows]


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("residuals", __doc__)
    parser.add_argument("--left-out", type=Path, metavar="FILE.csv", help="predictions by fits that did not see the run's model")
    parser.add_argument("--out-of-memory", type=Path, metavar="FAILED.jsonl", help="failed runs: memory_uncertainty.yaml is written too")
    parser.add_argument("--out", type=Path, default=Path("strategies/residuals.yaml"), metavar="FILE.yaml")
    options = parser.parse_args(arguments)
    left_out = {} if options.left_out is None else read_left_out(options.left_out)
    predictor = CasePredictor(has_intervals=False)
    cases = list(read_cases(options.cases))
    rows = with_left_out([predictor.row(case) for case in cases], left_out)
    calibrations = by_other_calibrations(cases)
    kept = kept_residuals(rows)
    counts = Counter(residual.source for residual in kept)
    names = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    unseen = sum(residual.id in left_out for residual in kept)
    residuals = residuals_of(
        kept,
        source=f"published runs ({names}); {unseen or 'none'} of them predicted by fits that did not see their model",
        date=datetime.date.today().isoformat(),
        between_calibrations=scatter_of_medians(calibrations),
        unseen_frameworks=unseen_residuals(UnseenFrameworks().times(cases)),
        experts=residuals_of_experts(rows),
        features=spreads_of_features(rows),
    )
    write_atomically(options.out, residuals_text(residuals))
    if options.out_of_memory is not None:
        uncertainties = memory_uncertainties([*cases, *read_cases(options.out_of_memory)])
        write_atomically(options.out.with_name("memory_uncertainty.yaml"), memory_uncertainties_text(uncertainties))
    print(f"{options.out}: {residuals.num_runs} runs of {len(residuals.models)} models, chips and scales")
    scatters = (f"{name} {getattr(residuals, f'between_{name}'):.1%}" for name in ("models", "chips", "calibrations"))
    print("scatter between " + ", ".join(scatters))
    for name, values in sorted(calibrations.items()):
        print(f"  {name} as {OTHER_CALIBRATIONS[name]}: median of log(measured / predicted) {median(values):+.3f}, {len(values)} runs")
    low, high = unseen_interval(residuals.unseen_frameworks)
    print(f"  unseen framework: {low:.2f} to {high:.2f} of the prediction, {len(residuals.unseen_frameworks)} groups of runs")


if __name__ == "__main__":
    sys.exit(main())
