"""A whole training run around the steps of a plan: what `--tokens` adds to a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.verbs.setting import Name, Setting, load_plan, placed, predict_in, setting_of_plan

if TYPE_CHECKING:
    from perfmodel.cost.training_run import TrainingRun
    from perfmodel.hardware.assumptions import Assumption, Assumptions


def estimate_run(plan: Plan | Name | Prediction, tokens: float | str, *, assume: Mapping[str, float | str] | None = None) -> TrainingRun:
    """Failures, checkpoints, goodput, energy, carbon and cost of training on some tokens with a plan.

    plan     a plan, its file, or a prediction, whose step time is taken
    tokens   a number, or a text such as "15T"
    assume   values in place of those that `perfmodel assumptions` lists, also `location` and `price`: {"pue": 1.1, "location": "france"}
    """
    from perfmodel.foundation.values import token_count
    from perfmodel.hardware.assumptions import load_assumptions

    own = plan.plan if isinstance(plan, Prediction) else load_plan(plan)
    setting = setting_of_plan(own)
    prediction = plan if isinstance(plan, Prediction) else predict_in(setting, placed(own, setting))
    return run_in(setting, prediction, token_count(tokens), load_assumptions().with_given(assume or {}))


def run_in(setting: Setting, prediction: Prediction, tokens: float, assumptions: Assumptions) -> TrainingRun:
    """`estimate_run` of a prediction in its setting."""
    from perfmodel.cost.training_run import checkpoint_bytes, training_run
    from perfmodel.parallel.training_run import training_time

    days, _ = training_time(prediction, tokens)
    return training_run(
        tokens=tokens,
        days=days,
        num_chips=prediction.plan.num_chips,
        checkpoint_bytes=checkpoint_bytes(prediction.plan.job),
        chip_watts=setting.cluster.chip.tdp_watts,
        price_per_hour=prediction.price_per_hour,
        assumptions=assumptions,
    )


def list_assumptions() -> tuple[Assumption, ...]:
    """Constants of a whole training run, with their units and sources."""
    from perfmodel.hardware.assumptions import load_assumptions

    return tuple(load_assumptions().constants.values())
