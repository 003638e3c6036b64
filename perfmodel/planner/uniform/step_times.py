"""Step times of a block of plans [layouts, micro-batches, recompute, schedules] of one ZeRO stage, from their pipeline times."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.assemble import Waits, exposed_each_microbatch, outside_pipeline, overlapped_send_time
from perfmodel.cost.estimate import Estimator
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.repeated_gathers import repeated_gather_time
from perfmodel.cost.step import RegionTimes, beat_of
from perfmodel.cost.update import ParameterTerms
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.pass_orders import MOST_GATHERED
from perfmodel.planner.uniform.schedules import schedules_of
from perfmodel.planner.uniform.space import PipelineGroup
from perfmodel.planner.uniform.tables import Index, ParameterTable

Array = NDArray[np.float64]


def step_times(
    estimator: Estimator,
    pipeline: Array,
    terms: ParameterTerms,
    tied: Any,
    regions: RegionTimes,
    pipelines: PipelineGroup,
    *,
    pp: int,
    num_microbatches: Array,
    hop: Array,
) -> Array:
    """Return the sum of `cost/assemble.py` for one plan, in the same order.

    pipeline  [layouts, micro-batches, recompute, schedules]; the last dim are the choices of `pipelines`    [s]

    Outside the pipeline only waits depend on the schedule: gpipe has another beat. Repeated gathers are not part of it
    (`add_repeated_gathers`), so that it is a lower bound where many virtual stages gather weights again.
    """
    waiting, stages = pp > 1 and terms.program.waits, pipelines.stages
    gpipe = [i for i, choice in enumerate(pipelines.choices) if choice.schedule is PipelineSchedule.GPIPE]

    def waits_of(schedule: PipelineSchedule) -> Waits:
        return exposed_each_microbatch(terms, regions, stages, schedule=schedule, num_ranks=float(pp), profile=estimator.profile)

    waits = waits_of(PipelineSchedule.ONE_F_ONE_B)  # interleaved too: the beat is the same
    gpipe_waits = waits_of(PipelineSchedule.GPIPE) if waiting and gpipe else waits
    if waiting:
        pipeline = _less_hidden_sends(estimator, pipeline, waits, gpipe_waits, regions, pipelines, pp=pp, m=num_microbatches, hop=hop)

    def outside_time(waits: Waits) -> Array:
        return np.asarray(outside_pipeline(estimator, terms, tied, regions, stages, waits, num_microbatches=num_microbatches).total)

    step = pipeline + pipelines.of_choices(outside_time(waits))
    if waiting and gpipe:
        step[..., gpipe] = (pipeline + pipelines.of_choices(outside_time(gpipe_waits)))[..., gpipe]
    return step


def add_repeated_gathers(
    estimator: Estimator,
    step: Array,
    pipeline: Array,
    is_needed: NDArray[np.bool_],
    table: ParameterTable,
    keys: Index,
    regions: RegionTimes,
    pipelines: PipelineGroup,
    *,
    pp: int,
    num_microbatches: Array,
) -> None:
    """Add the exposed time of weights that many virtual stages gather again (`cost/repeated_gathers.py`) to the `step_times` of plans.

    is_needed    plans whose time is needed exactly; others stay a lower bound
    table, keys  parameters of the layouts
    """
    for i, choice in enumerate(pipelines.choices):
        if choice.virtual_stages <= MOST_GATHERED:
            continue
        at = np.flatnonzero(is_needed[..., i].any(axis=(1, 2)))
        if not len(at):
            continue
        terms, tied = table.block(keys[at])
        of, stages, m = regions.map_columns(itemgetter(at)), pipelines.stages_of([i]), num_microbatches
        m = m if len(m) == 1 else m[at]
        shape = Pipeline(schedule=choice.schedule, num_ranks=float(pp), num_microbatches=m, virtual_stages=float(choice.virtual_stages))
        waits = Waits(gathered_again=repeated_gather_time(terms, of, stages, shape, estimator.profile))
        outside = outside_pipeline(estimator, terms, tied, of, stages, waits, num_microbatches=m).total
        step[at, ..., i : i + 1] = pipeline[at, ..., i : i + 1] + outside


def _less_hidden_sends(
    estimator: Estimator,
    pipeline: Array,
    waits: Waits,
    gpipe_waits: Waits,
    regions: RegionTimes,
    pipelines: PipelineGroup,
    *,
    pp: int,
    m: Array,
    hop: Array,
) -> Array:
    """Return the pipeline time less `overlapped_send_time`; unchanged where no send sets the pace."""
    profile, p, choices, stages = estimator.profile, float(pp), pipelines.choices, pipelines.stages
    most = max(choice.virtual_stages for choice in choices)
    # the beat of gpipe is no shorter
    shortest = beat_of(regions, stages, schedule=PipelineSchedule.ONE_F_ONE_B, num_ranks=p, profile=profile)
    if not np.any((2.0 + 1e-9) * most * hop > shortest):
        return pipeline
    less = np.empty_like(pipeline)
    for schedule in schedules_of(choices):
        indices = [i for i, choice in enumerate(choices) if choice.schedule is schedule]
        virtual_stages = np.array([float(choices[i].virtual_stages) for i in indices])
        exposed = np.asarray((gpipe_waits if schedule is PipelineSchedule.GPIPE else waits).total)
        less[..., indices] = pipeline[..., indices] - overlapped_send_time(
            pipelines.of_choices(exposed, indices),
            beat_of(regions, pipelines.stages_of(indices), schedule=schedule, num_ranks=p, profile=profile),
            Pipeline(schedule=schedule, num_ranks=p, num_microbatches=m, virtual_stages=virtual_stages),
            hop=hop,
            profile=profile,
        )
    return less
