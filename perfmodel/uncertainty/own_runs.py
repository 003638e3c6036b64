"""The interval of a prediction with a profile that was fitted to the user's runs."""

from __future__ import annotations

import math

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.parallel.interval import NORMAL, StepInterval
from perfmodel.uncertainty.residuals import Residuals, RunFeatures


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
