"""Bytes on a chip: what stays for the whole step, what microbatches keep, and the moment of the step at which most of it lives.

A step's memory is largest at one of few moments (`cost/memory/moments.py`). Each is a sum of what lives then, by class; the peak is the
largest. Every formula takes arrays of any shapes that broadcast.

A chip's allocator holds more than that: what comes and goes leaves gaps, and memory of tensors that a collective may still read is not
used again before the chip has caught up with the host. Both are measured, and belong to the execution profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfmodel.cost.communicators import communicator_bytes, world_communicator_bytes
from perfmodel.cost.machine import Machine
from perfmodel.cost.memory.moments import ActivationTerms, At, keeps_gathered
from perfmodel.cost.parameters import ParameterProgram
from perfmodel.cost.pipeline import LiveLayers, live_microbatches
from perfmodel.cost.stages import Stages, sum_of
from perfmodel.cost.step import Bytes, ParameterTerms, frozen_bytes, held_elements
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import PipelineSchedule

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
    """(weights, gradients, optimizer, gathered parameters) that each of the ranks told apart holds all through a step. [byte]

    Where weights are stored as shards, gradients come with the first backward pass: they belong to the moments. `num_replicas`: ranks that
    a gradient is reduced over; with one there are no buckets.
    """
    copy = np.minimum(num_replicas - 1.0, 1.0) * sizes.gradient_copy
    states = held_elements(terms, stages, sharded=terms.zero >= 1)
    full = held_elements(terms, stages, sharded=False)
    sharded = held_elements(terms, stages, sharded=True)
    held = [held_bytes(terms.program, sizes, full=full[i], shard=sharded[i], states=states[i], copy=copy) for i in range(stages.num_ranks)]
    if terms.frozen is None:
        return held
    stored = [
        on_chip * (not sizes.hosts_weights) for on_chip in frozen_bytes(terms.frozen, stages, sharded=terms.program.holds_sharded_weights)
    ]
    gathered_frozen = frozen_bytes(terms.frozen, stages, sharded=False)
    stays = float(keeps_gathered(terms.program))
    return [
        (weights + stored[i], gradients, optimizer, gathered + stays * gathered_frozen[i])
        for i, (weights, gradients, optimizer, gathered) in enumerate(held)
    ]


def held_bytes(
    program: ParameterProgram, sizes: Bytes, *, full: Column, shard: Column, states: Column, copy: Column
) -> tuple[Any, Any, Any, Any]:
    """(weights, gradients, optimizer, gathered parameters) of so many elements, whole, cut by ZeRO, and as the optimizer has them. [byte]

    copy  of whole gradients, for each element
    """
    gathered: Column = 0.0
    gradients: Column = 0.0
    if program.holds_sharded_weights:
        weights, optimizer = shard * sizes.stored, states * sizes.state
        if keeps_gathered(program):
            gathered = full * sizes.gathered
    elif sizes.keeps_compute_copy:
        # the copy that operators read; the master copy lies with the optimizer's state
        weights, optimizer = full * sizes.gathered, states * (sizes.state + sizes.stored)
    else:
        weights, optimizer = full * sizes.stored, states * sizes.state
    if not program.holds_sharded_weights and not sizes.frees_gradients:
        share = shard * sizes.sharded_gradient if program.holds_sharded_gradients else full * sizes.whole_gradient
        gradients = share + full * copy
    return weights, gradients, optimizer, gathered


#: Bytes by what runs: (activations, receive buffers).
ActivationBytes = dict[At, tuple[Any, Any]]


def runs_at(rank: int, stages: Stages) -> tuple[At, ...]:
    """Parts with passes of their own in flight on one of the distinct ranks: blocks, and what comes before or after them."""
    first, last = stages.regions[0], stages.regions[-1]
    if rank == 0:
        return (At.BLOCKS,) if first.is_block else (At.BLOCKS, At.FIRST)
    return (At.BLOCKS, At.LAST) if rank == stages.num_ranks - 1 and not last.is_block else (At.BLOCKS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """Schedule of microbatches, as columns. live: passes of blocks in flight on each of the distinct ranks."""

    schedule: PipelineSchedule
    num_ranks: Column
    num_microbatches: Column
    virtual_stages: Column
    live: Sequence[LiveLayers]

    def index(self, rank: int) -> Any:
        """In the pipeline, of one of the ranks that are told apart."""
        return 0.0 if rank == 0 else self.num_ranks - 1.0 if rank == len(self.live) - 1 else np.minimum(1.0, self.num_ranks - 1.0)


def kept_memory(
    activations: ActivationTerms, stages: Stages, pipelining: Pipelining, profile: ExecutionProfile, *, activation_bytes: float
) -> list[ActivationBytes]:
    """(activations, receive buffers) of each of the ranks told apart, as `kept_on_rank`. [byte]"""
    return [
        kept_by_moment(
            activations,
            stages,
            pipelining,
            profile,
            rank=rank,
            index=pipelining.index(rank),
            live=live,
            activation_bytes=activation_bytes,
        )
        for rank, live in enumerate(pipelining.live)
    ]


def kept_by_moment(
    activations: ActivationTerms,
    stages: Stages,
    pipelining: Pipelining,
    profile: ExecutionProfile,
    *,
    rank: int,
    index: Column,
    live: LiveLayers,
    activation_bytes: float,
) -> ActivationBytes:
    """`kept_on_rank` with the blocks that are under way while each part of the rank runs."""
    # what comes before the blocks takes those of the rank for gone already
    alive = {
        At.BLOCKS: live.most,
        At.LAST: live.most - live.fewer_at_last,
        At.FIRST: live.most + (stages.blocks(rank) - live.fewer_at_first),
    }
    # no logits where the most blocks are under way while another virtual stage runs
    has_output = 1.0 - np.minimum(live.fewer_at_last, 1.0)
    return {
        at: kept_on_rank(
            activations,
            stages,
            pipelining,
            profile,
            rank=rank,
            index=index,
            live_blocks=alive[at],
            none_left=none_left_before(live, rank, pipelining.num_microbatches),
            has_output=1.0 if at is At.LAST else has_output,
            activation_bytes=activation_bytes,
        )
        for at in runs_at(rank, stages)
    }


def none_left_before(live: LiveLayers, rank: int, num_microbatches: Column) -> Any:
    """1 where no gradient has left for the stage before when as many passes as at most are under way (gpipe), though one will have."""
    return (1.0 - live.last_ran) * (float(rank > 0) * np.minimum(num_microbatches - 1.0, 1.0))


def kept_on_rank(
    activations: ActivationTerms,
    stages: Stages,
    pipelining: Pipelining,
    profile: ExecutionProfile,
    *,
    rank: int,
    index: Column,
    live_blocks: Column,
    activation_bytes: float,
    has_output: Column = 1.0,
    none_left: Column = 0.0,
) -> tuple[Any, Any]:
    """Activations of all microbatches that a pipeline rank has under way at most, and its buffers for what it receives and sends. [byte]

    rank, index   which of those told apart, and its index in the pipeline
    live_blocks   the passes of blocks that it has under way
    has_output    0 where no pass of the last virtual stage is under way
    none_left     `none_left_before` that: moments of a rank count one

    Of the passes under way at most one has run the last virtual stage (gpipe: all have). torch's schedules keep what a stage has sent
    until its microbatch's backward has ended, logits too, and have a buffer for each receive of a step, in which its first layer's input
    stays.
    """
    p, m, v = pipelining.num_ranks, pipelining.num_microbatches, pipelining.virtual_stages
    is_first, is_last = stages.is_first(rank), stages.is_last(rank)
    alive = live_microbatches(schedule=pipelining.schedule, rank=index, num_ranks=p, num_microbatches=m, virtual_stages=v)
    ended = is_last * (m if pipelining.schedule is PipelineSchedule.GPIPE else 1.0)
    begun = alive
    if pipelining.schedule is PipelineSchedule.INTERLEAVED:
        begun = np.minimum(m, 2.0 * p - 1.0)  # pp first passes, then the others of these microbatches, then pp - 1 first passes more
    begun = is_first * begun
    of_blocks = live_blocks * stages.mean_block(activations.kept, rank)
    of_ends = begun * sum_of(activations.kept[: stages.inner.start]) + ended * sum_of(activations.kept[stages.inner.stop :])
    is_pipelined = np.minimum(p - 1.0, 1.0)
    if not profile.stages.pipeline_keeps_boundaries:
        return of_blocks + of_ends, is_pipelined * (2.0 * activations.boundary)
    # what a pass has received lies in its buffer already
    ended = ended * has_output
    sent = (begun - ended) * activations.boundary + ended * (activations.logits * activation_bytes)
    receives = m * ((2.0 * v - is_first) - is_last)
    return of_blocks + (of_ends + is_pipelined * sent), is_pipelined * ((receives - none_left) * activations.boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreducedGradients:
    """Gradients that wait, whole, for the last microbatch. [byte], with the allocator's share

    early    those that are there while most activations are
    later    all of them, when some activations have gone (`freed`), by what runs; but for those of virtual stages that are reduced by then
    coming   beside the early ones: of the units above the block that runs the first backward pass of its virtual stage, for the last
             block and for the first, before which the activations of those above it have gone (`passed`); and of the block itself, where
             nothing is there that its gradients could be added to
    below    beside the first region's own as they are made, when it runs backward for the first time: all others, or all where waiting
             ones have another dtype and are made of them
    """

    early: Column = 0.0
    later: Mapping[At, Any] = field(default_factory=dict)
    freed: Mapping[At, Any] = field(default_factory=dict)
    coming: tuple[Any, Any] = (0.0, 0.0)
    passed: Column = 0.0
    below: Column = 0.0

    def cases(self, at: At) -> tuple[tuple[Any, Any], ...]:
        """(gradients, activations gone) that may be what is largest while this runs."""
        cases = ((self.early, 0.0), (self.later.get(at, 0.0), self.freed.get(at, 0.0)))
        if at is At.BLOCKS:
            return *cases, (self.early + self.coming[0], 0.0), (self.early + self.coming[1], self.passed)
        return (*cases, (self.below, 0.0)) if at is At.FIRST else cases

    def at(self, at: At) -> Any:
        most, *others = (gradients - gone for gradients, gone in self.cases(at))
        for other in others:
            most = np.maximum(most, other)
        return most


def unreduced_gradients(
    activations: ActivationTerms,
    terms: ParameterTerms,
    stages: Stages,
    sizes: Bytes,
    *,
    rank: int,
    live: LiveLayers,
    num_microbatches: Column,
    profile: ExecutionProfile,
    activation_bytes: float,
    factor: float = 1.0,
) -> UnreducedGradients:
    """UnreducedGradients gradients of one of the distinct ranks, if weights stay gathered; else none. `factor`: the allocator's.

    They come to lie beside activations: a rank runs its virtual stages' backward passes from the last to the first.
    """
    if not keeps_gathered(terms.program):
        return UnreducedGradients()
    size = sizes.whole_gradient * factor
    gradients = held_elements(terms, stages, sharded=False)[rank] * size
    keeps_sent = float(profile.stages.pipeline_keeps_boundaries)
    before, after = stages.inner.start, stages.inner.stop
    kept, full = stages.mean_block(activations.kept, rank), stages.mean_block(terms.full, rank)
    # of what follows the blocks, and of what comes before them, with what a stage has sent
    of_last = stages.is_last(rank) * (sum_of(activations.kept[after:]) + activations.logits * (activation_bytes * keeps_sent))
    of_first = stages.is_first(rank) * (sum_of(activations.kept[:before]) + activations.boundary * keeps_sent)
    fewer = {At.BLOCKS: live.fewer, At.LAST: live.later_at_last, At.FIRST: live.later_at_first}
    freed = {at: (layers * kept + live.ended * (of_last + of_first)) * factor for at, layers in fewer.items()}
    # what follows the blocks runs backward with the first pass of the last virtual stage
    last = stages.is_last(rank) * (sum_of(terms.full[after:]) * size)
    first = stages.is_first(rank) * (sum_of(terms.full[:before]) * size)
    ends = (np.minimum(live.arriving, 1.0) * (1.0 - live.last_ran)) * last
    early = live.present * (gradients - (first + last)) + (live.first_ran * first + live.last_ran * last)
    unsent = none_left_before(live, rank, num_microbatches) * activations.boundary * (keeps_sent * (1.0 - stages.is_single) * factor)
    # a virtual stage is reduced, and its weights are freed, when it has run backward for the last microbatch
    over = live.over_at_first * (gradients - (first + last)) + np.ceil(live.over_at_first) * last
    # gradients that the host keeps take nothing here, and nothing is freed with them
    reduced = over * (1.0 + (sizes.gathered / sizes.whole_gradient if sizes.whole_gradient else 0.0))
    above = np.maximum(live.arriving - 1.0, 0.0)
    is_converted = float(sizes.produced != sizes.whole_gradient)
    staying = stages.mean_block(tuple(stays - leaves for leaves, stays in activations.peaks), rank)
    of_block = (1.0 - is_converted) * (np.minimum(live.arriving, 1.0) * staying) * factor
    return UnreducedGradients(
        early=early,
        later={At.BLOCKS: (gradients - reduced) + unsent, At.LAST: gradients + unsent, At.FIRST: (gradients - reduced) + unsent},
        freed=freed,
        coming=(ends + of_block, (ends + of_block) + above * (full * size)),
        passed=above * (kept * factor),
        below=gradients - reduced - (stages.is_first(rank) * (1.0 - is_converted)) * (terms.full[0] * size),
    )


def fixed_memory(static: tuple[Any, Any, Any, Any]) -> Any:
    weights, gradients, states, gathered = static
    return ((weights + gradients) + states) + gathered


def outside_memory(terms: ParameterTerms, stages: Stages, sizes: Bytes, *, num_replicas: Column) -> Sequence[Any]:
    """On each of the ranks told apart, what a framework may keep and this one is not said to. [byte]

    In a pipeline what its shards are of: weights that stay gathered, gradients unreduced until the last microbatch (torch). Gradients as
    they are produced beside accumulators of another dtype, until replicas have reduced them (nanotron, DeepSpeed's bf16 optimizer).
    """
    program = terms.program
    if program.holds_sharded_gradients and np.any(stages.is_single != 1.0):
        more: Column = (1.0 - stages.is_single) * (sizes.whole_gradient + program.holds_sharded_weights * sizes.gathered)
    elif program.holds_sharded_weights or sizes.gradient_copy or sizes.produced == sizes.whole_gradient:
        return (0.0,) * stages.num_ranks
    else:
        more = np.minimum(num_replicas - 1.0, 1.0) * sizes.produced
    return [elements * more for elements in held_elements(terms, stages, sharded=False)]


def reserve_factor(profile: ExecutionProfile, machine: Machine) -> float:
    """Memory that the allocator holds over what is in tensors, of what comes and goes."""
    return profile.allocator.reserve_factor * machine.allocator_factor


def outside_bytes(profile: ExecutionProfile, machine: Machine, grid: LayoutGrid) -> Any:
    """Return what a run needs in addition to its allocator: context, communicators of its process groups, the framework's own. [byte]"""
    return (machine.context_bytes + profile.allocator.framework_bytes) + communicator_bytes(machine, grid)


def sole_outside_bytes(profile: ExecutionProfile, machine: Machine, num_chips: int) -> float:
    """Return the same where one process group has all ranks. [byte]"""
    return (machine.context_bytes + profile.allocator.framework_bytes) + world_communicator_bytes(machine, num_chips)


def waiting_memory(
    activations: ActivationTerms,
    terms: ParameterTerms,
    stages: Stages,
    sizes: Bytes,
    *,
    rank: int,
    num_microbatches: Column,
    tp: Column,
    is_scattered: bool,
    profile: ExecutionProfile,
) -> Any:
    """Bytes that the allocator holds beside the peak of one of the ranks told apart, and cannot give to it.

    Of the tensor-parallel collectives that the chip has not come to yet (two a layer in forward and in backward, as many as the launch
    queue holds and the host has run ahead) the whole tensor, and where the residual stream is cut over tp (`is_scattered`) its part.
    Gradients as produced, where they wait for the end of their microbatch. The libraries' workspaces.
    """
    if profile.allocator.delayed_collectives == 0.0 and profile.allocator.waiting_gradient_fraction == 0.0:
        return profile.allocator.workspace_bytes
    passes = 2.0 * num_microbatches - 1.0  # forward and backward up to the last forward, whose end is the peak
    collectives = np.minimum(profile.allocator.delayed_collectives, 2.0 * stages.blocks(rank) * passes)
    part = activations.boundary * float(is_scattered)
    full = activations.boundary * (tp if is_scattered else 1.0)
    delayed = ((np.minimum(tp - 1.0, 1.0) * collectives) * activations.run_ahead) * (full + part)
    later = np.minimum(num_microbatches - 1.0, 1.0)
    waiting = held_elements(terms, stages, sharded=False)[rank] * (sizes.produced * profile.allocator.waiting_gradient_fraction)
    return (delayed + later * waiting) + profile.allocator.workspace_bytes


def reserved_memory(kept: Column, base: Column, unreduced: Column) -> Any:
    """Bytes that a rank needs. kept: activations under way, times the allocator's factor; base: `base_memory`; unreduced gradients."""
    return kept + (base + unreduced)


def base_memory(moment: Column, fixed: Column, waiting: Column, *, factor: float, outside: Column) -> Any:
    """Memory that does not depend on the schedule: the largest moment with the allocator's gaps, static, waiting and outside memory."""
    return ((moment * factor + fixed) + waiting) + outside
