"""Prediction intervals of step times, from the errors of published runs.

A family is an execution profile. It keeps, of each model that was published with it, quantiles of r = log(measured / predicted), by
chip, scale and bits of the products. Only these ship, not the runs (`strategies/residuals.yaml`, written by
`python -m lab.residuals`).
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

#: Scales with errors of their own: a node, a few, many (what the network shares, who waits for whom).
_SCALES = ((8, "one node"), (64, "several nodes"), (math.inf, "many nodes"))

_ENOUGH = 10
"""Runs that quantiles are taken of; with fewer the next wider set is taken."""


_PRIOR_RUNS = 3
"""Runs that the spread of unseen frameworks counts as, next to a framework's own runs."""


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
        """The rare features, and the bits of the products where they are fewer than 16."""
        return self.rare if self.bits >= 16 else self.rare | {f"{self.bits}-bit products"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResiduals:
    """Residuals of the runs of one model on one chip, at one scale, with products of as many bits.

    model       its shape (`shape_of`), whatever its name        num_runs  how many
    quantiles   of log(measured / predicted), at (i + 1/2) / n; as many as there are runs where those are few
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
    """Residuals of a group of runs as predicted by who does not know their framework: with `generic`, the framework left out.

    family   the profile that was left out
    open     what habits that nobody told left open of a run, on average: variance of log(step time) below the prediction, and above
    """

    group: str
    family: str
    num_runs: int
    quantiles: tuple[float, ...]
    open: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Every family's residuals.

    between_models     standard deviation of a model's median about its family's
    between_chips      the same of a chip about its family, each with a calibration of its own
    experts            of models with experts, by source: no constant is fitted to any of these runs
    between_calibrations   the same of a chip that is predicted with another chip's calibration, about 0: a chip without one
    features           root mean square of the residuals of runs with a feature that nothing was fitted to, each source weighing one
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

    def spread_of(self, feature: str) -> float:
        """Standard deviation of log(step time) of a run with a feature that its framework's runs lack.

        A feature without any published run has that of those with runs, in the root mean square.
        """
        spreads = dict(self.features)
        if feature in spreads or not spreads:
            return spreads.get(feature, 0.0)
        return math.sqrt(sum(value**2 for value in spreads.values()) / len(spreads))


def scale_of(num_chips: float) -> str:
    return next(name for bound, name in _SCALES if num_chips <= bound)


def shape_of(model: TransformerConfig) -> str:
    """A model's architecture and sizes: two names for one shape are one model."""
    return (
        f"{model.architecture} {model.num_hidden_layers}x{model.hidden_size} {model.num_attention_heads}/{model.num_key_value_heads} "
        f"{model.intermediate_size}"
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
    """Quantiles of the family's runs that are most alike, widened by what those runs cannot show.

    borrows         the framework has the family's profile for want of its own, and is an unseen framework
    uncalibrated    what the chip has in place of a whole calibration of its own, in words; empty if it has one
    is_usual        the calibration is the one that the runs on this chip were predicted with
    unseen          shape of a model whose runs are not looked at
    open_habits     of an unseen framework: variance of log(step time), below and above, that settings which were not given leave open

    Either side of n runs has the half-width w = sqrt((n w_own^2 + n0 w_unseen^2) / (n + n0)): with few runs it is nearly that of an
    unseen framework, which counts as n0 = 3 runs. The runs of k models show how runs of a model differ and, between them, how models do;
    a further model lies about their mean, itself known to sigma^2 / k, so 2 sigma^2 / k of the variance between models is not in the
    pooled quantiles. It is added in quadrature to each side; so are the variances of chips and of rare features without runs.
    """
    known = [each for each in residuals.models if each.model != unseen]
    own = [each for each in known if each.family == family]
    if borrows or not own:
        return _of_unseen(residuals, features, known=known, uncalibrated=uncalibrated, is_usual=is_usual, open_behaviours=open_behaviours)
    chosen, alike = _most_alike(own, features)
    num_runs, num_models = _count(chosen), len({each.model for each in chosen})
    widened, words = _beyond_runs(residuals, features, seen=own, uncalibrated=uncalibrated, is_usual=is_usual)
    widened += 2.0 / num_models * residuals.between_models**2
    below, middle, above = (_quantile(chosen, share) for share in (TAIL, 0.5, 1.0 - TAIL))
    unseen_below, unseen_above = (abs(math.log(factor)) for factor in unseen_interval(residuals.unseen_frameworks))
    more = NORMAL * math.sqrt(widened)
    low = math.hypot(_shrunk(middle - below, unseen_below, num_runs), more)
    high = math.hypot(_shrunk(above - middle, unseen_above, num_runs), more)
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
"""Runs up to which a note says that they are few."""


def _shrunk(own: float, unseen: float, num_runs: int) -> float:
    return math.sqrt((num_runs * own**2 + _PRIOR_RUNS * unseen**2) / (num_runs + _PRIOR_RUNS))


def _most_alike(own: Sequence[ModelResiduals], features: RunFeatures) -> tuple[Sequence[ModelResiduals], str]:
    """The family's runs that share most with the features, of the sets that hold enough, and in words what they share."""
    of_bits = [each for each in own if each.bits == features.bits]
    of_chip = [each for each in of_bits if each.chip == features.chip]
    bits = "" if features.bits == 16 else f" in {features.bits} bits"
    at_scale = f" on {features.scale}"
    choices = (
        ([each for each in of_chip if each.scale == features.scale], f"{bits} on {features.chip},{at_scale}"),
        (of_chip, f"{bits} on {features.chip}"),
        ([each for each in of_bits if each.scale == features.scale], f"{bits}{at_scale}"),
        (of_bits, bits),
        ([each for each in own if each.scale == features.scale], at_scale),
    )
    return next(((found, alike) for found, alike in choices if _count(found) >= _ENOUGH), (own, ""))


def _beyond_runs(
    residuals: Residuals, features: RunFeatures, *, seen: Sequence[ModelResiduals], uncalibrated: str, is_usual: bool
) -> tuple[float, list[str]]:
    """Variance of log(step time) by what the runs that were seen do not have, and in words what that is."""
    words, widened = [], 0.0
    if not is_usual:
        widened += residuals.between_calibrations**2
        words.append("another calibration than theirs")
    elif all(each.chip != features.chip for each in seen):
        widened += (residuals.between_calibrations if uncalibrated else residuals.between_chips) ** 2
        words.append(f"none on {features.chip}{f', which has {uncalibrated}' if uncalibrated else ''}")
    has_bits = any(each.bits == features.bits for each in seen)
    for feature in sorted(features.rare if has_bits else features.named()):
        widened += residuals.spread_of(feature) ** 2
        words.append(f"none with {feature}")
    return widened, words


def unseen_interval(
    unseen_frameworks: Sequence[UnseenResiduals], *, without: str = "", open_behaviours: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Factors of the prediction for a framework that nobody knows. `without`: the framework whose groups are not looked at.

    Quantiles of all groups, each weighing one, however many runs it has. Pooled, k groups show 1 - 1 / k of the variance of their medians,
    and a further one lies about their mean with 1 + 1 / k of it: 2 / k of it is added. Their runs hang on habits that nobody told as far
    as `open` says; a plan that hangs on them more has the difference in variance more, on either side.
    """
    chosen = [each for each in unseen_frameworks if each.family != without]
    if not chosen:
        raise InputError("residuals: hold no runs of unseen frameworks; write them with `python -m lab.residuals`")
    points = sorted((point, 1.0 / len(each.quantiles)) for each in chosen for point in each.quantiles)
    medians = [_place(sorted((point, 1.0) for point in each.quantiles), 0.5 * len(each.quantiles)) for each in chosen]
    centre = sum(medians) / len(medians)
    variance = sum((value - centre) ** 2 for value in medians) / max(1, len(medians) - 1)
    low, middle, high = (_place(points, share * len(chosen)) for share in (TAIL, 0.5, 1.0 - TAIL))
    more = NORMAL * math.sqrt(2.0 * variance / len(chosen))
    low, high = min(middle - math.hypot(middle - low, more), 0.0), max(middle + math.hypot(high - middle, more), 0.0)
    below, above = (NORMAL * math.sqrt(each) for each in _beyond(chosen, open_behaviours))
    return math.exp(-math.hypot(low, below)), math.exp(math.hypot(high, above))


def with_experts(found: StepInterval, experts: Sequence[UnseenResiduals]) -> StepInterval:
    """Interval of a mixture-of-experts model: at least as wide as the errors of such runs, each source with the same weight."""
    if not experts:
        return found
    low, high = unseen_interval(experts)
    runs = sum(each.num_runs for each in experts)
    says = f"{runs} runs of models with experts from {len(experts)} sources, to which nothing is fitted"
    return replace(found, low=min(found.low, low), high=max(found.high, high), rests_on=f"{says}; {found.rests_on}")


def _beyond(unseen_frameworks: Sequence[UnseenResiduals], open_behaviours: tuple[float, float]) -> tuple[float, float]:
    """Variance, below and above, that habits leave open in a plan beyond what they do in those runs, every group weighing one."""
    below, above = (
        max(open_behaviours[side] - sum(each.open[side] for each in unseen_frameworks) / len(unseen_frameworks), 0.0) for side in (0, 1)
    )
    return below, above


_WORTH_SAYING = 0.05
"""[log of the step time] A standard deviation from which a note says that the fitted parameters widen an interval."""


def _of_unseen(
    residuals: Residuals,
    features: RunFeatures,
    *,
    known: Sequence[ModelResiduals],
    uncalibrated: str,
    is_usual: bool,
    open_behaviours: tuple[float, float],
) -> StepInterval:
    """Runs of the profile that was lent say nothing about who borrows it: how far off others' runs were when their framework was hidden."""
    low, high = unseen_interval(residuals.unseen_frameworks, open_behaviours=open_behaviours)
    widened, words = _beyond_runs(residuals, features, seen=known, uncalibrated=uncalibrated, is_usual=is_usual)
    more = NORMAL * math.sqrt(widened)
    if max(_beyond(residuals.unseen_frameworks, open_behaviours)) > _WORTH_SAYING**2:
        words.append("this step hangs more than theirs on what frameworks differ in")
    frameworks, runs = (
        len({each.family for each in residuals.unseen_frameworks}),
        sum(each.num_runs for each in residuals.unseen_frameworks),
    )
    return StepInterval(
        low=math.exp(-math.hypot(math.log(low), more)),
        high=math.exp(math.hypot(math.log(high), more)),
        rests_on=f"{runs:,} runs of {frameworks} frameworks, each left out of the fit"
        + (f"; widened: {', '.join(words)}" if words else ""),
        num_runs=runs,
    )


def _count(models: Iterable[ModelResiduals]) -> int:
    return sum(each.num_runs for each in models)


def _quantile(models: Sequence[ModelResiduals], share: float) -> float:
    """Quantile of the pooled runs. A further run falls into each of n + 1 places with the same probability; `share` of them lie below."""
    points = sorted((point, each.num_runs / len(each.quantiles)) for each in models for point in each.quantiles)
    return _place(points, share * (sum(weight for _, weight in points) + 1.0) - 0.5)


def _place(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """Where the weights of sorted (value, weight) reach `wanted`, linear between the middles of neighbours."""
    below = 0.0
    place, previous = points[0][0], (-math.inf, points[0][0])
    for value, weight in points:
        centre = below + weight / 2.0
        if centre >= wanted:
            start, place = previous
            if math.isinf(start):
                return value
            return place + (value - place) * (wanted - start) / (centre - start)
        previous = (centre, value)
        below += weight
    return points[-1][0]


def load_residuals(path: str | Path | None = None) -> Residuals:
    """The shipped residuals, or those of a file."""
    return _load(resource_dir("strategies") / "residuals.yaml" if path is None else Path(path))


@lru_cache(maxsize=8)
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
            for groups in ("strangers", "experts")
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
    """A finite number of a file; all of them are counts, or logarithms of factors."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise bad_field("number", shown(value), f"must be from {least:g} to {most:g}")
    return float(value)
