"""strategies/engines_fitted.yaml and strategies/engines/generic.yaml: serving engines fitted to published runs, and their mean.

    python -m lab.serving.engines CASES.jsonl

A few host times of each engine and the lockstep of its requests are fitted to all its scored runs, not to a model, a chip or a row.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.serving.fitting import DIGITS, EngineFit, elsewhere, fit_engine, left_out_residuals, linearised, with_ranges
from perfmodel.calibrate.fits import rounded
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.units import exact_quantity
from perfmodel.frameworks.engine import ENGINE_GROUP_OF, GENERIC_ENGINE, Engine, fitted_numbers, list_engines, load_engine
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.validation.cases import read_cases
from perfmodel.validation.rows import ServingRow
from perfmodel.validation.validate import CasePredictor, serving_row

TODAYS = ("sglang", "tensorrt-llm", "vllm")
"""Current engines, whose mean stands for an unseen one."""

RELATIVES = {"tensorrt-llm-2023": "tensorrt-llm-2024", "vllm-2024-eager": "vllm-2024-mi300x"}
"""Engines with few and old runs: they take the numbers of a relative, and nothing is fitted to their runs."""

HEAD = "# Written by `python -m lab.serving.engines`: values of each engine fitted to published runs. Not edited by hand.\n"
GENERIC_HEAD = "# Written by `python -m lab.serving.engines`: the mean of the engines of today. Not edited by hand.\n"
_OWN = ("formats",)


def read_rows(path: str | Path, predictor: CasePredictor, *, as_served: bool = False) -> list[ServingRow]:
    """Return the serving runs of a file, predicted with the shipped engines: by the formulas, or as `serve` prints them."""
    predict = predictor.as_served if as_served else predictor.served
    return [serving_row(case, predict) for case in read_cases(path) if case.is_serving]


def predict_as(predictor: CasePredictor) -> Callable[[ServingRow, Engine], ServingPrediction]:
    return lambda row, engine: predictor.served(row.run, engine)


def fit_engines(rows: Sequence[ServingRow], predictor: CasePredictor, *, names: Sequence[str] = ()) -> dict[str, EngineFit]:
    """Return engine -> fit, for engines with enough runs."""
    fits = {}
    for name in names or sorted({row.labels.engine for row in rows if row.is_scored} - {GENERIC_ENGINE, *RELATIVES}):
        fit = fit_engine(load_engine(name), [row for row in rows if row.labels.engine == name], predict_as(predictor))
        if fit is not None:
            fits[name] = fit
    return fits


def shipped_fits(rows: Sequence[ServingRow], predictor: CasePredictor) -> dict[str, EngineFit]:
    """Return the shipped fits, linearised at their numbers without a refit."""
    fits = {}
    for name, numbers in fitted_numbers().items():
        scored = [row for row in rows if row.labels.engine == name and row.is_scored]
        if scored:
            engine = load_engine(name)
            logs = np.log([engine.option(number) for number in numbers])
            fit = linearised(engine, scored, tuple(numbers), logs, predict_as(predictor))
            fits[name] = replace(fit, is_borrowed=name in RELATIVES)
    return fits


def fitted_text(fits: Mapping[str, EngineFit]) -> str:
    lines_of = {name: _number_lines(fits, name) for name in sorted(fits)}
    lines = [HEAD + "engines:"]
    for name, number_lines in lines_of.items():
        lines += [f"  {name}:", *number_lines.values()]
    for name, relative in RELATIVES.items():
        if relative in lines_of:
            unlike = {"few_rows_fraction"} if load_engine(name).kernels.tunes_products else set()
            lines += [f"  {name}:  # the numbers of {relative}"]
            lines += [line for number, line in lines_of[relative].items() if number not in unlike]
    return "\n".join(lines) + "\n"


def _number_lines(fits: Mapping[str, EngineFit], name: str) -> dict[str, str]:
    """Return the line of each number of an engine: value, range and the runs that it is based on."""
    fit = fits[name]
    _, others = left_out_residuals(fit, "model", elsewhere(fits, name))
    counts = {label: len({getattr(row.labels, label) for row in fit.rows}) for label in ("model", "chip")}
    basis = f"runs: {len(fit.rows)}, models: {counts['model']}, chips: {counts['chip']}"
    lines = {}
    for number in with_ranges(fit, others):
        bounds = (number.value, number.low, number.high)
        is_time = number.name.endswith("_time")
        value, low, high = (exact_quantity(bound, "time") if is_time else f"{bound:g}" for bound in bounds)
        lines[number.name] = f"    {number.name}: {{value: {value}, low: {low}, high: {high}, {basis}}}"
    return lines


def generic_engine(known: Sequence[Engine]) -> Engine:
    """Return an engine with the mean of every number (of times the geometric mean) and the most common choice of every option."""
    first = known[0]
    values: dict[str, Any] = {}
    for option in ENGINE_GROUP_OF:
        options = [engine.option(option) for engine in known]
        if option in _OWN:
            continue
        if isinstance(options[0], (bool, str)) or option in ("graph_sizes", "prefill_context_beside"):
            values[option] = max(Counter(options).items(), key=lambda item: (item[1], str(item[0])))[0]
        elif isinstance(options[0], tuple):
            values[option] = tuple(rounded(value, DIGITS) for value in np.mean(options, axis=0))
        else:
            values[option] = _mean(option, options, is_integer=isinstance(options[0], int))
    names = ", ".join(engine.name for engine in known)
    return first.having(
        name=GENERIC_ENGINE,
        version="any",
        source=f"the mean of {names} (lab.serving.engines)",
        formats=(),
        versions=(),
        chips=(),
        notes={},
        **values,
    )


def _mean(name: str, values: Sequence[float], *, is_integer: bool) -> float:
    known = [value for value in values if value > 0] if name.endswith("_time") else list(values)
    if not known:
        return 0.0
    mean = float(np.exp(np.mean(np.log(known)))) if name.endswith("_time") else float(np.mean(known))
    return round(mean) if is_integer else rounded(mean, DIGITS)


def generic_text(engine: Engine) -> str:
    lines = []
    plain = {"name": engine.name, "version": engine.version, "source": engine.source, **engine.options}
    for name, value in plain.items():
        if name == "formats":
            continue
        if name.endswith("_time"):
            value = f"{value * 1e6:.6g} us"
        elif name.endswith("_bytes"):
            value = f"{value / 1e6:.6g} MB" if value >= 1e3 else f"{value:.6g} B"
        elif isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, tuple):
            value = "[" + ", ".join(item if isinstance(item, str) else f"{item:g}" for item in value) + "]"
        elif isinstance(value, str):
            value = f"'{value}'"
        lines.append(f"{name}: {value}")
    return GENERIC_HEAD + "\n".join(lines) + "\n"


def todays_engines(fits: Mapping[str, EngineFit] | None = None) -> list[Engine]:
    """Return the engines as shipped, or with the numbers of the given fits, rounded to the shipped digits."""
    engines = []
    for name in TODAYS:
        numbers = fits[name].numbers() if fits is not None and name in fits else {}
        engines.append(load_engine(name).having(**{number: rounded(value, DIGITS) for number, value in numbers.items()}))  # type: ignore[arg-type]
    return engines


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("serving.engines", __doc__)
    parser.add_argument("--out", type=Path, default=Path("strategies"), metavar="FOLDER", help="of engines_fitted.yaml and engines/")
    parser.add_argument("--engine", action="append", default=[], choices=list_engines(), help="only these, which are printed, not written")
    options = parser.parse_args(arguments)
    predictor = CasePredictor()
    rows = read_rows(options.cases, predictor)
    fits = fit_engines(rows, predictor, names=options.engine)
    print(fitted_text(fits), end="")
    if not options.engine:
        write_atomically(options.out / "engines_fitted.yaml", fitted_text(fits))
        write_atomically(options.out / "engines" / f"{GENERIC_ENGINE}.yaml", generic_text(generic_engine(todays_engines(fits))))


if __name__ == "__main__":
    sys.exit(main())
