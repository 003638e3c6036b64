"""What of a profile was fitted to runs of one's own, and how well it is known: what intervals of its predictions are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.residuals import NORMAL, Residuals, RunFeatures, StepInterval


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant of the profile that runs could move.

    fields         that it is, in the profile; the first one is its value
    prior          its value without the runs
    prior_spread   one standard deviation of that: of the logarithm, or where `is_ratio` is false of the value
    share_known    1 - (standard deviation with the runs / without)^2
    """

    fields: tuple[str, ...]
    prior: float
    prior_spread: float
    is_ratio: bool
    share_known: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTo:
    """Runs that a profile was fitted to; none of a profile that ships.

    base            the profile that the fit started from
    noise           |log(measured / predicted)| of a further run with the best of constants
    left_out_error  mean of |predicted / measured - 1| of each run by the others
    models, chips   of the runs: shapes (`residuals.shape_of`) and names
    features        of the runs that few published ones have, `8-bit products` among them (`residuals.RunFeatures.named`)
    covariance      of the constants, in spreads of their priors
    """

    base: str = ""
    date: str = ""
    num_runs: int = 0
    noise: float = 0.0
    left_out_error: float = 0.0
    models: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    constants: tuple[FittedConstant, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        n = len(self.constants)
        if len(self.covariance) != n or any(len(row) != n for row in self.covariance):
            raise InputError(f"covariance: must have {n} rows of {n} numbers, one for each of the constants; fit again")
        if not (0 <= self.noise < 20 and self.num_runs >= 0):
            raise bad_field("noise", self.noise, "must be from 0 to 20, of a fit to no fewer than no runs", "fit again")


NOTHING = FittedTo()


def own_interval(fitted: FittedTo, slopes: tuple[float, ...], features: RunFeatures, *, residuals: Residuals, model: str) -> StepInterval:
    """Interval around a prediction with a profile that was fitted to the user's own runs.

    slopes      of log(step time) in each fitted constant, a spread of its prior

    The variance is that of the constants as far as the runs leave it open, and of a run about the best of them; a chip, a model or a rare
    feature of which the runs show nothing adds what these differ by in published ones.
    """
    open_ = sum(slopes[i] * slopes[j] * value for i, row in enumerate(fitted.covariance) for j, value in enumerate(row))
    widened, words = 0.0, []
    if features.chip not in fitted.chips:
        widened += residuals.between_chips**2
        words.append(f"none on {features.chip}")
    if model not in fitted.models:
        widened += residuals.between_models**2
        words.append("none of this model")
    for feature in sorted(features.named() - set(fitted.features)):
        widened += residuals.spread_of(feature) ** 2
        words.append(f"none with {feature}")
    reach = NORMAL * math.sqrt(max(open_, 0.0) + fitted.noise**2 + widened)
    runs = f"{fitted.num_runs} run{'s' if fitted.num_runs > 1 else ''} of your own"
    return StepInterval(
        low=math.exp(-reach),
        high=math.exp(reach),
        rests_on=f"{runs}, and {fitted.base} where they say nothing" + (f"; widened: {', '.join(words)}" if words else ""),
        num_runs=fitted.num_runs,
    )
