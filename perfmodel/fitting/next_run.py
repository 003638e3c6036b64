"""Most informative next run: among simple variations of the given runs, on their chips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfmodel.fitting.fit import LogTimes, UserFit, UserRun
from perfmodel.fitting.result import NextRun
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.validation.step_times import estimator_of

_MOST_RUNS, _MOST_CANDIDATES = 4, 20
_MOST_STEPS_LONGER = 4.0
"""Upper bound of a suggestion's step time, relative to the longest given step."""


def next_run(fit: UserFit, runs: Sequence[UserRun]) -> tuple[NextRun, ...]:
    """Return the most informative variation, or none where no variation fits the chips.

    The gain is the reduction of the mean variance over the runs and all variations.
    """
    candidates = list(_variations(runs))[:_MOST_CANDIDATES]
    if not candidates:
        return ()
    log_times = LogTimes(runs=candidates, base=fit.base, behaviours=fit.behaviours)
    log_predicted, slopes = log_times.at(fit.values), log_times.slopes(fit.values)
    judged = np.concatenate([slopes, fit.posterior.slopes])
    shared = judged @ fit.posterior.covariance @ slopes.T  # [judged, candidates]
    gains = (shared**2).sum(axis=0) / fit.spread(slopes) ** 2
    before = float((fit.spread(judged) ** 2).mean())
    longest = max(run.measured for run in runs) * _MOST_STEPS_LONGER
    for index in np.argsort(-gains):
        run = candidates[index]
        if np.exp(log_predicted[index]) <= longest and estimator_of(run, fit.profile).predict(run.planned.plan).fits:
            after = max(before - float(gains[index]) / len(judged), fit.noise**2)
            return (
                NextRun(
                    plan=run.planned.plan,
                    differs=run.id,
                    step_time=float(np.exp(log_predicted[index])),
                    spread_before=before**0.5,
                    spread_after=after**0.5,
                ),
            )
    return ()


def _variations(runs: Sequence[UserRun]) -> Iterator[UserRun]:
    """Yield variations with one change, described in `id`; none that was measured, none twice."""
    seen = {_key(run.planned.plan) for run in runs}
    for run in runs[:_MOST_RUNS]:
        for differs, changes in _changes(run.planned.plan):
            plan = _changed(run.planned.plan, changes)
            if plan is not None and _key(plan) not in seen:
                seen.add(_key(plan))
                yield replace(run, id=f"{differs} of {run.id}", planned=replace(run.planned, plan=plan))


def _key(plan: Plan) -> tuple[Any, ...]:
    job = plan.job
    return (
        job.transformer.name, job.global_batch, job.seq_len, plan.num_chips, plan.layout, int(plan.zero), plan.micro_batch,
        plan.virtual_stages, plan.recompute, plan.sequence_parallel,
    )  # fmt: skip


def _changes(plan: Plan) -> Iterator[tuple[str, Mapping[str, int | str]]]:
    layout = plan.layout
    for micro_batch in (plan.micro_batch * 2, plan.micro_batch // 2, plan.micro_batch * 4):
        yield f"micro_batch {micro_batch} in place of {plan.micro_batch}", {"micro_batch": micro_batch}
    for axis in ("tp", "pp"):
        for degree in (layout.degree(axis) * 2, layout.degree(axis) // 2):
            yield f"{axis} {degree} in place of {layout.degree(axis)}", {axis: degree}
    for recompute in ("none", "full"):
        if plan.recompute != recompute:
            yield f"recompute {recompute} in place of {plan.recompute}", {"recompute": recompute}
    for seq_len in (plan.job.seq_len * 2, plan.job.seq_len // 2):
        if seq_len <= plan.job.transformer.positions.max_position_embeddings:
            yield f"sequences of {seq_len} in place of {plan.job.seq_len}", {"seq_len": seq_len}


def _changed(plan: Plan, changes: Mapping[str, int | str]) -> Plan | None:
    """Return the changed plan, on the same chips and with the same tokens a step; None where there is no such plan."""
    layout, job = plan.layout, plan.job
    degrees = {axis: int(changes.get(axis, layout.degree(axis))) for axis in ("tp", "pp", "cp")}
    ways = degrees["tp"] * degrees["pp"] * degrees["cp"]
    seq_len = int(changes.get("seq_len", job.seq_len))
    batch = job.global_batch * job.seq_len // max(seq_len, 1)
    if not all(degrees.values()) or not seq_len or plan.num_chips % ways or not batch:
        return None
    dp = plan.num_chips // ways
    replicate = layout.dp_replicate if int(plan.zero) and dp % layout.dp_replicate == 0 else 1 if int(plan.zero) else dp
    try:
        return make_plan(
            replace(job, global_batch=batch, seq_len=seq_len),
            cluster=plan.cluster,
            num_chips=plan.num_chips,
            **degrees,
            dp_replicate=replicate,
            dp_shard=dp // replicate,
            zero=int(plan.zero),
            sequence_parallel=degrees["tp"] > 1 and (plan.sequence_parallel or layout.tp == 1),
            micro_batch=int(changes.get("micro_batch", plan.micro_batch)),
            recompute=str(changes.get("recompute", plan.recompute)),
            recompute_operators=plan.recompute_operators,
            virtual_stages=1 if "pp" in changes else plan.virtual_stages,
            attention=str(plan.attention),
            profile=plan.profile,
        )
    except InputError:
        return None
