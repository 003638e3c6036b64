"""The moments of a step at which most memory may live, and what lives then beside what lives all through it.

When the loss is computed, while the head, the last or the first layer or the embedding runs backward, or while a unit's gradients are
reduced. Which moments there are depends on the ZeRO stage and on what the execution profile does with weights and gradients, never
on the numbers: every formula takes arrays of any shapes that broadcast.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.parameters import ParameterProgram
from perfmodel.cost.program import FORWARD_PEAK, SAVED, peak_index
from perfmodel.cost.step import EMBEDDING, HEAD, LAYER, Bytes, ParameterTerms, Stages, run_ahead_fraction
from perfmodel.parallel.habits import FLOAT32_BYTES
from perfmodel.parallel.layout import Recompute
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.graph import REGIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerms:
    """Bytes of one microbatch under one kind of recomputation.

    kept            by region, from forward to backward
    peaks           by region: over what the region keeps, at the largest moment of its backward; a pair, for weight gradients
                    that leave at once and for those that stay until their unit is reduced
    forward         of a layer: over what it keeps, at the end of its forward
    boundary        a stage boundary
    logits          elements, not bytes
    run_ahead       how full the host keeps the chip's launch queue   [-]
    """

    kept: tuple[Any, ...]
    peaks: tuple[tuple[Any, Any], ...]
    forward: Any
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
        forward=micro.peaks[FORWARD_PEAK],
        boundary=micro.boundary,
        logits=micro.logits,
        run_ahead=run_ahead_fraction(micro, profile, recompute, tp),
    )


def keeps_gathered(program: ParameterProgram) -> bool:
    """Whether weights that are stored as shards stay gathered, and gradients unreduced, for all microbatches (torch's pipelines)."""
    return program.holds_sharded_weights and not program.holds_sharded_gradients


class At(StrEnum):
    """What runs at a moment. Of virtual stages with unlike layers, a schedule has other passes under way while their ends run."""

    LAYER = "layer"
    HEAD = "head"
    EMBEDDING = "embedding"


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


def moments_at(moments: list[Moment], at: At, kept: Container[At]) -> list[Moment]:
    """Those at which what `kept` has for `at` is under way: as while a layer runs, where nothing else is said."""
    return [moment for moment in moments if (moment.at if moment.at in kept else At.LAYER) is at]


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
        some = np.minimum(n, 1.0)
        later_layers = np.minimum(np.maximum(n - 1.0, 0.0), 1.0)  # 1 where there is more than one
        if t.program.frees_gathered:
            # the unit at work and the one on its way
            at_forward, at_loss, at_head, at_reduction = some * g_layer + is_tied * g_head, g_head, g_head + g_layer, g_layer + lasting
            at_last = at_previous = 2.0 * g_layer + lasting
            at_first, at_embedding = g_layer + untied * g_embedding + lasting, untied * g_embedding + lasting
        else:
            # all those whose backward has not ended
            below = untied * g_embedding + lasting
            at_forward = n * g_layer + g_embedding
            at_loss = at_head = untied * g_head + n * g_layer + g_embedding
            at_reduction = at_last = n * g_layer + below
            at_previous = (n - later_layers) * g_layer + below
            at_first, at_embedding = g_layer + below, below

        def gradients(so_far: Any) -> Any:
            return later * total + (1.0 - later) * so_far

        kept = a.kept
        without_head = -(self.has_head * kept[HEAD])
        # of what the head keeps the probabilities come after the logits
        before_loss = 0.0 if self.profile.fused_cross_entropy else a.logits * (self.activation_bytes - FLOAT32_BYTES)
        return [
            # weights are copied out of the buffer in which they came, which lives until those of the next unit are, or to forward's end
            Moment(
                name="gathering of the last layer",
                freed=without_head - some * kept[LAYER],
                gathered=at_forward + (some + later_layers) * g_layer + (some - later_layers) * g_embedding,
                gradients=gradients(0.0),
            ),
            Moment(
                name="forward of the last layer",
                freed=without_head,
                gathered=at_forward + some * g_layer,
                temporary=some * a.forward,
                gradients=gradients(0.0),
            ),
            Moment(
                name="forward of the head",
                at=At.HEAD,
                gathered=at_loss + untied * g_head + (is_tied * some) * g_layer,
                temporary=self.has_head * before_loss,
                gradients=gradients(0.0),
            ),
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
