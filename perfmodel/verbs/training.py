"""Totals of a training run with a plan: the figures that `--tokens` adds to a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfmodel.cost.training_run import TrainingRun, checkpoint_bytes, run_totals, training_run
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.values import token_count
from perfmodel.hardware.assumptions import Assumption, Assumptions, load_assumptions
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.training_run import training_days, training_time
from perfmodel.planner.result import Objective, TrainingSearch
from perfmodel.verbs.setting import Name, Setting, load_plan, placed, predict_in, setting_of_plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedRun:
    """Tokens of a training run, and its constants."""

    tokens: float
    assumptions: Assumptions


def estimate_run(plan: Plan | Name | Prediction, tokens: float | str, *, assume: Mapping[str, float | str] | None = None) -> TrainingRun:
    """Estimate failures, checkpoints, goodput, energy, carbon and cost of training on some tokens with a plan.

    plan     a plan, its file, or a prediction, whose step time is taken
    tokens   a number, or a text such as "15T"
    assume   values in place of those that `perfmodel assumptions` lists, also `location`, `price` and the price on one cluster or chip:
             {"pue": 1.1, "location": "france", "price.dgx-b200": 4.2}
    """
    loaded = plan.plan if isinstance(plan, Prediction) else load_plan(plan)
    setting = setting_of_plan(loaded)
    prediction = plan if isinstance(plan, Prediction) else predict_in(setting, placed(loaded, setting))
    return run_in(setting, prediction, read_run(tokens, assume))


def read_run(tokens: float | str, assume: Mapping[str, float | str] | None = None) -> AskedRun:
    """Return the run of these tokens under the shipped constants, overridden by the given ones. Raises InputError."""
    return AskedRun(tokens=token_count(tokens), assumptions=load_assumptions().with_given(assume or {}))


def run_in(setting: Setting, prediction: Prediction, asked: AskedRun) -> TrainingRun:
    """Return `estimate_run` of a prediction in its setting."""
    return training_run(
        tokens=asked.tokens,
        days=training_time(prediction, asked.tokens)[0],
        checkpoint_bytes=_checkpoint_bytes(setting),
        **_costs(setting, prediction, asked),
    )


def _checkpoint_bytes(setting: Setting) -> float:
    return checkpoint_bytes(setting.job, stores_master=setting.estimator.profile.state.stores_master_weights)


def _costs(setting: Setting, prediction: Prediction, asked: AskedRun) -> dict[str, Any]:
    """Return price and power of chips as arguments of the formulas of a run: equal for every plan on them."""
    return {
        "num_chips": prediction.plan.num_chips,
        "chip_watts": setting.cluster.mean_chip(lambda chip: chip.tdp_watts),
        "price_per_hour": prediction.conditions.price_per_hour,
        "assumptions": asked.assumptions.on(setting.cluster),
    }


def objective_values(objective: Objective, setting: Setting, plans: Sequence[Prediction], asked: AskedRun) -> tuple[float, ...]:
    """Return the objective of a training run for plans of one job on the setting's chips. [USD, J or day]"""
    if not plans:
        return ()
    job, costs = setting.job, _costs(setting, plans[0], asked)
    share = training_run(tokens=asked.tokens, days=1.0, checkpoint_bytes=_checkpoint_bytes(setting), **costs).goodput  # of every plan
    steps = np.array([plan.step_time for plan in plans])
    days = training_days(steps, tokens=asked.tokens, tokens_per_step=job.tokens_per_step)
    totals = run_totals(days, goodput=share, **costs)
    column = {Objective.COST: totals.cost, Objective.ENERGY: totals.energy}.get(objective, totals.wall_days)
    return tuple(np.asarray(column).tolist())


def check_objective(objective: str, setting: Setting, asked: AskedRun | None) -> None:
    """Raise InputError for an objective of a run without its tokens, a cost without a price or an energy without a power."""
    chip = setting.cluster.chip
    if objective not in [member for member in Objective if member.is_of_run]:
        return
    if asked is None:
        raise InputError(f"objective={objective}: is of the whole run; give its tokens, as --tokens 15T")
    if objective == Objective.COST and not (asked.assumptions.on(setting.cluster).price or chip.price_per_hour):
        raise InputError(f"objective=cost: no price of {chip.name} is known; give one, as --assume price=2.5 (USD for a chip-hour)")
    if objective == Objective.ENERGY and not chip.tdp_watts:
        raise InputError(f"objective=energy: the power of {chip.name} is not known; add it to the chip's file, or rank by time")


def with_run_values(result: TrainingSearch, setting: Setting, asked: AskedRun | None) -> TrainingSearch:
    """Return the result with the values of its plans by an objective of the training run; unchanged for another objective."""
    if asked is None or not result.objective.is_of_run:
        return result
    values, of_kinds = (
        objective_values(result.objective, setting, predictions, asked)
        for predictions in (result.plans, [kind.prediction for kind in result.ranking.kinds])
    )
    kinds = tuple(replace(kind, value=value) for kind, value in zip(result.ranking.kinds, of_kinds, strict=True))
    return replace(result, ranking=replace(result.ranking, values=values, kinds=kinds))


def list_assumptions() -> tuple[Assumption, ...]:
    """Return the constants of a training run, with their units and sources."""
    return tuple(load_assumptions().constants.values())
