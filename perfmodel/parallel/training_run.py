"""Duration and price of a training run of many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.foundation.columns import Column

if TYPE_CHECKING:
    from perfmodel.parallel.prediction import Prediction

SECONDS_OF_A_DAY, SECONDS_OF_AN_HOUR = 86400.0, 3600.0


def training_days(step_time: Column, *, tokens: float, tokens_per_step: float) -> Column:
    """Return the days of training on `tokens` tokens without interruption. step_time: a number or an array [s]"""
    return tokens / tokens_per_step * step_time / SECONDS_OF_A_DAY


def training_time(prediction: Prediction, tokens: float) -> tuple[float, float]:
    """Return the days and the chip-hours of training on `tokens` tokens without interruption."""
    days = float(training_days(prediction.step_time, tokens=tokens, tokens_per_step=prediction.plan.job.tokens_per_step))
    return days, days * SECONDS_OF_A_DAY / SECONDS_OF_AN_HOUR * prediction.plan.num_chips


def training_cost(prediction: Prediction, tokens: float) -> float:
    """Return the price of the chip-hours of `training_time`; 0 if the price of the chip is unknown. [USD]"""
    return training_time(prediction, tokens)[1] * prediction.conditions.price_per_hour
