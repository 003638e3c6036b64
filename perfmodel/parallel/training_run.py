"""Duration and price of a training run of many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import Prediction

SECONDS_OF_A_DAY, SECONDS_OF_AN_HOUR = 86400.0, 3600.0


def training_time(prediction: Prediction, tokens: float) -> tuple[float, float]:
    """Return the days and the chip-hours of training on `tokens` tokens without a pause."""
    steps = tokens / prediction.plan.job.tokens_per_step
    seconds = steps * prediction.step_time
    return seconds / SECONDS_OF_A_DAY, seconds * prediction.plan.num_chips / SECONDS_OF_AN_HOUR


def training_cost(prediction: Prediction, tokens: float) -> float:
    """Return the price of the chip-hours of `training_time`; 0 where no price of the chip is known. [USD]"""
    return training_time(prediction, tokens)[1] * prediction.price_per_hour
