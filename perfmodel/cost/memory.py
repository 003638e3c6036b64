"""Bytes on a chip: what stays for the whole step, what microbatches keep, and the moment of the step at which most of it lives.

A step's memory is largest at one of few moments: when the loss is computed, while the head, the last or the first layer or the
embedding runs backward, or while a unit's gradients are reduced. Each moment is a sum of what lives then, by class; the peak is the
largest. Which moments there are depends on the ZeRO stage and on what the execution profile does with weights and gradients, never
on the numbers: every formula takes arrays of any shapes that broadcast.

A chip's allocator holds more than that: what comes and goes leaves gaps, and memory of tensors that a collective may still read is not
used again before the chip has caught up with the host. Both are measured, and belong to the execution profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from perfmodel.cost.machine import Machine
from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.parameters import ParameterProgram
from perfmodel.cost.pipeline import LiveLayers, live_microbatches
from perfmodel.cost.program import SAVED, peak_index
from perfmodel.cost.step import EMBEDDING, HEAD, LAYER, Bytes, ParameterTerms, Stages, held_elements, run_ahead_fraction
from perfmodel.parallel.habits import FLOAT32_BYTES
from perfmodel.parallel.layout import PipelineSchedule, Recompute
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.graph import REGIONS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerms:
    """Bytes of one microbatch under one kind of recomputation.

    kept            by region, from forward to backward
    peaks           by region: over what the region keeps, at the largest moment of its backward; a pair, for weight gradients
                    that leave at once and for those that stay until their unit is reduced
    boundary        a stage boundary
    logits          elements, not bytes
    run_ahead       how full the host keeps the chip's launch queue   [-]
    """

    kept: tuple[Any, ...]
    peaks: tuple[tuple[Any, Any], ...]
    boundary: Any
    logits: Any
    run_ahead: Any


def activation_terms(micro: MicrobatchCost, recompute: Recompute, profile: ExecutionProfile, tp: Any) -> ActivationTerms:
    kept, peaks = [], []
    rows = len(SAVED)
    for region, name in enumerate(REGIONS):
        keep, dropped, boundary = (micro.saved[region * rows + i] for i in range(rows))
        if region != LAYER or recompute is Recompute.NONE:
            kept.append((keep + boundary) + dropped)
        elif recompute is Recompute.SELECTIVE:
            kept.append(keep + boundary)
        else:
            kept.append(boundary)
        leaving, staying = (micro.peaks[peak_index(name, recompute, keeps_weight_gradients=stays)] for stays in (False, True))
        peaks.append((leaving, staying))
    return ActivationTerms(
        kept=tuple(kept),
        peaks=tuple(peaks),
        boundary=micro.boundary,
        logits=micro.logits,
        run_ahead=run_ahead_fraction(micro, profile, recompute, tp),
    )


def static_memory(terms: ParameterTerms, stages: Stages, sizes: Bytes, *, num_replicas: Any) -> list[tuple[Any, Any, Any, Any]]:
    """(weights, gradients, optimizer, gathered parameters) that the first, a middle and the last rank hold all through a step. [byte]

    Where weights are stored as shards, gradients come with the first backward pass: they belong to the moments. `num_replicas`: ranks that
    a gradient is reduced over; with one there are no buckets.
    """
    copy = np.minimum(num_replicas - 1.0, 1.0) * sizes.gradient_copy
    program = terms.program
    states = held_elements(terms, stages, sharded=terms.zero >= 1)
    full = held_elements(terms, stages, sharded=False)
    sharded = held_elements(terms, stages, sharded=True)
    held = []
    for i in range(3):
        gathered: Any = 0.0
        gradients: Any = 0.0
        if program.holds_sharded_weights:
            weights, optimizer = sharded[i] * sizes.stored, states[i] * sizes.state
            if keeps_gathered(program):
                gathered = full[i] * sizes.gathered
        elif sizes.keeps_compute_copy:
            # the copy that operators read; the master copy lies with the optimizer's state
            weights, optimizer = full[i] * sizes.gathered, states[i] * (sizes.state + sizes.stored)
        else:
            weights, optimizer = full[i] * sizes.stored, states[i] * sizes.state
        if not program.holds_sharded_weights:
            share = sharded[i] * sizes.sharded_gradient if program.holds_sharded_gradients else full[i] * sizes.whole_gradient
            gradients = share + full[i] * copy
        held.append((weights, gradients, optimizer, gathered))
    return held


def keeps_gathered(program: ParameterProgram) -> bool:
    """Whether weights that are stored as shards stay gathered, and gradients unreduced, for all microbatches (torch's pipelines)."""
    return program.holds_sharded_weights and not program.holds_sharded_gradients


class At(StrEnum):
    """What runs at a moment. Of virtual stages with unlike layers, a schedule has other passes under way while their ends run."""

    LAYER = "layer"
    HEAD = "head"
    EMBEDDING = "embedding"


#: Bytes by what runs: (activations, receive buffers).
Kept = dict[At, tuple[Any, Any]]
#: What has passes of its own under way on the first, a middle and the last rank.
AT = ((At.LAYER, At.EMBEDDING), (At.LAYER,), (At.LAYER, At.HEAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What lives at one moment of a step, beside what lives all through it.

    at        what runs
    freed     of the kept activations of all microbatches under way, what is gone already   (not positive)
    the others are classes of memory
    """

    name: str
    at: At = At.LAYER
    freed: Any = 0.0
    gradients: Any = 0.0
    gathered: Any = 0.0
    temporary: Any = 0.0
    buffers: Any = 0.0

    @property
    def total(self) -> Any:
        # what depends on fewer choices first: its sum is a smaller array
        return (self.temporary + self.freed) + ((self.gathered + self.gradients) + self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelining:
    """What a schedule does with microbatches, as columns. live: passes of layers under way on the first, a middle and the last rank."""

    schedule: PipelineSchedule
    num_ranks: Any
    num_microbatches: Any
    virtual_stages: Any
    live: Sequence[LiveLayers]

    @property
    def ranks(self) -> tuple[Any, Any, Any]:
        """The first, a middle and the last."""
        return 0.0, np.minimum(1.0, self.num_ranks - 1.0), self.num_ranks - 1.0


def kept_memory(
    activations: ActivationTerms, stages: Stages, pipelining: Pipelining, profile: ExecutionProfile, *, activation_bytes: float
) -> list[Kept]:
    """(activations, receive buffers) of the first, a middle and the last rank, as `kept_on_rank`. [byte]"""
    return [
        kept_by_moment(
            activations,
            pipelining,
            profile,
            rank=rank,
            live=pipelining.live[i],
            layers=stages.layers[i],
            at=AT[i],
            has_embedding=stages.has_embedding[i],
            has_head=stages.has_head[i],
            activation_bytes=activation_bytes,
        )
        for i, rank in enumerate(pipelining.ranks)
    ]


def kept_by_moment(
    activations: ActivationTerms,
    pipelining: Pipelining,
    profile: ExecutionProfile,
    *,
    rank: Any,
    live: LiveLayers,
    layers: Any,
    at: Sequence[At],
    has_embedding: Any,
    has_head: Any,
    activation_bytes: float,
) -> Kept:
    """`kept_on_rank` with the layers that are under way while each of `at` runs. [byte]

    layers  those of the rank, which the moment of the embedding takes for gone already
    """
    alive = {At.LAYER: live.most, At.HEAD: live.most - live.fewer_at_head, At.EMBEDDING: live.most + (layers - live.fewer_at_embedding)}
    # no logits where the most layers are under way while another virtual stage runs
    has_output = 1.0 - np.minimum(live.fewer_at_head, 1.0)
    return {
        each: kept_on_rank(
            activations,
            pipelining,
            profile,
            rank=rank,
            live_layers=alive[each],
            has_embedding=has_embedding,
            has_head=has_head,
            has_output=1.0 if each is At.HEAD else has_output,
            activation_bytes=activation_bytes,
        )
        for each in at
    }


def moments_at(moments: list[Moment], at: At, kept: Mapping[At, Any]) -> list[Moment]:
    """Those at which what `kept` has for `at` is under way: as while a layer runs, where nothing else is said."""
    return [moment for moment in moments if (moment.at if moment.at in kept else At.LAYER) is at]


def kept_on_rank(
    activations: ActivationTerms,
    pipelining: Pipelining,
    profile: ExecutionProfile,
    *,
    rank: Any,
    live_layers: Any,
    has_embedding: Any,
    has_head: Any,
    activation_bytes: float,
    has_output: Any = 1.0,
) -> tuple[Any, Any]:
    """Activations of all microbatches that a pipeline rank has under way at most, and its buffers for what it receives. [byte]

    rank, live_layers        its index and the passes of layers that it has under way
    has_embedding, has_head  1 or 0
    has_output               0 where no pass of the last virtual stage is under way

    Of the passes under way at most one has run the last virtual stage (gpipe: all have). torch's schedules keep what a stage has sent
    until its microbatch's backward has ended, logits too, and have a buffer for each receive of a step, in which its first layer's input
    stays.
    """
    p, m, v = pipelining.num_ranks, pipelining.num_microbatches, pipelining.virtual_stages
    embedding, layer, head = activations.kept
    alive = live_microbatches(schedule=pipelining.schedule, rank=rank, num_ranks=p, num_microbatches=m, virtual_stages=v)
    ended = has_head * (m if pipelining.schedule is PipelineSchedule.GPIPE else 1.0)
    begun = alive
    if pipelining.schedule is PipelineSchedule.INTERLEAVED:
        begun = np.minimum(m, 2.0 * p - 1.0)  # pp first passes, then the others of these microbatches, then pp - 1 first passes more
    begun = has_embedding * begun
    of_layers, of_ends = live_layers * layer, begun * embedding + ended * head
    is_pipelined = np.minimum(p - 1.0, 1.0)
    if not profile.pipeline_keeps_boundaries:
        return of_layers + of_ends, is_pipelined * (2.0 * activations.boundary)
    # what a pass has received lies in its buffer already
    ended = ended * has_output
    sent = (begun - ended) * activations.boundary + ended * (activations.logits * activation_bytes)
    receives = m * ((2.0 * v - has_embedding) - has_head)
    return of_layers + (of_ends + is_pipelined * sent), is_pipelined * (receives * activations.boundary)


def rank_moments(
    activations: ActivationTerms,
    terms: ParameterTerms,
    stages: Stages,
    sizes: Bytes,
    *,
    rank: int,
    num_microbatches: Any,
    profile: ExecutionProfile,
    activation_bytes: float,
) -> list[Moment]:
    """The moments of the first (0), a middle (1) or the last (2) rank. [byte]"""
    walk = _Moments(
        a=activations,
        t=terms,
        stages=stages,
        sizes=sizes,
        rank=rank,
        m=num_microbatches,
        profile=profile,
        activation_bytes=activation_bytes,
    )
    program = terms.program
    return walk.sharded() if program.holds_sharded_weights and program.holds_sharded_gradients else walk.whole()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreduced:
    """Gradients that wait, whole, for the last microbatch: those that are there while most activations are (`early`), or all of them,
    when some activations have gone (`freed`). In bytes, with the allocator's share."""

    early: Any = 0.0
    later: Any = 0.0
    freed: Any = 0.0

    @property
    def total(self) -> Any:
        return np.maximum(self.early, self.later - self.freed)


def unreduced_gradients(
    activations: ActivationTerms,
    terms: ParameterTerms,
    stages: Stages,
    sizes: Bytes,
    *,
    rank: int,
    live: LiveLayers,
    profile: ExecutionProfile,
    activation_bytes: float,
    factor: float = 1.0,
) -> Unreduced:
    """Of the first (0), a middle (1) or the last (2) rank, where weights stay gathered; else nothing. `factor`: the allocator's.

    They come to lie beside activations: a rank runs its virtual stages' backward passes from the last to the first.
    """
    if not keeps_gathered(terms.program):
        return Unreduced()
    gradients = held_elements(terms, stages, sharded=False)[rank] * (sizes.whole_gradient * factor)
    output = activations.logits * (activation_bytes * float(profile.pipeline_keeps_boundaries))
    freed = live.fewer * activations.kept[LAYER] + (live.ended * stages.has_head[rank]) * (activations.kept[HEAD] + output)
    return Unreduced(early=live.present * gradients, later=gradients, freed=freed * factor)


@dataclass(slots=True, kw_only=True)
class _Moments:
    a: ActivationTerms
    t: ParameterTerms
    stages: Stages
    sizes: Bytes
    rank: int
    m: Any
    profile: ExecutionProfile
    activation_bytes: float

    @property
    def layers(self) -> Any:
        return self.stages.layers[self.rank]

    @property
    def has_head(self) -> Any:
        return self.stages.has_head[self.rank]

    @property
    def has_embedding(self) -> Any:
        return self.stages.has_embedding[self.rank]

    @property
    def tied(self) -> Any:
        """Elements of a matrix that both ends of this rank read: its first gradient waits for the second."""
        return self.stages.is_single * self.t.tied[0]

    def logits(self) -> Any:
        """The logits themselves, or their gradient, and what the loss works with."""
        own: Any = self.activation_bytes
        if self.profile.pipeline_keeps_boundaries and self.activation_bytes >= FLOAT32_BYTES:
            # counted with what the schedule keeps, and the gradient is made in place of the softmax
            own = self.stages.is_single * own
        return self.a.logits * (self.profile.loss_peak_bytes + own)

    def whole(self) -> list[Moment]:
        """Weights and gradients stay whole all through the step, or weights stay gathered."""
        a, t = self.a, self.t
        # unreduced gradients that wait in the dtype in which they are made are added to at once, others at the end of their unit
        converts = self.sizes.produced != self.sizes.whole_gradient
        stays = int(keeps_gathered(t.program) and converts)
        gradient = 0.0 if self.profile.fuses_gradient_accumulation else self.tied * self.sizes.produced
        reduced = self.reduced()
        moments = []
        head_kept = self.has_head * a.kept[HEAD]
        if self.rank == 2:
            moments.append(Moment(name="loss", at=At.HEAD, temporary=self.logits() + self.exchanged()))
            moments.append(Moment(name="backward of the head", at=At.HEAD, temporary=a.peaks[HEAD][stays] + self.exchanged()))
        if self.rank != 1:
            moments.append(
                Moment(
                    name="backward of the embedding",
                    at=At.EMBEDDING,
                    freed=-head_kept - self.layers * a.kept[LAYER],
                    temporary=self.has_embedding * (a.peaks[EMBEDDING][stays] + 2.0 * gradient),
                    buffers=reduced,
                )
            )
        moments.append(
            Moment(
                name="backward of a layer",
                freed=-head_kept,
                temporary=(np.minimum(self.layers, 1.0) * a.peaks[LAYER][stays] + gradient) + self.exchanged(),
                buffers=reduced,
            )
        )
        return moments

    def exchanged(self) -> Any:
        """Gradients of boundaries under torch's schedules: one that leaves stays for a while; one that has come lies in its buffer."""
        if not self.profile.pipeline_keeps_boundaries:
            return 0.0
        leaves = (0.0, 1.0, 1.0)[self.rank] * np.minimum(self.m - 1.0, 1.0)
        return (1.0 - self.stages.is_single) * ((leaves - (1.0, 1.0, 0.0)[self.rank]) * self.a.boundary)

    def reduced(self) -> Any:
        """The buffer in which the last unit's gradients leave, where they leave after each microbatch."""
        if not self.t.program.holds_sharded_gradients:
            return 0.0
        return self.t.padded[LAYER] * self.sizes.reduced

    def sharded(self) -> list[Moment]:
        """Units of weights are gathered and freed, their gradients reduced as they come (fully_shard).

        Beside the unit at work (its gathered weights, its gradients as they are produced) live the next one's weights on their way, and
        the buffer in which the gradients of the unit before leave.
        """
        a, t, sizes, n = self.a, self.t, self.sizes, self.layers
        has = (self.has_embedding, 1.0, self.has_head)
        held = [there * shard * sizes.sharded_gradient for there, shard in zip(has, t.shard, strict=True)]
        twice = self.tied
        is_tied = np.minimum(twice, 1.0)
        untied = 1.0 - is_tied

        def units(elements: tuple[Any, ...]) -> tuple[Any, Any]:
            """Of the embedding and of the head. A tied matrix joins both in one unit, which is gathered throughout and reduced last."""
            ends = elements[EMBEDDING] + elements[HEAD] - twice
            embedding = self.has_embedding * np.where(is_tied > 0.0, ends, elements[EMBEDDING])
            return embedding, self.has_head * np.where(is_tied > 0.0, ends, elements[HEAD])

        (embedding, head), (wide_embedding, wide_head), layer = units(t.full), units(t.padded), t.padded[LAYER]
        g_head, g_layer, g_embedding = wide_head * sizes.gathered, layer * sizes.gathered, wide_embedding * sizes.gathered
        lasting = is_tied * (g_head + twice * sizes.produced)
        r_head, r_layer = untied * (wide_head * sizes.reduced), layer * sizes.reduced
        r_embedding = wide_embedding * sizes.reduced
        total = (held[EMBEDDING] + n * held[LAYER]) + held[HEAD] - self.stages.is_single * t.tied[1] * sizes.sharded_gradient
        later = np.minimum(self.m - 1.0, 1.0)  # 1 where an earlier microbatch has left gradients
        h_head = untied * held[HEAD]
        later_layers = np.minimum(n - 1.0, 1.0)  # 1 where there is more than one
        if t.program.frees_gathered:
            # the unit at work and the one on its way
            at_loss, at_head, at_reduction = g_head, g_head + g_layer, g_layer + lasting
            at_last = at_previous = 2.0 * g_layer + lasting
            at_first, at_embedding = g_layer + untied * g_embedding + lasting, untied * g_embedding + lasting
        else:
            # all those whose backward has not ended
            below = untied * g_embedding + lasting
            at_loss = at_head = untied * g_head + n * g_layer + g_embedding
            at_reduction = at_last = n * g_layer + below
            at_previous = (n - later_layers) * g_layer + below
            at_first, at_embedding = g_layer + below, below

        def gradients(so_far: Any) -> Any:
            return later * total + (1.0 - later) * so_far

        kept = a.kept
        without_head = -(self.has_head * kept[HEAD])
        return [
            # copied out of the buffer in which they came; that of the unit before lives until then
            Moment(
                name="gathering of the head",
                at=At.HEAD,
                freed=without_head,
                gathered=at_loss + untied * (self.has_head * (g_head + g_layer)),
                gradients=gradients(0.0),
            ),
            Moment(name="loss", at=At.HEAD, gathered=at_loss, temporary=self.has_head * self.logits(), gradients=gradients(0.0)),
            Moment(
                name="backward of the head",
                at=At.HEAD,
                gathered=at_head,
                temporary=self.has_head * a.peaks[HEAD][1],
                gradients=gradients(0.0),
            ),
            Moment(
                name="reduction of the head's gradients",
                at=At.HEAD,
                freed=without_head,
                gathered=at_reduction,
                temporary=a.boundary + untied * (head * sizes.produced),
                buffers=r_head + later * h_head,
                gradients=gradients(h_head),
            ),
            Moment(
                name="backward of the last layer",
                freed=without_head,
                gathered=at_last,
                temporary=a.peaks[LAYER][1],
                buffers=r_head,
                gradients=gradients(h_head),
            ),
            Moment(
                name="backward of the layer before the last",
                freed=without_head - later_layers * kept[LAYER],
                gathered=at_previous,
                temporary=a.peaks[LAYER][1],
                buffers=r_layer * later_layers,
                gradients=gradients(h_head + held[LAYER]),
            ),
            Moment(
                name="backward of the first layer",
                freed=without_head - (n - 1.0) * kept[LAYER],
                gathered=at_first,
                temporary=a.peaks[LAYER][1],
                buffers=r_layer * later_layers,
                gradients=gradients(h_head + (n - 1.0) * held[LAYER]),
            ),
            Moment(
                name="backward of the embedding",
                at=At.EMBEDDING,
                freed=without_head - n * kept[LAYER],
                gathered=at_embedding,
                temporary=self.has_embedding * a.peaks[EMBEDDING][1] + twice * sizes.produced,
                buffers=r_layer,
                gradients=gradients(h_head + n * held[LAYER]),
            ),
            Moment(
                name="reduction of the embedding's gradients",
                at=At.EMBEDDING,
                freed=without_head - n * kept[LAYER] - self.has_embedding * kept[EMBEDDING],
                temporary=embedding * sizes.produced,
                buffers=r_embedding + later * held[EMBEDDING],
                gradients=gradients(total),
            ),
        ]


def largest(moments: list[Moment]) -> Any:
    found = moments[0].total
    for moment in moments[1:]:
        found = np.maximum(found, moment.total)
    return found


def fixed_memory(static: tuple[Any, Any, Any, Any]) -> Any:
    weights, gradients, states, gathered = static
    return ((weights + gradients) + states) + gathered


def reserve_factor(profile: ExecutionProfile, machine: Machine) -> float:
    """Memory that the allocator holds over what is in tensors, of what comes and goes."""
    return profile.reserve_factor * machine.allocator_factor


def outside_bytes(profile: ExecutionProfile, machine: Machine) -> float:
    """What a run needs beside its allocator."""
    return machine.context_bytes + profile.framework_bytes


def waiting_memory(
    activations: ActivationTerms,
    terms: ParameterTerms,
    stages: Stages,
    sizes: Bytes,
    *,
    rank: int,
    num_microbatches: Any,
    tp: Any,
    is_scattered: bool,
    profile: ExecutionProfile,
) -> Any:
    """Bytes that the allocator holds beside the peak of the first (0), a middle (1) or the last (2) rank, and cannot give to it.

    Of the tensor-parallel collectives that the chip has not come to yet (two a layer in forward and in backward, as many as the launch
    queue holds and the host has run ahead) the whole tensor, and where the residual stream is cut over tp (`is_scattered`) its part.
    Gradients as produced, where they wait for the end of their microbatch. The libraries' workspaces.
    """
    if profile.delayed_collectives == 0.0 and profile.waiting_gradient_fraction == 0.0:
        return profile.workspace_bytes
    passes = 2.0 * num_microbatches - 1.0  # forward and backward up to the last forward, whose end is the peak
    collectives = np.minimum(profile.delayed_collectives, 2.0 * stages.layers[rank] * passes)
    part = activations.boundary * float(is_scattered)
    whole = activations.boundary * (tp if is_scattered else 1.0)
    delayed = ((np.minimum(tp - 1.0, 1.0) * collectives) * activations.run_ahead) * (whole + part)
    later = np.minimum(num_microbatches - 1.0, 1.0)
    waiting = held_elements(terms, stages, sharded=False)[rank] * (sizes.produced * profile.waiting_gradient_fraction)
    return (delayed + later * waiting) + profile.workspace_bytes


def reserved_memory(kept: Any, base: Any, unreduced: Unreduced) -> Any:
    """Bytes that a rank needs. kept: activations under way, times the allocator's factor; base: `base_memory`."""
    return kept + (base + unreduced.total)


def base_memory(moment: Any, fixed: Any, waiting: Any, *, factor: float, outside: float) -> Any:
    """What does not depend on the schedule: the largest moment with the allocator's gaps, what stays, what waits, what lies outside."""
    return ((moment * factor + fixed) + waiting) + outside
