"""Prediction intervals of step times, from the errors of published runs.

A family is an execution profile. Per published model, chip, scale and precision of the matrix multiplies it keeps quantiles of
r = log(measured / predicted). Only these ship, not the runs (`strategies/residuals.yaml`, written by `python -m lab.residuals`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.resources import resource_dir
from perfmodel.parallel.interval import NORMAL, TAIL, StepInterval
from perfmodel.workload.config import TransformerConfig

#: Scales with separate errors: they differ in network contention and in waiting for the slowest rank.
_SCALES = ((8, "one node"), (64, "several nodes"), (math.inf, "many nodes"))

_ENOUGH = 10
"""Minimum number of runs for quantiles; with fewer, the next wider set is used."""


_PRIOR_RUNS = 3
"""Weight of the spread of unseen frameworks in runs, next to a framework's published runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFeatures:
    """Features of a run by which prediction errors differ.

    scale   `scale_of` its chips
    bits    of its matrix products: 16 (also fp32 and tf32), 8 or 4
    rare    features that few published runs have (`run_features.py`)
    """

    chip: str
    scale: str
    bits: int = 16
    rare: frozenset[str] = frozenset()

    def named(self) -> frozenset[str]:
        """Return the rare features, and the bits of the products if they are fewer than 16."""
        return self.rare if self.bits >= 16 else self.rare | {f"{self.bits}-bit products"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResiduals:
    """Residuals of the runs of one model on one chip, at one scale, with matrix multiplies of the same precision.

    model       its shape (`shape_of`), independent of its name
    num_runs    number of runs
    quantiles   of log(measured / predicted), at (i + 1/2) / n; one for each run where runs are few
    """

    family: str
    model: str
    chip: str
    scale: str
    num_runs: int
    quantiles: tuple[float, ...]
    bits: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UnseenResiduals:
    """Residuals of a group of runs predicted with an unseen framework: with `generic` and leave-one-framework-out.

    family   the profile that was left out
    open     mean variance of log(step time), below and above the prediction, from framework options that were not set
    """

    group: str
    family: str
    num_runs: int
    quantiles: tuple[float, ...]
    open: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Residuals of every family.

    between_models         standard deviation of the median of a model about that of its family
    between_chips          standard deviation of the median of a chip with its own calibration about that of its family
    experts                of mixture-of-experts models, by source: no constant is fitted to any of these runs
    between_calibrations   standard deviation about 0 of a chip predicted with another chip's calibration: for a chip without one
    features               root mean square residual of runs with a feature that no constant is fitted to, with equal weight per source
    """

    source: str
    date: str
    num_runs: int
    between_models: float
    between_chips: float
    between_calibrations: float
    models: tuple[ModelResiduals, ...]
    unseen_frameworks: tuple[UnseenResiduals, ...] = ()
    experts: tuple[UnseenResiduals, ...] = ()
    features: tuple[tuple[str, float], ...] = ()

    def has_family(self, family: str) -> bool:
        """Return whether runs of this family are known."""
        return any(model.family == family for model in self.models)

    def spread_of(self, feature: str) -> float:
        """Return the standard deviation of log(step time) of a run with a feature that its framework's runs lack.

        A feature without published runs gets the root mean square of the features with runs.
        """
        spreads = dict(self.features)
        if feature in spreads or not spreads:
            return spreads.get(feature, 0.0)
        return math.sqrt(sum(value**2 for value in spreads.values()) / len(spreads))


def scale_of(num_chips: float) -> str:
    return next(name for bound, name in _SCALES if num_chips <= bound)


def shape_of(model: TransformerConfig) -> str:
    """Return a model's architecture and sizes: two names for one shape are one model."""
    return (
        f"{model.origin.architecture} {model.num_hidden_layers}x{model.hidden_size} "
        f"{model.num_attention_heads}/{model.num_key_value_heads} {model.intermediate_size}"
    )


def interval(
    residuals: Residuals,
    features: RunFeatures,
    *,
    family: str,
    borrows: bool = False,
    uncalibrated: str = "",
    is_usual: bool = True,
    unseen: str = "",
    open_behaviours: tuple[float, float] = (0.0, 0.0),
) -> StepInterval:
    """Return quantiles of the family's most similar runs, widened by the features that those runs lack.

    borrows          the framework has no profile and uses the family's: it is an unseen framework
    uncalibrated     description of the rates that replace a missing calibration of the chip; empty if it has one
    is_usual         the calibration is the one that the runs on this chip were predicted with
    unseen           shape of a model whose runs are left out
    open_behaviours  of an unseen framework: variance of log(step time), below and above, from settings that are not given

    Each side has the half-width w = sqrt((n w_own^2 + n0 w_unseen^2) / (n + n0)) for n runs. With few runs it is close to that of an unseen
    framework, which counts as n0 = 3 runs. The runs of k models contain the variance within a model and between these models. A further
    model varies about their mean, which is itself known to sigma^2 / k; so 2 sigma^2 / k of the variance between models is missing from the
    pooled quantiles. It is added in quadrature to each side, and so are the variances of chips and of rare features without runs.
    """
    known = [runs for runs in residuals.models if runs.model != unseen]
    family_runs = [runs for runs in known if runs.family == family]
    if borrows or not family_runs:
        return _unseen_framework_interval(
            residuals, features, known=known, uncalibrated=uncalibrated, is_usual=is_usual, open_behaviours=open_behaviours
        )
    chosen, alike = _most_alike(family_runs, features)
    num_runs, num_models = _count(chosen), len({runs.model for runs in chosen})
    widened, words = _beyond_runs(residuals, features, seen=family_runs, uncalibrated=uncalibrated, is_usual=is_usual)
    widened += 2.0 / num_models * residuals.between_models**2
    points = sorted((point, runs.num_runs / len(runs.quantiles)) for runs in chosen for point in runs.quantiles)
    gaps = sum(weight for _, weight in points) + 1.0  # a further run falls into each with equal probability
    below, middle, above = (_weighted_quantile(points, share * gaps - 0.5) for share in (TAIL, 0.5, 1.0 - TAIL))
    unseen_below, unseen_above = (abs(math.log(factor)) for factor in unseen_interval(residuals.unseen_frameworks))
    half_width = NORMAL * math.sqrt(widened)
    low = math.hypot(_shrunk(middle - below, unseen_below, num_runs), half_width)
    high = math.hypot(_shrunk(above - middle, unseen_above, num_runs), half_width)
    if num_runs <= _FEW:
        words.append(f"only {num_runs} run{'s' if num_runs > 1 else ''}")
    return StepInterval(
        low=math.exp(min(middle - low, 0.0)),
        high=math.exp(max(middle + high, 0.0)),
        rests_on=f"{num_runs:,} run{'s' if num_runs > 1 else ''} of {num_models} model{'s' if num_models > 1 else ''} of {family}{alike}"
        + (f"; widened: {', '.join(words)}" if words else ""),
        num_runs=num_runs,
    )


_FEW = 5
"""Number of runs up to which a note reports that they are few."""


def _shrunk(own_width: float, unseen: float, num_runs: int) -> float:
    return math.sqrt((num_runs * own_width**2 + _PRIOR_RUNS * unseen**2) / (num_runs + _PRIOR_RUNS))


def _most_alike(family_runs: Sequence[ModelResiduals], features: RunFeatures) -> tuple[Sequence[ModelResiduals], str]:
    """Return the most similar set of the family's runs that is large enough, and a description of what it shares with the features."""
    of_bits = [runs for runs in family_runs if runs.bits == features.bits]
    of_chip = [runs for runs in of_bits if runs.chip == features.chip]
    bits = "" if features.bits == 16 else f" in {features.bits} bits"
    at_scale = f" on {features.scale}"
    choices = (
        ([runs for runs in of_chip if runs.scale == features.scale], f"{bits} on {features.chip},{at_scale}"),
        (of_chip, f"{bits} on {features.chip}"),
        ([runs for runs in of_bits if runs.scale == features.scale], f"{bits}{at_scale}"),
        (of_bits, bits),
        ([runs for runs in family_runs if runs.scale == features.scale], at_scale),
    )
    return next(((runs, alike) for runs, alike in choices if _count(runs) >= _ENOUGH), (family_runs, ""))


def _beyond_runs(
    residuals: Residuals, features: RunFeatures, *, seen: Sequence[ModelResiduals], uncalibrated: str, is_usual: bool
) -> tuple[float, list[str]]:
    """Return the variance of log(step time) from features that the seen runs lack, and a description of these features."""
    words, widened = [], 0.0
    if not is_usual:
        widened += residuals.between_calibrations**2
        words.append("another calibration than theirs")
    elif all(runs.chip != features.chip for runs in seen):
        widened += (residuals.between_calibrations if uncalibrated else residuals.between_chips) ** 2
        words.append(f"none on {features.chip}{f', which has {uncalibrated}' if uncalibrated else ''}")
    has_bits = any(runs.bits == features.bits for runs in seen)
    for feature in sorted(features.rare if has_bits else features.named()):
        widened += residuals.spread_of(feature) ** 2
        words.append(f"none with {feature}")
    return widened, words


def unseen_interval(
    unseen_frameworks: Sequence[UnseenResiduals], *, without: str = "", open_behaviours: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Return the interval of an unseen framework, as factors of the prediction.

    without   framework whose groups are left out

    The quantiles are those of all groups with equal weights, independent of the number of runs. The pooled medians of k groups contain
    1 - 1 / k of their variance. A further group varies about their mean with 1 + 1 / k of it, so 2 / k of it is added. The sensitivity of
    these runs to options that are not set is `open`. A plan with a higher sensitivity gets the difference in variance added, on each side.
    """
    chosen = [group for group in unseen_frameworks if group.family != without]
    if not chosen:
        raise InputError("residuals: hold no runs of unseen frameworks; write them with `python -m lab.residuals`")
    points = sorted((point, 1.0 / len(group.quantiles)) for group in chosen for point in group.quantiles)
    medians = [_weighted_quantile(sorted((point, 1.0) for point in group.quantiles), 0.5 * len(group.quantiles)) for group in chosen]
    centre = sum(medians) / len(medians)
    variance = sum((value - centre) ** 2 for value in medians) / max(1, len(medians) - 1)
    low, middle, high = (_weighted_quantile(points, share * len(chosen)) for share in (TAIL, 0.5, 1.0 - TAIL))
    half_width = NORMAL * math.sqrt(2.0 * variance / len(chosen))
    low, high = min(middle - math.hypot(middle - low, half_width), 0.0), max(middle + math.hypot(high - middle, half_width), 0.0)
    below, above = (NORMAL * math.sqrt(variance) for variance in _excess_variance(chosen, open_behaviours))
    return math.exp(-math.hypot(low, below)), math.exp(math.hypot(high, above))


def with_experts(step_interval: StepInterval, experts: Sequence[UnseenResiduals]) -> StepInterval:
    """Interval of a mixture-of-experts model: at least as wide as the errors of such runs, each source with the same weight."""
    if not experts:
        return step_interval
    low, high = unseen_interval(experts)
    runs = sum(group.num_runs for group in experts)
    says = f"{runs} runs of models with experts from {len(experts)} sources, to which nothing is fitted"
    return replace(
        step_interval, low=min(step_interval.low, low), high=max(step_interval.high, high), rests_on=f"{says}; {step_interval.rests_on}"
    )


def _excess_variance(unseen_frameworks: Sequence[UnseenResiduals], open_behaviours: tuple[float, float]) -> tuple[float, float]:
    """Return the variance, below and above, from unset options beyond the mean of those runs, with equal weight per group."""
    below, above = (
        max(open_behaviours[side] - sum(group.open[side] for group in unseen_frameworks) / len(unseen_frameworks), 0.0) for side in (0, 1)
    )
    return below, above


_NOTED_SPREAD = 0.05
"""[log of the step time] Standard deviation from which a note reports that the fitted parameters widen an interval."""


def _unseen_framework_interval(
    residuals: Residuals,
    features: RunFeatures,
    *,
    known: Sequence[ModelResiduals],
    uncalibrated: str,
    is_usual: bool,
    open_behaviours: tuple[float, float],
) -> StepInterval:
    """Return the interval of an unseen framework: runs of the profile that it uses are no evidence for it, so leave-one-framework-out
    errors count.
    """
    low, high = unseen_interval(residuals.unseen_frameworks, open_behaviours=open_behaviours)
    widened, words = _beyond_runs(residuals, features, seen=known, uncalibrated=uncalibrated, is_usual=is_usual)
    half_width = NORMAL * math.sqrt(widened)
    if max(_excess_variance(residuals.unseen_frameworks, open_behaviours)) > _NOTED_SPREAD**2:
        words.append("this step hangs more than theirs on what frameworks differ in")
    frameworks = len({group.family for group in residuals.unseen_frameworks})
    runs = sum(group.num_runs for group in residuals.unseen_frameworks)
    return StepInterval(
        low=math.exp(-math.hypot(math.log(low), half_width)),
        high=math.exp(math.hypot(math.log(high), half_width)),
        rests_on=f"{runs:,} runs of {frameworks} frameworks, each left out of the fit"
        + (f"; widened: {', '.join(words)}" if words else ""),
        num_runs=runs,
    )


def _count(models: Iterable[ModelResiduals]) -> int:
    return sum(runs.num_runs for runs in models)


def _weighted_quantile(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """Return the value at which the cumulative weight of sorted (value, weight) reaches `wanted`, by linear interpolation."""
    below = 0.0
    position, previous = points[0][0], (-math.inf, points[0][0])
    for value, weight in points:
        centre = below + weight / 2.0
        if centre >= wanted:
            start, position = previous
            if math.isinf(start):
                return value
            return position + (value - position) * (wanted - start) / (centre - start)
        previous = (centre, value)
        below += weight
    return points[-1][0]


def load_residuals(path: str | Path | None = None) -> Residuals:
    """Return the shipped residuals, or those of a file."""
    return _shipped() if path is None else _load(Path(path))


@lru_cache(maxsize=1)
def _shipped() -> Residuals:
    return _load(resource_dir("strategies") / "residuals.yaml")


def _load(path: Path) -> Residuals:
    from perfmodel.foundation.files import read_yaml

    try:
        data = read_yaml(path)
        models = tuple(
            ModelResiduals(
                family=str(family),
                model=str(row["model"]),
                chip=str(row["chip"]),
                scale=str(row["scale"]),
                num_runs=int(_within(row["num_runs"], 1, 1e9)),
                quantiles=_quantiles(row["quantiles"]),
                bits=int(_within(row.get("bits", 16), 1, 64)),
            )
            for family, rows in data["families"].items()
            for row in rows
        )
        unseen_frameworks, experts = (
            tuple(
                UnseenResiduals(
                    group=str(row["group"]),
                    family=str(row["family"]),
                    num_runs=int(_within(row["num_runs"], 1, 1e9)),
                    quantiles=_quantiles(row["quantiles"]),
                    open=_open(row.get("open", [0.0, 0.0])),
                )
                for row in data.get(groups, [])
            )
            for groups in ("unseen", "experts")
        )
        return Residuals(
            source=str(data["source"]),
            date=str(data["date"]),
            num_runs=int(_within(data["num_runs"], 0, 1e9)),
            between_models=_within(data["between_models"], 0, 20),
            between_chips=_within(data["between_chips"], 0, 20),
            between_calibrations=_within(data["between_calibrations"], 0, 20),
            models=models,
            unseen_frameworks=unseen_frameworks,
            experts=experts,
            features=tuple((str(name), _within(value, 0, 20)) for name, value in data.get("features", {}).items()),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"residuals={path}: cannot be read ({reason.removeprefix(f'{path}: ')}); write it with `python -m lab.residuals`"
        ) from None


def _quantiles(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise bad_field("quantiles", shown(values), "must be a list of numbers")
    return tuple(_within(value, -20, 20) for value in values)


def _open(values: object) -> tuple[float, float]:
    if not isinstance(values, list) or len(values) != 2:
        raise bad_field("open", shown(values), "must be two variances")
    return _within(values[0], 0, 400), _within(values[1], 0, 400)


def _within(value: object, least: float, most: float) -> float:
    """Return a finite number of a file: all of them are counts, or logarithms of factors."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise bad_field("number", shown(value), f"must be from {least:g} to {most:g}")
    return float(value)
