"""Bytes on a chip: static memory, blocks and saved activations of micro-batches in flight, and the moment of the step with the peak.

A step's memory peaks at one of few moments (`cost/memory/moments.py`). Each is a sum of live bytes by class; the peak is the largest. Every
formula takes arrays of any shapes that broadcast.

The allocator of a chip reserves more than that. Freed tensors leave gaps (fragmentation). Tensors that a collective may still read are not
reused until the chip has caught up with the host. Both are measured and belong to the execution profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.cost.memory.moments import ActivationTerms, At, MemoryTerms
from perfmodel.cost.parameters import ParameterProgram
from perfmodel.cost.pipeline import Pipeline
from perfmodel.cost.schedules import schedule_of
from perfmodel.cost.stages import Stages, mean_block, stage_sums, sum_of
from perfmodel.cost.update import Bytes, ParameterTerms, held_elements
from perfmodel.foundation.columns import Column
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import Placement, stages_of_ranks
from perfmodel.parallel.schedule_table import AnySchedule, ScheduleTable

#: Memory classes of a chip, in the order in which they are added.
MEMORY = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "gathered_parameters",
    "temporary",
    "communication_buffers",
    "allocator",
    "framework",
)


def static_memory(terms: ParameterTerms, stages: Stages, sizes: Bytes, *, num_replicas: Column) -> list[tuple[Any, Any, Any, Any]]:
    """Return (weights, gradients, optimizer, gathered parameters) of each distinct rank, resident throughout the step. [byte]

    Where weights are stored as shards, gradients appear with the first backward pass: they belong to the moments.

    num_replicas   ranks that a gradient is reduced over; with one there are no buckets
    """
    copy = np.minimum(num_replicas - 1.0, 1.0) * sizes.gradient.copy
    kept = (0.0,) * stages.num_ranks if terms.compression is None else stage_sums(terms.compression.kept, stages)
    states = held_elements(terms, stages, sharded=terms.zero >= 1)
    full = held_elements(terms, stages, sharded=False)
    sharded = held_elements(terms, stages, sharded=True)
    held = []
    for i in range(stages.num_ranks):
        weights, gradients, optimizer, gathered = held_bytes(
            terms.program, sizes, full=full[i], shard=sharded[i], states=states[i], copy=copy
        )
        held.append((weights, gradients + kept[i], optimizer, gathered))
    if terms.frozen is None:
        return held
    stored = held_elements(terms.frozen, stages, sharded=terms.program.holds_sharded_weights)
    gathered_frozen = held_elements(terms.frozen, stages, sharded=False)
    on_chip, stays = float(not sizes.hosts_weights), float(terms.program.keeps_gathered)
    return [
        (weights + stored[i] * on_chip, gradients, optimizer, gathered + stays * gathered_frozen[i])
        for i, (weights, gradients, optimizer, gathered) in enumerate(held)
    ]


def held_bytes(
    program: ParameterProgram, sizes: Bytes, *, full: Column, shard: Column, states: Column, copy: Column
) -> tuple[Any, Any, Any, Any]:
    """Return (weights, gradients, optimizer, gathered parameters) of numbers of elements. [byte]

    full    elements before ZeRO shards them
    shard   elements of a ZeRO shard
    states  elements for which the rank holds optimizer state
    copy    bytes of a copy of unsharded gradients, for each element
    """
    gathered: Column = 0.0
    gradients: Column = 0.0
    if program.holds_sharded_weights:
        weights, optimizer = shard * sizes.stored, states * sizes.optimizer.state
        if program.keeps_gathered:
            gathered = full * sizes.gathered
    elif sizes.keeps_compute_copy:
        # the copy that operators read; the master copy is part of the optimizer state
        weights, optimizer = full * sizes.gathered, states * (sizes.optimizer.state + sizes.stored)
    else:
        weights, optimizer = full * sizes.stored, states * sizes.optimizer.state
    if not program.holds_sharded_weights and not sizes.gradient.frees_early:
        share = shard * sizes.gradient.sharded if program.holds_sharded_gradients else full * sizes.gradient.unsharded
        gradients = share + full * copy
    return weights, gradients, optimizer, gathered


# --- blocks in flight --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLayers:
    """In-flight layers of a rank: forward passes of each virtual stage without their backward pass, times the stage's layers.

    at_first  when the first backward pass begins
    most      maximum of the step
    present   share of the layers that have had a backward pass when `most` is reached for the last time   [-]
    first_ran, last_ran  1 if the first, the last virtual stage has had one then, else 0
    fewer     `most` less the maximum once all layers have had a backward pass
    ended     1 if passes of the last virtual stage have ended by then, else 0
    arriving  layers of the virtual stage with its first backward pass when `most` is reached for the last time, else 0
    fewer_at_last    `most` less the maximum while the last virtual stage turns from forward to backward
    fewer_at_first   `most` less the maximum when all layers of the first virtual stage have just run backward for a micro-batch
    later_at_last, later_at_first   further decrease once all layers have had a backward pass before
    over_at_first    share of the layers that have had their last backward pass when the first virtual stage has its second one
    freed_weights    share of the layers whose sharded weights torch's pipelines have freed when `most` is reached   [-]
    first_freed, last_freed  1 if those of the first, the last virtual stage are freed then, else 0
    """

    at_first: Column
    most: Column
    present: Column
    first_ran: Column
    last_ran: Column
    fewer: Column
    ended: Column
    arriving: Column
    fewer_at_last: Column
    fewer_at_first: Column
    later_at_last: Column
    later_at_first: Column
    over_at_first: Column
    freed_weights: Column
    first_freed: Column
    last_freed: Column


_LIVE = tuple([column.name for column in fields(LiveLayers)])


def live_layers(*, schedule: AnySchedule, chunks: Sequence[int], rank: int, num_ranks: int, num_microbatches: int) -> LiveLayers:
    """Return the live layers of one rank. chunks: layers of each of its virtual stages."""
    rows = _live_rows(schedule, tuple(chunks), rank, num_ranks)
    return _columns(rows[_live_row(schedule, num_ranks, num_microbatches)], schedule, num_microbatches)


def three_live_layers(
    table: NDArray[np.float64], *, schedule: AnySchedule, num_ranks: int, num_microbatches: Column, num_between: int = 1
) -> list[LiveLayers]:
    """Return the live layers of the first, a middle (repeated) and the last rank.

    table   a `live_table`, or several as [row, schedule, rank, field]: then the last dim of `num_microbatches`, of size 1, becomes that of
            schedules
    """
    row = _live_row(schedule, num_ranks, num_microbatches)
    selected = table[row if table.ndim == 3 else row[..., 0]]
    live = []
    for i, times in enumerate((1, num_between, 1)):
        live += [_columns(selected[..., i, :], schedule, num_microbatches)] * times
    return live


@session_cache(maxsize=4096)
def live_table(schedule: AnySchedule, stage_layers: tuple[int, ...], num_ranks: int) -> NDArray[np.float64]:
    """Return [number of micro-batches, rank, field of `LiveLayers`] for the first, the fullest middle and the last rank.

    Without a middle rank its entries are zeros. `_live_row` maps a number of micro-batches to a row. Entries of gpipe are per micro-batch.
    """
    p = num_ranks
    by_rank = np.array(stage_layers)[np.array(stages_of_ranks(p, len(stage_layers), schedule.placement))]
    chunks = list(map(tuple, by_rank.tolist()))
    first, last = _live_rows(schedule, chunks[0], 0, p), _live_rows(schedule, chunks[-1], p - 1, p)
    middle = np.zeros_like(first)
    if p > 2:
        # among ranks with equal layers, the first has the most in flight; in a V the last one, if its second virtual stage is longer
        fullest = {*{chunks[rank]: rank for rank in range(p - 2, 0, -1)}.values()}
        if isinstance(schedule, ScheduleTable):
            fullest = {*range(1, p - 1)}
        elif schedule.placement is Placement.V:
            fullest |= {*{chunks[rank]: rank for rank in range(1, p - 1)}.values()}
        candidates = np.array([_live_rows(schedule, chunks[rank], rank, p) for rank in sorted(fullest)])
        middle = np.take_along_axis(candidates, candidates[..., 1].argmax(axis=0)[None, :, None], axis=0)[0]
    return np.stack([first, middle, last], axis=1)


def live_of_table(table: NDArray[np.float64]) -> LiveLayers:
    """Return all rows of a `live_table`, [number of micro-batches, rank]; entries of gpipe are per micro-batch."""
    return _columns(table, PipelineSchedule.ONE_F_ONE_B, 1)


def _columns(rows: NDArray[np.float64], schedule: AnySchedule, num_microbatches: Column) -> LiveLayers:
    values = np.moveaxis(rows, -1, 0) if rows.ndim > 1 else rows.tolist()
    live = LiveLayers(**dict(zip(_LIVE, values, strict=True)))
    if not schedule_of(schedule).keeps_all:
        return live
    return replace(live, at_first=num_microbatches * live.at_first, most=num_microbatches * live.most)


def _live_row(schedule: AnySchedule, num_ranks: int, num_microbatches: Column) -> Any:
    return np.asarray(schedule_of(schedule).live_row(num_ranks, num_microbatches)).astype(np.int64) - 1


@session_cache(maxsize=4096)
def _live_rows(schedule: AnySchedule, chunks: tuple[int, ...], rank: int, num_ranks: int) -> NDArray[np.float64]:
    return schedule_of(schedule).live_rows(chunks, rank, num_ranks)


#: Bytes by the part that runs: (saved activations, receive buffers).
ActivationBytes = dict[At, tuple[Any, Any]]


def runs_at(rank: int, stages: Stages) -> tuple[At, ...]:
    """Return the parts with their own passes in flight on a distinct rank: blocks, and regions before or after them."""
    has_first = rank == 0 and not stages.regions[0].is_block
    has_last = rank == stages.ending and not stages.regions[-1].is_block
    return (At.BLOCKS, *[At.FIRST] * has_first, *[At.LAST] * has_last)


def kept_memory(
    activations: ActivationTerms,
    stages: Stages,
    pipeline: Pipeline,
    live_by_rank: Sequence[LiveLayers],
    profile: ExecutionProfile,
    *,
    activation_bytes: float,
) -> list[ActivationBytes]:
    """Return (saved activations, receive buffers) of each distinct rank, as `kept_on_rank`. [byte]"""
    last, kept = pipeline.num_ranks - 1.0, []
    for rank, live in enumerate(live_by_rank):
        index = 0.0 if rank == 0 else last if rank == len(live_by_rank) - 1 else np.minimum(1.0, last)
        kept.append(
            kept_on_rank(activations, stages, pipeline, profile, rank=rank, index=index, live=live, activation_bytes=activation_bytes)
        )
    return kept


def kept_on_rank(
    activations: ActivationTerms,
    stages: Stages,
    pipeline: Pipeline,
    profile: ExecutionProfile,
    *,
    rank: int,
    index: Column,
    live: LiveLayers,
    activation_bytes: float,
) -> ActivationBytes:
    """Return the saved activations in flight, and the send and receive buffers, while each part of a pipeline rank runs. [byte]

    rank, index   which of the distinct ranks, and its index in the pipeline

    At most one pass in flight has run the last virtual stage (gpipe: all have). torch's schedules keep a stage's outputs, including logits,
    until the backward of the micro-batch has ended. They have a buffer for each receive of a step. It stores the input of the first layer.
    """
    schedule = schedule_of(pipeline.schedule)
    p, m, v, inner = pipeline.num_ranks, pipeline.num_microbatches, pipeline.virtual_stages, stages.inner
    is_first, is_last, is_pipelined = stages.is_first[rank], stages.is_last[rank], np.minimum(p - 1.0, 1.0)
    begun, ended = is_first * schedule.begun(index, pipeline), is_last * schedule.ended(index, pipeline)
    of_ends = begun * sum_of(activations.kept[: inner.start]) + ended * sum_of(activations.kept[inner.stop :])
    of_block, postponed = mean_block(activations.kept, stages, stages.runs[rank]), None
    if activations.postponed:
        passes = schedule.postponed(index, pipeline)
        postponed = (passes * stages.blocks[rank] / v) * mean_block(activations.postponed, stages, stages.runs[rank])
        of_ends = of_ends + is_last * (np.maximum(passes - 1.0, 0.0) * sum_of(activations.postponed[inner.stop :]))
    # before the backward of the first region, the blocks of this rank are assumed to be freed
    alive = {
        At.BLOCKS: live.most,
        At.LAST: live.most - live.fewer_at_last,
        At.FIRST: live.most + (stages.blocks[rank] - live.fewer_at_first),
    }
    kept = {}
    for at in runs_at(rank, stages):
        of_blocks = alive[at] * of_block
        if postponed is not None:
            of_blocks = of_blocks + postponed
        if not profile.stages.pipeline_keeps_boundaries:
            kept[at] = of_blocks + of_ends, is_pipelined * (2.0 * activations.boundary)
            continue
        # the input of a pass is already in its receive buffer; no logits if the most blocks are in flight while another virtual stage runs
        holding = ended if at is At.LAST else ended * (1.0 - np.minimum(live.fewer_at_last, 1.0))
        sent = (begun - holding) * activations.boundary + holding * (activations.logits * activation_bytes)
        # in a V, the last rank sends itself two inputs for each micro-batch
        local = 2.0 if stages.is_folded and rank == stages.num_ranks - 1 else 0.0
        receives = m * (((2.0 * v - is_first) - is_last) - local) - no_gradient_sent(live, rank, m)
        kept[at] = of_blocks + (of_ends + is_pipelined * sent), is_pipelined * (receives * activations.boundary)
    return kept


def no_gradient_sent(live: LiveLayers, rank: int, num_microbatches: Column) -> Any:
    """Return 1 if no gradient has been sent to the previous stage when the most passes are in flight (gpipe), although one will be."""
    return (1.0 - live.last_ran) * (float(rank > 0) * np.minimum(num_microbatches - 1.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreducedGradients:
    """Unsharded gradients that wait for the last micro-batch. [byte], multiplied by the allocator's factor

    early    gradients present while most activations are
    later    all gradients after some activations were freed (`freed`), by the part that runs; without virtual stages reduced before
    coming   added to the early ones: gradients of the units above the block that runs the first backward pass of its virtual stage. For the
             last block and for the first, before which the activations of the units above were freed (`passed`). Gradients of the block
             itself if there are none to which they could be added
    below    added to the gradients of the first region as they are produced, in its first backward pass: all others, or all if the waiting
             gradients have another dtype and are converted from them
    weights  gathered weights that are freed until their next pass, by the part that runs: next to the early, and to all gradients
    """

    early: Column = 0.0
    later: Mapping[At, Any] = field(default_factory=dict)
    freed: Mapping[At, Any] = field(default_factory=dict)
    coming: tuple[Any, Any] = (0.0, 0.0)
    passed: Column = 0.0
    below: Column = 0.0
    weights: Mapping[At, tuple[Any, Any]] = field(default_factory=dict)

    def cases(self, at: At) -> tuple[tuple[Any, Any, Any], ...]:
        """Return the (gradients, freed activations, freed weights) that may give the peak while this part runs."""
        early, later = self.weights.get(at, (0.0, 0.0))
        cases = ((self.early, 0.0, early), (self.later.get(at, 0.0), self.freed.get(at, 0.0), later))
        if at is At.BLOCKS:
            return *cases, (self.early + self.coming[0], 0.0, early), (self.early + self.coming[1], self.passed, early)
        return (*cases, (self.below, 0.0, later)) if at is At.FIRST else cases

    def at(self, at: At) -> Any:
        (most, _, weights), *others = self.cases(at)  # of the first case no activations are freed
        most = most - weights
        for gradients, gone, weights in others:
            most = np.maximum(most, gradients - gone - weights)
        return most


def unreduced_gradients(of: MemoryTerms, rank: int, live: LiveLayers, stages: Stages) -> UnreducedGradients:
    """Return the unreduced gradients of a distinct rank whose weights stay gathered. stages: with an entry for each of `live`.

    They accumulate while activations are alive: a rank runs the backward passes of its virtual stages from the last to the first.
    """
    activations, terms, sizes, factor = of.activations, of.terms, of.sizes, of.factor
    size = sizes.gradient.unsharded * factor
    gradients = held_elements(terms, stages, sharded=False)[rank] * size
    keeps_sent = float(of.profile.stages.pipeline_keeps_boundaries)
    before, after = stages.inner.start, stages.inner.stop
    kept, full = mean_block(activations.kept, stages, stages.runs[rank]), mean_block(terms.full, stages, stages.runs[rank])
    # of the regions after the blocks and of those before them, with the outputs that a stage has sent
    of_last = stages.is_last[rank] * (sum_of(activations.kept[after:]) + activations.logits * (of.activation_bytes * keeps_sent))
    of_first = stages.is_first[rank] * (sum_of(activations.kept[:before]) + activations.boundary * keeps_sent)
    fewer = {At.BLOCKS: live.fewer, At.LAST: live.later_at_last, At.FIRST: live.later_at_first}
    freed = {at: (layers * kept + live.ended * (of_last + of_first)) * factor for at, layers in fewer.items()}
    # the regions after the blocks run backward with the first pass of the last virtual stage
    last = stages.is_last[rank] * (sum_of(terms.full[after:]) * size)
    first = stages.is_first[rank] * (sum_of(terms.full[:before]) * size)
    ends = (np.minimum(live.arriving, 1.0) * (1.0 - live.last_ran)) * last
    early = live.present * (gradients - (first + last)) + (live.first_ran * first + live.last_ran * last)
    unsent = no_gradient_sent(live, rank, of.num_microbatches) * activations.boundary * (keeps_sent * (1.0 - stages.is_single) * factor)
    # a virtual stage is reduced, and its weights are freed, after its backward of the last micro-batch
    over = live.over_at_first * (gradients - (first + last)) + np.ceil(live.over_at_first) * last
    # gradients in host memory need no bytes here, and no weights are freed with them
    reduced = over * (1.0 + (sizes.gathered / sizes.gradient.unsharded if sizes.gradient.unsharded else 0.0))
    above = np.maximum(live.arriving - 1.0, 0.0)
    is_converted = float(sizes.gradient.produced != sizes.gradient.unsharded)
    staying = mean_block(tuple(stays - leaves for leaves, stays in activations.peaks), stages, stages.runs[rank])
    of_block = (1.0 - is_converted) * (np.minimum(live.arriving, 1.0) * staying) * factor
    return UnreducedGradients(
        early=early,
        later={At.BLOCKS: (gradients - reduced) + unsent, At.LAST: gradients + unsent, At.FIRST: (gradients - reduced) + unsent},
        freed=freed,
        coming=(ends + of_block, (ends + of_block) + above * (full * size)),
        passed=above * (kept * factor),
        below=gradients - reduced - (stages.is_first[rank] * (1.0 - is_converted)) * (terms.full[0] * size),
        weights=_freed_weights(of, rank, live, stages) if np.any(live.freed_weights) else {},
    )


def _freed_weights(of: MemoryTerms, rank: int, live: LiveLayers, stages: Stages) -> dict[At, tuple[Any, Any]]:
    """Return the gathered weights that a distinct rank frees until their next pass, as `UnreducedGradients.weights`. [byte]

    Those of the part that runs are gathered. Weights of virtual stages that are over are freed anyway (`unreduced_gradients`).
    """
    terms, before, after = of.terms, of.stages.inner.start, of.stages.inner.stop
    elements = held_elements(terms, stages, sharded=False)[rank] * of.sizes.gathered
    gathered = [full * of.sizes.gathered for full in terms.full]
    if terms.frozen is not None:
        elements = elements + held_elements(terms.frozen, stages, sharded=False)[rank]
        gathered = [full + more for full, more in zip(gathered, terms.frozen.full, strict=True)]
    first, last = stages.is_first[rank] * sum_of(gathered[:before]), stages.is_last[rank] * sum_of(gathered[after:])
    blocks = elements - (first + last)
    over = live.over_at_first * blocks + np.ceil(live.over_at_first) * last
    freed = {}
    for at in At:
        ends = (at is not At.FIRST) * live.first_freed * first + (at is not At.LAST) * live.last_freed * last
        early = live.freed_weights * blocks + ends
        freed[at] = early, early if at is At.LAST else np.maximum(early - over, 0.0)
    return freed


def reserve_factor(profile: ExecutionProfile, machine: Machine) -> float:
    """Return the ratio of reserved to allocated bytes of temporary tensors."""
    return profile.allocator.reserve_factor * machine.memory.allocator_factor


def outside_bytes(profile: ExecutionProfile, machine: Machine, grid: LayoutGrid) -> Any:
    """Return the memory of a run outside its allocator: context, communicators of its process groups, the framework's own. [byte]"""
    return (machine.memory.context_bytes + profile.allocator.framework_bytes) + communicator_bytes(machine, grid)


def sole_outside_bytes(profile: ExecutionProfile, machine: Machine, num_chips: int) -> float:
    """Return `outside_bytes` for a single process group of all ranks. [byte]"""
    return (machine.memory.context_bytes + profile.allocator.framework_bytes) + world_communicator_bytes(machine, num_chips)


def waiting_memory(of: MemoryTerms, rank: int) -> Any:
    """Return the bytes that the allocator reserves in addition to the peak of a distinct rank, and cannot reuse for it.

    Tensor-parallel collectives not yet executed on the chip: two per layer in forward and in backward, up to the capacity of the launch
    queue, as far as the host runs ahead. Each holds the full tensor, and its shard if the residual stream is cut over tp (`is_scattered`).
    Gradients as produced, if they wait for the end of their micro-batch. Workspaces of the libraries.
    """
    allocator, boundary = of.profile.allocator, of.activations.boundary
    if allocator.delayed_collectives == 0.0 and allocator.waiting_gradient_fraction == 0.0:
        return allocator.workspace_bytes
    passes = 2.0 * of.num_microbatches - 1.0  # forward and backward up to the last forward, whose end is the peak
    collectives = np.minimum(allocator.delayed_collectives, 2.0 * of.stages.blocks[rank] * passes)
    full = boundary * (of.tp if of.is_scattered else 1.0)
    delayed = ((np.minimum(of.tp - 1.0, 1.0) * collectives) * of.activations.run_ahead) * (full + boundary * float(of.is_scattered))
    later = np.minimum(of.num_microbatches - 1.0, 1.0)
    produced = of.sizes.gradient.produced * allocator.waiting_gradient_fraction
    waiting = held_elements(of.terms, of.stages, sharded=False)[rank] * produced
    return (delayed + later * waiting) + allocator.workspace_bytes


# --- communicators ----------------------------------------------------------------------------------------------------
#
# NCCL allocates a communicator's buffers at its first collective; no framework's allocator counts them. They grow with the number of its
# channels, which follows from the bandwidth of the links that it fills, and hardly with the number of ranks.
#
# Source: NVIDIA/nccl issues 864 and 986 (memory is linear in channels and communicators; ring connections do not grow with ranks),
# src/graph/connect.cc (channels).

#: Axes with a process group each, and the parts that make the group's members. The group exists if the axis's degree exceeds 1.
_GROUPS = {
    "dp_replicate": AXIS_PARTS["dp_replicate"],
    "dp_shard": (*AXIS_PARTS["dp_shard"], "dp_ep"),
    "cp": (*AXIS_PARTS["cp"], "cp_ep"),
    "tp": (*AXIS_PARTS["tp"], "tp_kv_ep", "tp_q_ep"),
}


def communicator_bytes(machine: Machine, grid: LayoutGrid) -> Any:
    """Return the buffers of all communicators of a chip, for each layout. [byte]

    There is one communicator for each mesh axis with more than one rank, one for experts and one for the replicas of experts. With several
    communicators there is also one of all ranks (gradient norm, barriers). Communicators inside a node have the channels of its links.
    """
    total: Column = 0.0
    largest: Column = 0.0
    count: Column = 0.0
    others = grid.fine.keys() - chain(*_GROUPS.values())
    for axis, parts in _GROUPS.items():
        # axes that are not named count as data-parallel
        buffers = _buffers(machine, np.greater(grid.group_inside((*parts, *others) if axis == "dp_replicate" else parts), 1.0))
        is_used = np.minimum(grid.degree[axis] - 1.0, 1.0)
        total, largest, count = total + is_used * buffers, np.maximum(largest, is_used * buffers), count + is_used
    is_pipelined = np.minimum(grid.degree["pp"] - 1.0, 1.0)
    sends = is_pipelined * _buffers(machine, np.greater_equal(grid.hop, 2.0))
    total, largest, count = total + sends, np.maximum(largest, sends), count + is_pipelined
    if not grid.fine.keys().isdisjoint(EXPERT_AXES):
        has_groups = np.minimum(grid.size(EXPERT_AXES) - 1.0, 1.0)
        total = total + has_groups * (2.0 * _buffers(machine, np.greater(grid.group_inside(EXPERT_AXES), 1.0)))
    return total + np.minimum(np.maximum(count - 1.0, 0.0), 1.0) * largest


def world_communicator_bytes(machine: Machine, num_chips: int) -> float:
    """Return the buffers of the one communicator of all ranks. [byte]"""
    for num_bytes, size in zip(machine.memory.communicator_bytes, machine.tier_sizes, strict=True):
        if min(size, num_chips) > 1:
            return num_bytes
    return 0.0


def _buffers(machine: Machine, is_inside: NDArray[np.bool_]) -> Any:
    """Return the buffers of one communicator, by the innermost tier inside which it has several ranks. [byte]"""
    if not machine.memory.communicator_bytes:
        return 0.0
    buffers: Column = machine.memory.communicator_bytes[-1]
    for num_bytes, inside in reversed(list(zip(machine.memory.communicator_bytes, is_inside, strict=True))):
        buffers = np.where(inside, num_bytes, buffers)
    return buffers
