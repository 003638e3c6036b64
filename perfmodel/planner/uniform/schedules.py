"""Schedules over a block of plans: memory of microbatches in flight, and time of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.chip import LiveLayers, kept_memory, reserve_factor, runs_at, three_live_layers
from perfmodel.cost.memory.moments import ActivationTerms, At
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.step import RegionTimes, pipeline_step_time
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.schedule_table import AnySchedule
from perfmodel.planner.uniform.space import PipelineChoice, PipelineGroup

Array = NDArray[np.float64]


def schedules_of(choices: tuple[PipelineChoice, ...]) -> list[AnySchedule]:
    """Return the schedules of the choices, which are ordered by schedule."""
    return list(dict.fromkeys(choice.schedule for choice in choices))


def _choices_of(schedule: AnySchedule, choices: tuple[PipelineChoice, ...]) -> tuple[slice, tuple[PipelineChoice, ...], Any]:
    """Return the range of the choices of a schedule, these choices, and their virtual stages."""
    indices = [i for i, choice in enumerate(choices) if choice.schedule is schedule]
    at = slice(indices[0], indices[-1] + 1)
    return at, choices[at], np.array([float(choice.virtual_stages) for choice in choices[at]]) if schedule.takes_chunks else 1.0


def pipeline_times(
    estimator: Estimator,
    regions: RegionTimes,
    pipelines: PipelineGroup,
    pp: int,
    m: Array,
    hop: Any,
    is_timed: NDArray[np.bool_],
) -> Array:
    """Return the time of the pipeline. [layouts, micro-batches, recompute, schedules]

    is_timed   plans whose time is needed: others are not simulated
    """
    pipeline = np.empty(is_timed.shape)
    for schedule in schedules_of(pipelines.choices):
        at, _, v = _choices_of(schedule, pipelines.choices)
        of = Pipeline(schedule=schedule, num_ranks=float(pp), num_microbatches=m, virtual_stages=v, is_timed=is_timed[..., at])
        pipeline[..., at] = pipeline_step_time(regions, pipelines.stages_of(at), of, hop=hop, profile=estimator.profile).time
    return pipeline


def most_chunks(pipelines: Iterable[PipelineGroup]) -> float:
    """Return the largest number of virtual stages of a rank, by which a bubble is divided; infinite if a schedule fills it otherwise."""
    choices = chain(*(group.choices for group in pipelines))
    return max(
        inf if choice.schedule.splits_backward or choice.schedule.is_simulated else float(choice.virtual_stages) for choice in choices
    )


def least_rounds(m: Any, pp: Any, most_virtual: Any) -> Any:
    """Return a lower bound of a pipeline's time, in passes of one micro-batch over all layers: (m + (p - 1) / v) / p.

    m              micro-batches of a step
    most_virtual   `most_chunks`; interleaving needs a multiple of the ranks as micro-batches
    """
    virtual = np.where((m % pp == 0) | np.isinf(most_virtual), most_virtual, 1)
    return (m + (pp - 1.0) / virtual) / pp


def schedule_columns(
    estimator: Estimator,
    activations: ActivationTerms,
    pipelines: PipelineGroup,
    activation_bytes: float,
    pp: int,
    m: Array,
    ranks: tuple[int, ...],
    least_microbatches: int,
) -> tuple[dict[int, dict[At, Array]], dict[int, LiveLayers], NDArray[np.bool_]]:
    """Return memory of microbatches in flight, layers in flight and legality, [layouts, micro-batches, recompute, schedules].

    The memory is reserved bytes of these ranks, for each moment in `apart`. Layers in flight are those of the same ranks. A schedule is
    legal for the numbers of microbatches `m`; illegal ones need infinite memory.
    """
    shape = (*np.broadcast_shapes(*(kept_bytes.shape for kept_bytes in activations.kept), m.shape)[:-1], len(choices := pipelines.choices))
    stages = pipelines.stages
    kept = {rank: {at: np.empty(shape) for at in runs_at(rank, stages) if at in pipelines.apart} for rank in ranks}
    keeps_parameters = pp > 1 and estimator.profile.stages.pipeline_keeps_parameters
    cells = (*m.shape[:-1], len(choices)) if keeps_parameters else (1, 1, 1, 1)  # not used otherwise
    lives = {rank: LiveLayers(**{field.name: np.zeros(cells) for field in fields(LiveLayers)}) for rank in ranks}
    legal = legal_choices(choices, m, pp, least_microbatches)
    profile = estimator.profile
    factor = reserve_factor(profile, estimator.machine)
    for schedule in schedules_of(choices):
        at, chosen, v = _choices_of(schedule, choices)
        table = np.stack([choice.live for choice in chosen], axis=1)
        live = three_live_layers(table, schedule=schedule, num_ranks=pp, num_microbatches=m, num_between=stages.num_ranks - 2)
        pipeline = Pipeline(schedule=schedule, num_ranks=float(pp), num_microbatches=m, virtual_stages=v)
        moving = kept_memory(activations, pipelines.stages_of(at), pipeline, live, profile, activation_bytes=activation_bytes)
        if keeps_parameters:
            for rank in ranks:
                for field in fields(LiveLayers):
                    getattr(lives[rank], field.name)[..., at] = getattr(live[rank], field.name)
        for rank in ranks:
            for moment, in_flight in kept[rank].items():
                in_flight[..., at] = (moving[rank][moment][0] + moving[rank][moment][1]) * factor
    if not legal.all():
        kept[0][At.BLOCKS] += np.where(legal, 0.0, np.inf)
    return kept, lives, legal


def legal_choices(choices: tuple[PipelineChoice, ...], m: Array, pp: int, least_microbatches: int) -> NDArray[np.bool_]:
    """Return the legal schedules [..., schedules], for numbers of microbatches [..., 1]."""
    count = m[..., 0]
    legal = np.empty((*count.shape, len(choices)), dtype=bool)
    for i, choice in enumerate(choices):
        if choice.schedule is PipelineSchedule.GPIPE:
            legal[..., i] = count > 1  # 1f1b otherwise
        else:
            legal[..., i] = choice.schedule.admits(count, pp, choice.virtual_stages)
    legal &= m >= least_microbatches
    return legal
