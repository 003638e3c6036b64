"""Prediction interval with a profile that was fitted to the user's runs."""

from __future__ import annotations

import math

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.parallel.interval import NORMAL, StepInterval
from perfmodel.uncertainty.residuals import Residuals, RunFeatures


def fitted_interval(
    fitted: FittedTo, slopes: tuple[float, ...], features: RunFeatures, *, residuals: Residuals, model: str
) -> StepInterval:
    """Return the prediction interval with a profile that was fitted to the user's runs.

    slopes   derivative of log(step time) by each fitted constant, per standard deviation of its prior

    The variance is the posterior variance of the constants plus the noise of one run. A chip, a model or a rare feature that the runs lack
    adds its variance between published runs.
    """
    constants_variance = sum(slopes[i] * slopes[j] * value for i, row in enumerate(fitted.covariance) for j, value in enumerate(row))
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
    half_width = NORMAL * math.sqrt(max(constants_variance, 0.0) + fitted.noise**2 + widened)
    runs = f"{fitted.num_runs} run{'s' if fitted.num_runs > 1 else ''} of your own"
    return StepInterval(
        low=math.exp(-half_width),
        high=math.exp(half_width),
        rests_on=f"{runs}, and {fitted.base} where they say nothing" + (f"; widened: {', '.join(words)}" if words else ""),
        num_runs=fitted.num_runs,
    )
