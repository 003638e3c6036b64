"""Moments of a step at which memory may peak, and the memory at each in addition to static memory.

The candidates: the loss; the backward pass of a region, of blocks the last or the first; the reduction of a unit's gradients. They depend
on the regions of the graph, the ZeRO stage and the execution profile's treatment of weights and gradients, never on the numbers. Every
formula takes arrays of any shapes that broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from perfmodel.cost.evaluate import MicrobatchCost, kept_bytes, saved_classes
from perfmodel.cost.program import SAVED
from perfmodel.cost.stages import Regions, Stages, neighbour, run_times, sum_of
from perfmodel.cost.step import exchanged_passes, run_ahead_fraction
from perfmodel.cost.update import Bytes, ParameterTerms, held_elements
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.rewrites import FLOAT32_BYTES
from perfmodel.parallel.choices import Recompute

IN_FLIGHT = 2.0
"""Layers whose offloaded activations are on the chip: the one that runs, and the one in transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerms:
    """Bytes of one micro-batch under one kind of recomputation.

    kept            by region, of a block once: saved activations
    peaks           by region: the largest moment of its backward, relative to its saved activations. A pair: for weight gradients that are
                    accumulated at once, and for those that stay until their unit is reduced. Of a block: of its forward if that is larger
    forward         by region, of blocks: the largest moment of its forward, relative to its saved activations. Of regions before blocks:
                    of its backward if the gradient that it receives is in a buffer
    boundary        a stage boundary
    logits          elements, not bytes
    postponed       by region, of a pass without gradients of weights yet (`SAVED`); empty if backward is not split
    run_ahead       how full the host keeps the chip's launch queue   [-]
    """

    kept: tuple[Any, ...]
    peaks: tuple[tuple[Any, Any], ...]
    forward: tuple[Any, ...]
    boundary: Column
    logits: Column
    run_ahead: Column
    postponed: tuple[Any, ...] = ()


def activation_terms(micro: MicrobatchCost, recompute: Recompute, profile: ExecutionProfile, tp: Column) -> ActivationTerms:
    """Return the activation memory of a micro-batch, by region."""
    kept = list(kept_bytes(micro, recompute))
    peaks: list[tuple[Any, Any]] = []
    forward: list[Any] = []
    program = micro.program
    for region, it in enumerate(program.regions):
        again = recompute if it.is_block else Recompute.NONE
        first = program.peaks.backward[region, again]
        leaving, staying = micro.peaks[first], micro.peaks[first + 1]
        if (region, again) not in program.peaks.forward:
            forward.append(0.0 * micro.boundary)
        else:
            forward.append(micro.peaks[program.peaks.forward[region, again]])
        if it.is_block:
            alone = np.maximum(leaving, forward[-1]), np.maximum(staying, forward[-1])
            if profile.exchanges.hides_exchanges:
                # another micro-batch's block runs forward concurrently, and is saved before this one is freed
                if (region, again) in program.peaks.delayed:
                    late = program.peaks.delayed[region, again]
                    leaving, staying = micro.peaks[late], micro.peaks[late + 1]
                overlapped, exchanges = forward[-1] + kept[region], exchanged_passes(micro, profile, recompute).sum(axis=0)[region] > 0.0
                leaving, staying = (np.where(exchanges, x + overlapped, y) for x, y in zip((leaving, staying), alone, strict=True))
            else:
                leaving, staying = alone
        if it.is_block and profile.offloads_saved(recompute):
            # offloaded activations are on the chip when their layer runs, and those of the next layer are in transfer
            in_flight = IN_FLIGHT * kept[region]
            leaving, staying, forward[-1] = leaving + in_flight, staying + in_flight, forward[-1] + in_flight
            kept[region] = 0.0 * kept[region]
        peaks.append((leaving, staying))
    return ActivationTerms(
        kept=tuple(kept),
        peaks=tuple(peaks),
        forward=tuple(forward),
        boundary=micro.boundary,
        logits=micro.logits,
        run_ahead=run_ahead_fraction(micro, profile, recompute, tp) if profile.allocator.delayed_collectives else 0.0 * tp,
        postponed=tuple(saved_classes(micro)[SAVED.index("postponed")]) if program.splits_backward else (),
    )


class At(StrEnum):
    """Part of the model that runs at a moment: before the blocks, the blocks, or after them.

    If virtual stages differ in their number of blocks, a schedule has other passes in flight while the ends run.
    """

    BLOCKS = "blocks"
    LAST = "last"
    FIRST = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory at one moment of a step, in addition to static memory.

    at        part that runs
    freed     saved activations of micro-batches in flight that are already freed   (not positive)
    the others are classes of memory
    """

    name: str
    at: At = At.BLOCKS
    freed: Column = 0.0
    gradients: Column = 0.0
    gathered: Column = 0.0
    temporary: Column = 0.0
    buffers: Column = 0.0

    @property
    def total(self) -> Any:
        # terms that depend on fewer choices first: their sum is a smaller array
        return (self.temporary + self.freed) + ((self.gathered + self.gradients) + self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTerms:
    """Terms of the memory of pipeline ranks, as numbers or as columns.

    static         (weights, gradients, optimizer, gathered parameters) of each distinct rank (`Stages`)
    num_replicas   ranks that the gradient of a weight is reduced over
    is_scattered   whether the residual stream is cut over tp
    factor         ratio of reserved to allocated bytes of temporary tensors   [-]
    outside        memory outside the allocator   [byte]
    """

    activations: ActivationTerms
    terms: ParameterTerms
    stages: Stages
    static: list[tuple[Any, Any, Any, Any]]
    num_replicas: Column
    num_microbatches: Column
    tp: Column
    is_scattered: bool
    activation_bytes: float
    profile: ExecutionProfile
    sizes: Bytes
    factor: float
    outside: Column


def rank_moments(of: MemoryTerms, rank: int) -> list[Moment]:
    """Return the moments of a distinct rank (`Stages`). [byte]"""
    walk, program = _Moments(of, rank), of.terms.program
    moments = _Sharded(walk).moments() if program.holds_sharded_weights and program.holds_sharded_gradients else walk.unsharded()
    return [*moments, walk.optimizer_step()] if of.sizes.optimizer.copy else moments


class _Moments:
    """Moments of a distinct rank. Units of weights that are gathered and freed are in `_Sharded`.

    runs   number of times that this rank runs each region
    tied   elements of a matrix that both ends of this rank read: its first gradient waits for the second
    """

    def __init__(self, of: MemoryTerms, rank: int) -> None:
        self.a, self.t, self.stages, self.sizes, self.rank, self.m = (
            of.activations,
            of.terms,
            of.stages,
            of.sizes,
            rank,
            of.num_microbatches,
        )
        self.profile, self.activation_bytes = of.profile, of.activation_bytes
        self.regions: Regions = of.stages.regions
        self.runs = of.stages.runs[rank]
        self.is_last_rank = rank == of.stages.ending
        self.tied: Any = of.stages.has_both_ends[rank] * of.terms.tied[0]

    def at(self, region: int) -> At:
        """Return the part of the model to which a region belongs."""
        inner = self.stages.inner
        return At.FIRST if region < inner.start else At.LAST if region >= inner.stop else At.BLOCKS

    def of_turn(self, region: int, values: Sequence[Any]) -> Any:
        """Return the sum over the regions that alternate with this one and follow it, without the one that runs backward before it."""
        turn = self.regions[region].turn
        others = [i for i in range(region + 1, len(self.regions)) if self.regions[i].turn == turn]
        return sum_of([np.maximum(self.runs[i] - 1.0, 0.0) * values[i] for i in others])

    def of_round(self, region: int, values: Sequence[Any]) -> Any:
        """Return the sum over this region and the regions that alternate with it, once each."""
        turn = self.regions[region].turn
        return sum_of([values[i] for i, it in enumerate(self.regions) if it.turn == turn])

    def logits(self) -> Any:
        """Return the bytes of the logits or of their gradient, and of the workspace of the loss."""
        itemsize: Column = self.activation_bytes
        if self.profile.stages.pipeline_keeps_boundaries and self.activation_bytes >= FLOAT32_BYTES:
            # counted with the outputs that the schedule keeps; the gradient overwrites the softmax
            itemsize = self.stages.is_single * itemsize
        return self.a.logits * (self.profile.activations.loss_peak_bytes + itemsize)

    def unsharded(self) -> list[Moment]:
        """Return the moments if weights and gradients are unsharded throughout the step, or if weights stay gathered."""
        a, runs, sizes, regions = self.a, self.runs, self.sizes, self.regions
        # gradients are accumulated at once in the dtype in which they are produced, and in another at the end of their unit
        of = sizes.gradient
        stays = int(self.profile.state.steps_in_backward or (self.t.program.keeps_gathered and of.produced != of.unsharded))
        # in a V each end runs backward by itself, and its gradient of a shared matrix is accumulated at once
        waits = not (self.profile.kernels.fuses_gradient_accumulation or self.stages.is_folded)
        gradient = self.tied * of.produced if waits else 0.0
        exchanged = self.exchanged() if self.profile.stages.pipeline_keeps_boundaries else 0.0
        moments = []
        if self.is_last_rank:
            moments.append(Moment(name="loss", at=At.LAST, temporary=self.logits() + exchanged))
        freed: Column = 0.0
        for i in reversed(range(len(runs))):
            if i < len(runs) - 1 and not (isinstance(runs[i + 1], float) and runs[i + 1] == 0.0):
                freed = freed - run_times(runs[i + 1], a.kept[i + 1])
            at, peak = self.at(i), a.peaks[i][stays]
            temporary: Column | None = None
            if at is At.BLOCKS:
                temporary = (np.minimum(runs[i], 1.0) * peak + gradient) + exchanged
            elif at is At.LAST and self.is_last_rank:
                temporary = peak + exchanged
            elif at is At.FIRST and (self.rank == 0 or self.is_last_rank):
                if i == self.stages.inner.start - 1 and self.profile.stages.pipeline_keeps_boundaries:
                    # the gradient received by a first stage without blocks is in its buffer
                    peak = np.where((1.0 - self.stages.is_single) * (1.0 - self.stages.blocks[0]) > 0.0, a.forward[i], peak)
                temporary = run_times(runs[i], peak + (2.0 if i == 0 else 1.0) * gradient)
            if temporary is not None:
                gone = freed + self.of_turn(i, a.kept) if regions[i].turn else freed
                name = f"backward of {'a' if regions[i].is_block else 'the'} {regions[i].name or 'network'}"
                buffers = 0.0
                if self.t.program.holds_sharded_gradients and (before := neighbour(regions, i, 1)) < len(regions):
                    # gradients are reduced after each micro-batch: those of the previous unit are in their reduce-scatter buffer
                    buffers = self.t.padded[before] * sizes.gradient.reduced
                moments.append(Moment(name=name, at=at, freed=gone, temporary=temporary, buffers=buffers))
                if self.t.compression is not None:
                    once = np.minimum(runs[i], 1.0)
                    name = f"compression of the {regions[i].name or 'network'}'s gradients"
                    moments.append(Moment(name=name, at=at, freed=gone - once * a.kept[i], buffers=once * self.t.compression.copy[i]))
        return moments

    def optimizer_step(self) -> Moment:
        """Return the optimizer step: all gradients, no activations, and a temporary as large as one state of all parameters."""
        is_sharded = self.t.program.holds_sharded_weights and self.t.program.holds_sharded_gradients
        elements = held_elements(self.t, self.stages, sharded=self.t.zero >= 1)[self.rank]
        freed = sum_of([run_times(runs, kept) for runs, kept in zip(self.runs, self.a.kept, strict=True)])
        return Moment(
            name="the optimizer's step",
            freed=-freed,
            temporary=elements * self.sizes.optimizer.copy,
            gradients=elements * self.sizes.gradient.sharded if is_sharded else 0.0,
        )

    def exchanged(self) -> Any:
        """Return the boundary gradients under torch's schedules: a sent one stays for a while; a received one is in its buffer."""
        if self.stages.is_folded:  # every rank sends gradients and receives some
            return (np.minimum(self.m - 1.0, 1.0) - 1.0) * self.a.boundary
        leaves = (0.0 if self.rank == 0 else 1.0) * np.minimum(self.m - 1.0, 1.0)
        return (1.0 - self.stages.is_single) * ((leaves - (0.0 if self.is_last_rank else 1.0)) * self.a.boundary)


class _Sharded:
    """Moments of a rank that gathers and frees units of weights, and reduces their gradients at once (fully_shard).

    Each region is a unit, and each block. In addition to the gathered weights and the gradients of the current unit, two buffers are alive:
    the prefetched weights of the next unit, and the reduce-scatter buffer of the previous unit's gradients. A matrix shared by both ends
    joins them in one unit, which stays gathered and is reduced last.
    """

    def __init__(self, rank: _Moments) -> None:
        self.rank, self.a, self.t, self.sizes, self.runs = rank, rank.a, rank.t, rank.sizes, rank.runs
        regions, sizes = rank.regions, rank.sizes
        self.last = len(regions) - 1
        #: whether there are regions before and after the blocks
        self.has_first, self.has_last = self.last > 0 and not regions[0].is_block, not regions[self.last].is_block
        self.frees = self.t.program.frees_gathered
        self.later_microbatch = np.minimum(rank.m - 1.0, 1.0)  # 1 if an earlier micro-batch has left gradients
        self.twice = rank.tied
        frozen = self.t.frozen
        #: bytes of a frozen matrix that both ends read
        frozen_twice = rank.stages.has_both_ends[rank.rank] * frozen.tied[0] if frozen is not None else 0.0
        self.is_tied = np.minimum(self.twice + frozen_twice, 1.0)
        self.untied = 1.0 - self.is_tied
        there = [1.0 if region.is_block else runs for runs, region in zip(self.runs, regions, strict=True)]
        self.held = [times * shard * sizes.gradient.sharded for times, shard in zip(there, self.t.shard, strict=True)]
        self.full, self.wide = self._units(self.t.full, self.twice), self._units(self.t.padded, self.twice)
        self.gathered = [unit * sizes.gathered for unit in self.wide]
        if frozen is not None:
            self.gathered = [unit + more for unit, more in zip(self.gathered, self._units(frozen.padded, frozen_twice), strict=True)]
        self.reduced = [unit * sizes.gradient.reduced for unit in self.wide]
        sums = [runs * held if region.is_block else held for runs, region, held in zip(self.runs, regions, self.held, strict=True)]
        self.total = sum_of(sums) - rank.stages.has_both_ends[rank.rank] * self.t.tied[1] * sizes.gradient.sharded
        #: the unit of the shared matrix, until it is reduced
        self.lasting = self.is_tied * (self._of_last(self.gathered) + self.twice * sizes.gradient.produced)
        if self.has_last:
            self.reduced[self.last] = self.untied * self.reduced[self.last]
            self.held[self.last] = self.untied * self.held[self.last]
        #: gathered weights of all regions before each, with the unit that stays gathered
        self.below: list[Any] = [self.lasting]
        for i in range(self.last):
            weights = self._of(self.gathered, i)
            self.below.append(weights + self.below[-1] if i == 0 and self.has_first else self.runs[i] * weights + self.below[-1])

    def _units(self, elements: tuple[Any, ...], twice: Column) -> list[Any]:
        """Return the sizes of a unit of each region on this rank; `twice`: elements that both ends hold."""
        units = list(elements)
        ends = {0, self.last} if self.has_first and self.has_last else set[int]()
        for i, region in enumerate(self.rank.regions):
            if not region.is_block:
                both = elements[0] + elements[self.last] - twice
                units[i] = self.runs[i] * (np.where(self.is_tied > 0.0, both, elements[i]) if i in ends else elements[i])
        return units

    def _of_last(self, values: list[Any]) -> Any:
        """Return the value of the last region; 0 if the last region is a block."""
        return values[self.last] if self.has_last else 0.0

    def _of(self, values: list[Any], region: int) -> Any:
        """Return the value of a region; of the first region only if it is not part of the unit that stays gathered."""
        if region < 0:
            return 0.0
        return self.untied * values[0] if region == 0 and self.has_first else values[region]

    def _up_to(self, region: int, total: Column | None = None) -> Any:
        """Return the gathered weights of a region and of those before it, as in forward, plus `total`."""
        for i in range(region, -1, -1):
            more = self.gathered[0] if i == 0 and self.has_first else self.runs[i] * self.gathered[i]
            total = more if total is None else total + more
        return total

    def gradients(self, so_far: Column) -> Any:
        """Return the gradient bytes: all if an earlier micro-batch has left gradients, otherwise those `so_far`."""
        return self.later_microbatch * self.total + (1.0 - self.later_microbatch) * so_far

    def moments(self) -> list[Moment]:
        moments: list[Moment] = []
        freed: Column = 0.0
        reduced: Column = 0.0
        for i in range(self.last, -1, -1):
            if i == self.last and self.has_last:
                moments += self._of_last_region(i)
            elif i == 0 and self.has_first:
                moments += self._of_first_region(freed, reduced)
            else:
                moments += self._of_region(i, freed, reduced)
            freed = freed - self.runs[i] * self.a.kept[i]
            reduced = reduced + (self.runs[i] * self.held[i] if self.rank.regions[i].is_block else self.held[i])
        return moments

    def _of_last_region(self, i: int) -> list[Moment]:
        """Return the moments of the last region's forward pass, the loss and its backward pass."""
        a, rank, has, g, untied = self.a, self.rank, self.runs[i], self.gathered[i], self.untied
        name, before = rank.regions[i].name or "network", i - 1
        g_before = self._of(self.gathered, before)
        some = np.minimum(self.runs[before], 1.0) if before >= 0 else 0.0
        if self.frees:
            at_loss, at_backward, at_reduction = g, g + g_before, g_before + self.lasting
        else:
            # all units whose backward has not ended
            at_loss = at_backward = self._up_to(before, untied * g)
            at_reduction = self.below[i]
        # the probabilities that the last region saves are computed after the logits
        before_loss = 0.0 if rank.profile.kernels.fused_cross_entropy else a.logits * (rank.activation_bytes - FLOAT32_BYTES)
        freed = -(has * a.kept[i])
        none = self.gradients(0.0)
        return [
            Moment(
                name=f"forward of the {name}",
                at=At.LAST,
                gathered=at_loss + untied * g + (self.is_tied * some) * g_before,
                temporary=has * before_loss,
                gradients=none,
            ),
            Moment(
                name=f"gathering of the {name}",
                at=At.LAST,
                freed=freed,
                gathered=at_loss + untied * (has * (g + g_before)),
                gradients=none,
            ),
            Moment(name="loss", at=At.LAST, gathered=at_loss, temporary=has * rank.logits(), gradients=none),
            Moment(name=f"backward of the {name}", at=At.LAST, gathered=at_backward, temporary=has * a.peaks[i][1], gradients=none),
            Moment(
                name=f"reduction of the {name}'s gradients",
                at=At.LAST,
                freed=freed,
                gathered=at_reduction,
                temporary=a.boundary + untied * (self.full[i] * self.sizes.gradient.produced),
                buffers=self.reduced[i] + self.later_microbatch * self.held[i],
                gradients=self.gradients(self.held[i]),
            ),
        ]

    def _several(self, i: int) -> Any:
        """Return 1 if the rank runs a region more than once."""
        return np.minimum(np.maximum(self.runs[i] - 1.0, 0.0), 1.0)

    def _forward_of_region(self, i: int, freed: Column) -> list[Moment]:
        """Return the moments of a region's forward pass.

        Weights are copied out of the all-gather buffer, which stays until the next unit's weights are copied, or until the end of forward.
        """
        region, at, g = self.rank.regions[i], self.rank.at(i), self.gathered[i]
        name = f"the last {region.name}" if region.is_block else f"the {region.name}"
        some, several = np.minimum(self.runs[i], 1.0), self._several(i)
        on_its_way = self._gathered_unit(neighbour(self.rank.regions, i, -1))
        gathered = some * g + self.is_tied * self._of_last(self.gathered) if self.frees else self._up_to(i)
        none = self.gradients(0.0)
        return [
            Moment(
                name=f"gathering of {name}",
                at=at,
                freed=freed - some * self.a.kept[i],
                gathered=gathered + (some * g + several * on_its_way) + (some - several) * self._gathered_unit(i - 1),
                gradients=none,
            ),
            Moment(
                name=f"forward of {name}",
                at=at,
                freed=freed,
                gathered=gathered + some * g,
                temporary=some * self.a.forward[i],
                gradients=none,
            ),
        ]

    def _gathered_backward(self, i: int) -> tuple[Any, Any, Any, Any]:
        """Return the gathered weights during the backward of the last block of a region, of the one before it and of the first.

        The fourth value is the weights that are in their all-gather buffer by then.

                    current unit   prefetched          throughout
            last    g              the one before it   the shared unit
            first   g              the region before   the shared unit
        """
        g, runs, below, several = self.gathered[i], self.runs[i], self.below[i], self._several(i)
        if not self.frees:
            return runs * g + below, (runs - several) * g + below, g + below, 0.0
        follows, before = neighbour(self.rank.regions, i, -1), self._of(self.gathered, i - 1)
        on_its_way = self._gathered_unit(follows)
        last, first = (g + on_its_way) + self.lasting, g + before + self.lasting
        if follows != i:
            return last, last, first, 0.0
        # of two blocks the one before the last is the first: after its own weights, those of the previous region are prefetched
        is_first = several - np.minimum(np.maximum(runs - 2.0, 0.0), 1.0)
        in_buffer = is_first * (on_its_way - before)
        return last, last - in_buffer, first, in_buffer

    def _of_region(self, i: int, freed: Column, reduced: Column) -> list[Moment]:
        """Return the moments of forward and backward of a region between the ends: of the last block, the one before it and the first.

        freed, reduced   of the regions after it: their saved activations, and their gradients
        """
        a, rank, runs, region = self.a, self.rank, self.runs[i], self.rank.regions[i]
        name, at, peak = region.name, rank.at(i), a.peaks[i][1]
        gone, so_far, kept, held = freed, reduced, a.kept[i], self.held[i]
        if region.turn:
            gone, so_far = freed + rank.of_turn(i, a.kept), reduced - rank.of_turn(i, self.held)
            kept, held = rank.of_round(i, a.kept), rank.of_round(i, self.held)
        at_last, at_previous, at_first, in_buffer = self._gathered_backward(i)
        after = self.reduced[i + 1] if i < self.last else 0.0
        if region.is_block and sum(other.is_block for other in rank.regions) > 1:
            peak = np.minimum(runs, 1.0) * peak
        backward = Moment(
            name=f"backward of the last {name}" if region.is_block else f"backward of the {name}",
            at=at,
            freed=gone,
            gathered=at_last if region.is_block else at_first,
            temporary=peak if region.is_block else runs * peak,
            buffers=after,
            gradients=self.gradients(so_far),
        )
        moments = [*self._forward_of_region(i, gone), backward]
        if not region.is_block:
            return moments
        several, leaves = self._several(i), neighbour(rank.regions, i, 1)
        leaving = (self.reduced[leaves] if leaves <= self.last else 0.0) * several
        return [
            *moments,
            Moment(
                name=f"backward of the {name} before the last",
                at=at,
                freed=gone - several * kept,
                gathered=at_previous,
                temporary=np.maximum(peak, in_buffer),
                buffers=leaving,
                gradients=self.gradients(so_far + held),
            ),
            Moment(
                name=f"backward of the first {name}",
                at=at,
                freed=freed - (runs - 1.0) * a.kept[i],
                gathered=at_first,
                temporary=peak,
                buffers=leaving,
                gradients=self.gradients(reduced + (runs - 1.0) * self.held[i]),
            ),
        ]

    def _gathered_unit(self, region: int) -> Any:
        """Return the gathered weights of a region's unit."""
        return self.gathered[region] if region >= 0 else 0.0

    def _of_first_region(self, freed: Column, reduced: Column) -> list[Moment]:
        """Return the moments of its backward pass, of the sum over tp that some of its gradients need, and of the last reduction."""
        a, has, name, sizes = self.a, self.runs[0], self.rank.regions[0].name, self.sizes
        sums: list[Moment] = []
        if self.t.summed:
            # one after another into a copy, with all gradients of the unit alive, before its weights are freed
            summed = Moment(
                name=f"sum of the {name}'s gradients",
                at=At.FIRST,
                freed=freed - has * a.kept[0],
                gathered=self.gathered[0],
                temporary=(self.full[0] + has * self.t.summed[0]) * sizes.gradient.produced,
                buffers=self.reduced[1],
                gradients=self.gradients(reduced),
            )
            sums.append(summed)
        return [
            *sums,
            Moment(
                name=f"backward of the {name}",
                at=At.FIRST,
                freed=freed,
                gathered=self._of(self.gathered, 0) + self.lasting,
                temporary=has * a.peaks[0][1] + self.twice * sizes.gradient.produced,
                buffers=self.reduced[1],
                gradients=self.gradients(reduced),
            ),
            Moment(
                name=f"reduction of the {name}'s gradients",
                at=At.FIRST,
                freed=freed - has * a.kept[0],
                temporary=self.full[0] * sizes.gradient.produced,
                buffers=self.reduced[0] + self.later_microbatch * self.held[0],
                gradients=self.gradients(self.total),
            ),
        ]
