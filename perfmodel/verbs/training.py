"""A whole training run around the steps of a plan: what `--tokens` adds to a prediction."""

from __future__ import annotations

from collections.abc import Mapping

from perfmodel.cost.training_run import TrainingRun, checkpoint_bytes, training_run
from perfmodel.foundation.values import token_count
from perfmodel.hardware.assumptions import Assumption, Assumptions, load_assumptions
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.training_run import training_time
from perfmodel.verbs.api import predict_plan
from perfmodel.verbs.setting import Name, Setting, setting_of_plan


def estimate_run(plan: Plan | Name | Prediction, tokens: float | str, *, assume: Mapping[str, float | str] | None = None) -> TrainingRun:
    """Failures, checkpoints, goodput, energy, carbon and cost of training on some tokens with a plan.

    plan     a plan, its file, or a prediction, whose step time is taken
    tokens   a number, or a text such as "15T"
    assume   values in place of those that `perfmodel assumptions` lists, also `location` and `price`: {"pue": 1.1, "location": "france"}
    """
    prediction = plan if isinstance(plan, Prediction) else predict_plan(plan)
    return run_in(setting_of_plan(prediction.plan), prediction, token_count(tokens), load_assumptions().with_given(assume or {}))


def run_in(setting: Setting, prediction: Prediction, tokens: float, assumptions: Assumptions) -> TrainingRun:
    """`estimate_run` of a prediction in its setting."""
    return training_run(
        tokens=tokens,
        days=training_time(prediction, tokens)[0],
        num_chips=prediction.plan.num_chips,
        checkpoint_bytes=checkpoint_bytes(prediction.plan.job),
        chip_watts=setting.cluster.chip.tdp_watts,
        price_per_hour=prediction.price_per_hour,
        assumptions=assumptions,
    )


def list_assumptions() -> tuple[Assumption, ...]:
    """Constants of a whole training run, with their units and sources."""
    return tuple(load_assumptions().constants.values())
