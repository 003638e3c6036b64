"""Exposed time of parameter all-gathers, gradient reductions and pipeline sends that overlap with compute.

The overlap window of a collective is the full time of a pass, host time and waits included. Other collectives that overlap with the
pass are subtracted from it, and so is the time in which operators' own collectives occupy the inter-node links. A link therefore
carries one collective at a time, and faster hardware is never slower (`tests/laws/test_faster_is_never_slower.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.stages import Ranks, Stages, neighbour, plus, slowest_stage, stage_sums, total_pass
from perfmodel.cost.step import RegionTimes, beat_with, exposed_sends
from perfmodel.cost.update import ParameterTerms
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.schedule_table import AnySchedule


def _exposed_time(communication: Column, compute: Column, *, hides: bool, share: float = 0.0) -> Any:
    """Return the exposed time of communication next to compute. share: part of the overlapped time that slows down the compute."""
    if not hides:
        return communication
    exposed = np.maximum(communication - compute, 0.0)
    return exposed + share * np.minimum(communication, compute) if share else exposed


def parameter_time(
    terms: ParameterTerms,
    regions: RegionTimes,
    stages: Stages,
    waits: Waits,
    *,
    num_microbatches: Column,
    profile: ExecutionProfile,
) -> tuple[Any, Any]:
    """Return the exposed parameter gathers and the exposed gradient reductions (with publishing) of a step. [s]

    A gather overlaps with the region before it: a layer's with the previous layer, the first layer's with the embedding, the head's with
    the last layer. The first gather of a stage is exposed. In backward, gathers and reductions share the links.

        reductions once a step                    max(0, t - window) + s min(t, window)
        unsharded gradients, every micro-batch    m max(0, t - window) + s min(t, window)

    waits   exposed gathers and reductions of every micro-batch
    window  backward of the last micro-batch, less its own gathers and reductions
    s       share of the overlappable time that stays exposed
    """
    m = num_microbatches
    overlaps = terms.zero in profile.communication.overlaps_gradients
    slowdown = profile.timing.compute_slowdown_under_communication
    happens = terms.program.happens
    gather = m * waits.gather + waits.gathered_again
    if ("gather_forward", "step") in happens or ("gather_backward", "step") in happens:
        gather = gather + slowest_stage(plus(*_exposed_gathers(terms, regions, stages, "step", profile)))
    reduction = m * waits.reduction
    windows = left = _backward_windows(terms, regions, profile)
    # share of the overlap with the last micro-batch's backward that stays exposed
    share = min(profile.exposed_share(terms.zero) + slowdown, 1.0)
    if ("reduce", "microbatch") in happens:
        reduce = terms.reduce["microbatch"]
        if overlaps and terms.zero == 0 and share:
            pairs = zip(stage_sums(reduce, stages), stage_sums(left, stages), strict=True)
            reduction = reduction + share * slowest_stage(tuple(np.minimum(t, w) for t, w in pairs))
        windows = tuple(np.maximum(window - time, 0.0) for window, time in zip(left, reduce, strict=True))
    if ("reduce", "step") in happens:
        once = stage_sums(terms.reduce["step"], stages)
        if overlaps:
            # reductions once a step overlap with what the last micro-batch's own gathers and reductions leave of the window;
            # a rank whose waits are below the pipeline's increase in pace gains the difference
            rank_windows = stage_sums(windows, stages)
            if waits_each_microbatch(terms):
                rank_windows = plus(rank_windows, tuple(np.maximum(waits.total - wait, 0.0) for wait in waits.per_rank))
            once = tuple(np.maximum(t - w, 0.0) + share * np.minimum(t, w) for t, w in zip(once, rank_windows, strict=True))
        reduction = reduction + slowest_stage(once)
    if ("publish", "step") in happens:
        reduction = reduction + profile.timing.publish_factor * slowest_stage(stage_sums(terms.publish, stages))
    for times, sums in terms.tp_sum.items():
        # sums over tp are exposed: the reduction over the data axes depends on them
        exposed_sums = slowest_stage(stage_sums(sums, stages))
        reduction = reduction + (m * exposed_sums if times == "microbatch" else exposed_sums)
    return gather, reduction


def waits_each_microbatch(terms: ParameterTerms) -> bool:
    """Return whether every micro-batch gathers parameters or reduces gradients."""
    return any((event, "microbatch") in terms.program.happens for event in ("gather_forward", "gather_backward", "reduce"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Time that every micro-batch's gathers and reductions add to the pipeline's pace. [s]

    per_rank         exposed time of each rank alone
    gathered_again   exposed time of repeated gathers in a step (`repeated_gather_time`)
    """

    gather: Column = 0.0
    reduction: Column = 0.0
    per_rank: Ranks = ()
    gathered_again: Column = 0.0

    @property
    def total(self) -> Any:
        return self.gather + self.reduction


def exposed_each_microbatch(
    terms: ParameterTerms,
    regions: RegionTimes,
    stages: Stages,
    *,
    schedule: AnySchedule,
    num_ranks: Column,
    profile: ExecutionProfile,
) -> Waits:
    """Return the exposed time of every micro-batch's gathers and reductions.

    A rank that computes less than the slowest can wait for the difference without slowing down the pipeline.
    """
    happens, weight = terms.program.happens, profile.timing.uneven_stage_weight
    gather: Column = 0.0
    reduction: Column = 0.0
    per_rank: Ranks = (0.0,) * stages.num_ranks
    gathers = ("gather_forward", "microbatch") in happens or ("gather_backward", "microbatch") in happens
    if not gathers and ("reduce", "microbatch") not in happens:
        return Waits()
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    is_mean = weight != 1.0  # otherwise the totals are unused
    totals: tuple[Any, Any] = (0.0, 0.0)
    if is_mean:
        totals = total_pass(regions.forward, stages), total_pass(regions.backward, stages)
    beat = beat_with(f, b, totals, schedule, num_ranks, weight)
    if gathers:
        exposed_f, exposed_b = _exposed_gathers(terms, regions, stages, "microbatch", profile)
        f, b, per_rank = plus(f, exposed_f), plus(b, exposed_b), plus(exposed_f, exposed_b)
        if is_mean:
            totals = totals[0] + _over_ranks(exposed_f, num_ranks), totals[1] + _over_ranks(exposed_b, num_ranks)
        longer = beat_with(f, b, totals, schedule, num_ranks, weight)
        gather, beat = longer - beat, longer
    if ("reduce", "microbatch") in happens:
        left, reduce = _backward_windows(terms, regions, profile), terms.reduce["microbatch"]
        hides, slowdown = terms.zero in profile.communication.overlaps_gradients, profile.timing.compute_slowdown_under_communication
        on_ranks: Ranks
        if hides and terms.zero == 0:
            # unsharded gradients are reduced in buckets, which overlap with backward of any layer of the stage and the next micro-batch
            pairs = zip(stage_sums(reduce, stages), stage_sums(left, stages), strict=True)
            on_ranks = tuple(np.maximum(t - w, 0.0) for t, w in pairs)
        else:
            share = min(profile.late_share(terms.zero) + slowdown, 1.0)
            by_region = tuple(_exposed_time(t, w, hides=hides, share=share) for t, w in zip(reduce, left, strict=True))
            on_ranks = stage_sums(by_region, stages)
        if is_mean:
            totals = totals[0], totals[1] + _over_ranks(on_ranks, num_ranks)
        reduction = beat_with(f, plus(b, on_ranks), totals, schedule, num_ranks, weight) - beat
        per_rank = plus(per_rank, on_ranks)
    return Waits(gather=gather, reduction=reduction, per_rank=per_rank)


def _over_ranks(values: Ranks, num_ranks: Column) -> Any:
    """Return the sum over the ranks of a pipeline, with every middle rank as large as the largest of them."""
    return values[0] + np.where(num_ranks > 1, values[-1] + (num_ranks - 2.0) * slowest_stage(values[1:-1]), 0.0)


def _exposed_gathers(
    terms: ParameterTerms, regions: RegionTimes, stages: Stages, times: str, profile: ExecutionProfile
) -> tuple[Ranks, Ranks]:
    """Return the exposed gathers of one micro-batch, or of one step, on each rank: forward and backward. [s]

    Casts of gathered weights are added every micro-batch, fully exposed.

    In steady state a block's gather overlaps with the block before it. The first block's gather overlaps with the region before all blocks.
    If that exposes more, the difference counts with that region: with the embedding, or with the last region on a rank that begins with
    blocks.
    """
    hides, slowdown = profile.communication.prefetches_parameters, profile.timing.compute_slowdown_under_communication
    f, b, graph_regions = terms.gather_forward[times], terms.gather_backward[times], stages.regions
    last = len(graph_regions) - 1

    def exposed(gather: Column, compute: Column) -> Any:
        return _exposed_time(gather, compute, hides=hides, share=slowdown)

    before = [neighbour(graph_regions, i, -1) for i in range(len(graph_regions))]
    steady = [exposed(f[i], regions.window_forward[before[i]]) if before[i] >= 0 else f[i] for i in range(len(graph_regions))]
    forward, later = list(steady), dict[int, Any]()
    for i in range(1, len(graph_regions)):
        if before[i] != i - 1:
            more = exposed(f[i], regions.window_forward[i - 1]) - steady[i]
            if graph_regions[i - 1].is_block:
                later[i] = more
            else:
                forward[i - 1] = forward[i - 1] + more
    if last and graph_regions[last - 1].is_block and not graph_regions[last].is_block:
        forward[last] = forward[last] + (1.0 - stages.is_single) * (f[last - 1] - steady[last - 1])
    # in backward, the gathers of both end regions are exposed
    after = [neighbour(graph_regions, i, 1) for i in range(len(graph_regions))]
    backward = tuple(
        b[i] if after[i] > last or (i in (0, last) and not graph_regions[i].is_block) else exposed(b[i], regions.window_backward[after[i]])
        for i in range(len(graph_regions))
    )
    if terms.casts is not None and times == "microbatch":
        forward, backward = list(plus(tuple(forward), terms.casts.forward)), plus(backward, terms.casts.backward)
    on_ranks = stage_sums(tuple(forward), stages)
    for i, more in later.items():
        # on ranks that run both kinds, one after the other
        on_ranks = tuple(
            value + np.minimum(runs[i], 1.0) * np.minimum(runs[i - 1], 1.0) * more
            for value, runs in zip(on_ranks, stages.runs, strict=True)
        )
    return on_ranks, stage_sums(backward, stages)


def _backward_windows(terms: ParameterTerms, regions: RegionTimes, profile: ExecutionProfile) -> tuple[Any, ...]:
    """Return the backward time of each region, less the gathers that overlap with it. [s]"""
    if not (profile.communication.prefetches_parameters and ("gather_backward", "microbatch") in terms.program.happens):
        return regions.window_backward
    gathers = terms.gather_backward["microbatch"]
    return tuple(np.maximum(time - gather, 0.0) for time, gather in zip(regions.window_backward, gathers, strict=True))


def overlapped_send_time(exposed: Column, beat: Column, pipeline: Pipeline, *, hop: Column, profile: ExecutionProfile) -> Any:
    """Return the time of pace-setting sends that overlaps with exposed gathers and reductions. [s]

    A stage that waits for its parameters leaves that time to its sends. Neither is compute, so no compute is counted twice.

    exposed  the total of `exposed_each_microbatch`    beat  `beat_of`   [s]
    """
    alone, overlapped = (exposed_sends(hop, busy / pipeline.virtual_stages, pipeline, profile) for busy in (beat, beat + exposed))
    return alone - overlapped
