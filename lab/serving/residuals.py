"""Write strategies/serving_residuals.yaml: residuals of serving runs whose models were left out of the fit, for intervals.

python -m lab.serving.residuals CASES.jsonl
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.serving.engines import TODAYS, generic_engine, predict_as, read_rows, shipped_fits
from lab.serving.fitting import EngineFit, left_out_of, predicted_logs, targets_of
from perfmodel.cost.resolve import is_calibrated
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.engine import load_engine
from perfmodel.parallel.interval import METRICS, TAIL, ServingBasis
from perfmodel.validation.rows import ServingRow
from perfmodel.validation.validate import CasePredictor

HEAD = "# Written by `python -m lab.serving.residuals`. Not edited by hand.\n"
_ENOUGH = 20
"""Least number of figures for quantiles; with fewer the next wider set is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingResidual:
    """log(measured / predicted) of one figure of a run whose model, or whose engine if unknown, was left out of the fit."""

    basis: ServingBasis
    metric: str
    row: ServingRow
    value: float


def known_residuals(fits: Mapping[str, EngineFit], predictor: CasePredictor, *, by: str = "model") -> list[ServingResidual]:
    return [
        ServingResidual(basis=basis_of(row, predictor, known=True), metric=metric, row=row, value=-residual)
        for row, metric, residual in left_out_of(fits, by)
        if np.isfinite(residual)
    ]


def unknown_residuals(fits: Mapping[str, EngineFit], predictor: CasePredictor) -> list[ServingResidual]:
    """Return the residuals of current engines as unseen ones: predicted with the mean of the others."""
    residuals = []
    for name in TODAYS:
        if name not in fits:
            continue
        generic = generic_engine([fits[other].engine if other in fits else load_engine(other) for other in TODAYS if other != name])
        rows = [row for row in fits[name].rows if row.kind == "serving"]
        targets = targets_of(rows)
        logs = predicted_logs(rows, targets, generic, predict_as(predictor))
        for target, log in zip(targets, logs, strict=True):
            row = rows[target.row]
            value = float(np.log(target.measured) - log)
            residuals.append(ServingResidual(basis=basis_of(row, predictor, known=False), metric=target.metric, row=row, value=value))
    return [residual for residual in residuals if np.isfinite(residual.value)]


def basis_of(row: ServingRow, predictor: CasePredictor, *, known: bool) -> ServingBasis:
    machine = predictor.serving_estimator(row.run).machine
    return ServingBasis(engine_known=known, chip_measured=is_calibrated(machine), has_experts=row.run.job.model.parts.experts is not None)


def factors(residuals: Sequence[ServingResidual], basis: ServingBasis, metric: str) -> tuple[float, float, int] | None:
    """Return (low, high, figures) of the narrowest set with enough figures. Wider sets: any model, then any chip."""
    of = [residual for residual in residuals if residual.metric == metric and residual.basis.engine_known == basis.engine_known]
    sets = (
        [residual for residual in of if residual.basis == basis],
        [residual for residual in of if residual.basis.chip_measured == basis.chip_measured],
        of,
    )
    for chosen in sets:
        if len(chosen) >= _ENOUGH:
            # runs of one model under one engine together weigh the square root of their number
            keys = [(residual.row.labels.model, residual.row.labels.engine) for residual in chosen]
            counts = Counter(keys)
            weights, values = np.array([counts[key] ** -0.5 for key in keys]), np.array([residual.value for residual in chosen])
            order = np.argsort(values)
            share = np.cumsum(weights[order]) - 0.5 * weights[order]
            low, high = np.interp([TAIL * weights.sum(), (1.0 - TAIL) * weights.sum()], share, values[order])
            return float(np.exp(low)), float(np.exp(high)), len(chosen)
    return None


def every_basis() -> list[ServingBasis]:
    sides = (True, False)
    return [ServingBasis(engine_known=a, chip_measured=b, has_experts=c) for a in sides for b in sides for c in sides]


def residuals_text(residuals: Sequence[ServingResidual]) -> str:
    lines = [
        HEAD + "source: 'published runs of serving (tests/golden/published_serving.jsonl.gz), scored ones; each engine fitted without the "
        "model of the run'",
        "factors:",
    ]
    for basis in every_basis():
        lines.append(f"  '{basis.key}':")
        for metric in METRICS:
            bounds = factors(residuals, basis, metric)
            if bounds is not None:
                lines.append(f"    {metric}: {{low: {bounds[0]:.3f}, high: {bounds[1]:.3f}, figures: {bounds[2]}}}")
    return "\n".join(lines) + "\n"


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("serving.residuals", __doc__)
    parser.add_argument("--out", type=Path, default=Path("strategies/serving_residuals.yaml"), metavar="FILE.yaml")
    options = parser.parse_args(arguments)
    predictor = CasePredictor()
    fits = shipped_fits(read_rows(options.cases, predictor), predictor)
    residuals = [*known_residuals(fits, predictor), *unknown_residuals(fits, predictor)]
    write_atomically(options.out, residuals_text(residuals))
    print(options.out)


if __name__ == "__main__":
    sys.exit(main())
