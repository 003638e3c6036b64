"""Time of one training step's pipeline: passes of a micro-batch in each region, overlap of exchanges, host, sends and stages.

Every function takes arrays of any shapes that broadcast. A single plan is an array of one; a search evaluates blocks with one
dimension for each independent choice. The same code serves both, so the results agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import CollectiveKind, collective_time, send_time
from perfmodel.cost.evaluate import MicrobatchCost, kept_bytes
from perfmodel.cost.machine import Machine
from perfmodel.cost.pipeline import Pipeline, StageTimes
from perfmodel.cost.program import FORWARD, PHASES, Program
from perfmodel.cost.schedules import schedule_of
from perfmodel.cost.stages import (
    Ranks,
    Stages,
    mean_block,
    plus,
    region_sum,
    slowest_stage,
    stage_sums,
    sum_of,
)
from perfmodel.foundation.columns import Column
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.algebra.sharding import COMM, EXCHANGED, TENSOR_AXES
from perfmodel.parallel.choices import RINGS, Recompute
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.schedule_table import AnySchedule

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTimes:
    """Time of one micro-batch by region, a block counted once: forward, and backward with recomputation. [s]

    free_forward, free_backward   the same, less the time in which the region's own collectives occupy inter-node links. Parameter
                                  collectives need these links and overlap only with the rest. Empty if no collective occupies them.
    ends   extra time of both passes without a concurrent micro-batch; empty if the schedule pairs none
    weights   part of backward that computes gradients of weights; empty if no schedule postpones them
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    free_forward: tuple[Any, ...] = ()
    free_backward: tuple[Any, ...] = ()
    ends: tuple[Any, ...] = ()
    weights: tuple[Any, ...] = ()

    @property
    def window_forward(self) -> tuple[Any, ...]:
        """Window of each forward pass in which parameter collectives overlap with compute."""
        return self.free_forward or self.forward

    @property
    def window_backward(self) -> tuple[Any, ...]:
        return self.free_backward or self.backward

    def map_columns(self, function: Callable[[Any], Any]) -> RegionTimes:
        """Return a copy with `function` applied to each column."""
        return RegionTimes(**{column.name: tuple(map(function, getattr(self, column.name))) for column in fields(RegionTimes)})


def exposed_communication(micro: MicrobatchCost, profile: ExecutionProfile) -> Array:
    """Return [segments * COMM, rows] seconds of communication that do not overlap with compute.

    Ring attention sends keys and values during the products of the previous block: max(s - a, 0) stays exposed.
    """
    sent, classes = micro.communication, len(COMM)
    if profile.communication.context_form in RINGS:
        attention = by_phase(micro.attention)
        core, rest, tail, backward = attention
        forward = (core + rest) + tail
        hidden = np.stack([forward, forward, forward, backward], axis=1).reshape(micro.attention.shape)
        sent = sent + np.zeros_like(hidden[0])  # with a column for each machine, as attention
        ring = slice(COMM.index("context_parallel"), None, classes)
        sent[ring] = np.maximum(sent[ring] - hidden, 0.0)
    timing = profile.timing
    in_backward = 1.0 - max(timing.tp_overlap_fraction, timing.tp_backward_overlap_fraction)
    shares = dict.fromkeys(COMM, 1.0) | {
        "tensor_parallel": 1.0 - timing.tp_overlap_fraction,
        "regather": in_backward,
        "input_gradient": in_backward,
        EXCHANGED: 0.0 if profile.exchanges.hides_exchanges else 1.0,
    }
    return sent * np.tile(list(shares.values()), len(sent) // classes)[:, None]


def by_phase(segments: Array) -> Array:
    """Return rows of segments as [phases, regions, rows]."""
    return segments.reshape(-1, len(PHASES), segments.shape[-1]).swapaxes(0, 1)


def with_communication(work: Array, communication: Array) -> tuple[Array, Array]:
    """Return the sum of work and communication as [phases, regions, rows], and the communication of `regather`, which is separate."""
    by_class = communication.reshape(-1, len(COMM), communication.shape[-1])
    total = work
    for i, name in enumerate(COMM):
        if name != "regather":
            total = total + by_class[:, i]
    return by_phase(total), by_class[PHASES.index("backward") :: len(PHASES), COMM.index("regather")]


def phase_times(micro: MicrobatchCost, profile: ExecutionProfile) -> tuple[Array, Array]:
    """Return compute and exposed communication of each phase, [phases, regions, rows]; `regather` is separate. [s]"""
    return with_communication((micro.matmul + micro.attention) + micro.streaming, exposed_communication(micro, profile))


def recomputed_phases(recompute: Recompute, profile: ExecutionProfile) -> tuple[str, ...]:
    match recompute:
        case Recompute.NONE:
            return ()
        case Recompute.SELECTIVE:
            return ("core",)
        case Recompute.FULL:
            return ("core", "rest") if profile.activations.recompute_stops_early else ("core", "rest", "tail")


def passes_of(phases: Array, regather: Column, program: Program, profile: ExecutionProfile, recompute: Recompute) -> Array:
    """Return forward and backward sums of a quantity given by phase, [passes, regions, rows], recomputation in backward.

    regather   repeated all-gathers
    """
    core, rest, tail, backward = phases
    is_block = program.is_block
    # full recomputation repeats these all-gathers anyway
    backward = backward + (np.where(is_block, 0.0, regather) if recompute is Recompute.FULL else regather)
    for name in recomputed_phases(recompute, profile):
        backward = backward + np.where(is_block, phases[PHASES.index(name)], 0.0)
    return np.stack([(core + rest) + tail, backward])


def region_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Array) -> RegionTimes:
    """Return forward and backward times of each region. Host launches and host-memory transfers are lower bounds."""
    program = micro.program
    times = passes_of(*phase_times(micro, profile), program, profile, recompute)
    alone: Array | None = None
    if profile.exchanges.hides_exchanges:
        alone = _alone_with_exchanges(micro, profile, recompute, times)
        times = np.where(program.is_block, _between_exchanges(micro, profile, recompute, times), times)
    elif micro.concurrent is not None:
        times = times - np.where(program.is_block, overlapped_exchange_times(micro, profile, recompute), 0.0)
    if max(profile.timing.host_launch_time, profile.timing.host_layer_time_per_tp_across_nodes) > 0:
        host, waits = host_times(micro, profile, recompute, tp), wait_times(micro, profile, recompute) if micro.waits is not None else 0.0
        times = _with_host_time(micro, times, host, waits)
        alone = None if alone is None else _with_host_time(micro, alone, host, waits)
    if profile.offloads_saved(recompute):
        carried = np.where(program.is_block, kept_bytes(micro, recompute), 0.0)
        times = np.maximum(times, carried / micro.host_bandwidth)
    forward, backward = times
    ends = () if alone is None else tuple(np.maximum((alone[0] + alone[1]) - (forward + backward), 0.0))
    weights: tuple[Any, ...] = ()
    if micro.program.splits_backward and micro.weight_gradients is not None:
        weights = tuple(micro.weight_gradients[::2] + micro.weight_gradients[1::2])
    region_times = RegionTimes(forward=tuple(forward), backward=tuple(backward), ends=ends, weights=weights)
    if micro.between_nodes is None:
        return region_times
    # the time in which collectives occupy inter-node links
    held = with_communication(np.zeros_like(micro.matmul), micro.between_nodes)
    free_forward, free_backward = np.maximum(times - passes_of(*held, program, profile, recompute), 0.0)
    return replace(region_times, free_forward=tuple(free_forward), free_backward=tuple(free_backward))


TRANSFER_UNITS = 20.0 / 132.0
"""Share of a chip's compute units that a transfer occupies while another micro-batch computes on the others: 20 of 132 on H800
(DeepSeek-V3, arXiv 2412.19437, section 3.2.2; DeepEP's normal kernels).
"""


def exchanged_passes(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute) -> Array:
    """Return the exchange time of each region in a forward and a backward pass. [s]"""
    exchanged = by_phase(micro.communication[COMM.index(EXCHANGED) :: len(COMM)])
    return passes_of(exchanged, 0.0, micro.program, profile, recompute)


def _between_exchanges(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, times: Array) -> Array:
    """Return pass times of blocks whose forward pass runs with another micro-batch's backward pass. [s]

        max(f + u s_b, s_b) and max(b + u s_f, s_f)
        with delayed weight gradients: max(f + b + u s, s), divided in the ratio of these two

        s  exchange time of both passes, s_f + s_b    u  share of the compute units that a transfer occupies

    The exchange of backward overlaps with the forward pass and vice versa. Delayed weight gradients overlap with either exchange, because
    the next transfer needs only the gradient of its rows.

    Source: Megatron-Core, `models/common/model_chunk_schedule_plan.py` (`TransformerLayerSchedulePlan.run`: combine backward with
    attention forward, dispatch forward then backward with the experts' backward, weight gradients and forward, combine forward with
    attention backward); DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, separate backward for inputs and for weights.
    """
    sent = exchanged_passes(micro, profile, recompute)
    paired = np.maximum(times + TRANSFER_UNITS * sent[::-1], sent[::-1])
    if not profile.exchanges.delays_weight_gradients:
        return paired
    both = sent[0] + sent[1]
    factor = np.maximum((times[0] + times[1]) + TRANSFER_UNITS * both, both) / np.maximum(paired[0] + paired[1], _LEAST)
    return paired * np.minimum(factor, 1.0)  # without exposed exchanges the factor is 1 up to rounding


def _alone_with_exchanges(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, times: Array) -> Array:
    """Return pass times of regions without a concurrent micro-batch: of blocks f + s_f and b + s_b - h. [s]

        h = (1 - u) sum over both exchanges of min(w, s_b / 2)    w  time of the weight gradients

    Delayed weight gradients of experts overlap with the backward of dispatch. The others overlap with the backward of the previous
    layer's combine. h is 0 if none is delayed.

    Source: as `_between_exchanges`, where one of the layers is None.
    """
    is_block = micro.program.is_block
    alone = times + np.where(is_block, exchanged_passes(micro, profile, recompute), 0.0)
    if micro.weight_gradients is None:
        return alone
    half = by_phase(micro.communication[COMM.index(EXCHANGED) :: len(COMM)])[PHASES.index("backward")] / 2.0
    before, after = micro.weight_gradients[::2], micro.weight_gradients[1::2]
    hidden = (1.0 - TRANSFER_UNITS) * (np.minimum(before, half) + np.minimum(after, half))
    return np.stack([alone[0], alone[1] - np.where(is_block, hidden, 0.0)])


def ends_time(regions: RegionTimes, stages: Stages) -> Any:
    """Return the extra time of the first forward and the last backward passes: the schedule counts them as overlapped, they are not. [s]

    1f1b: F + B of these two, (m - 1) pairs between. Interleaved, on the last rank: w = (v - 1) p + 1 chunks forward alone, m v - w pairs, w
    chunks backward alone, and p - 1 chunks each way before its first and after its last: (p - 1 + w) / v = p full passes as well.

    Source: Megatron-Core overlaps only in the 1f1b phase (`overlap_moe_expert_parallel_comm`); sums as in `cost/schedules.py`.
    """
    return region_sum(regions.ends, stages.total_sum)


def overlapped_exchange_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute) -> Array:
    """Return the overlap of exchanges with independent work of the same micro-batch, less the slow-down of that work. [s]"""
    assert micro.concurrent is not None
    work = passes_of(by_phase(micro.concurrent), 0.0, micro.program, profile, recompute)
    return (1.0 - TRANSFER_UNITS) * np.minimum(work, exchanged_passes(micro, profile, recompute))


def exposed_exchange_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute) -> Array:
    """Return the time that exchanges add to the passes of each block, with the overlap of another micro-batch. [s]"""
    times = passes_of(*phase_times(micro, profile), micro.program, profile, recompute)
    paired = _between_exchanges(micro, profile, recompute, times)
    return (paired[0] + paired[1]) - (times[0] + times[1])


def _with_host_time(micro: MicrobatchCost, device: Array, host: Array, waits: Column) -> Array:
    """Return the pass times of each region with the host's launch time, and with the chip's waits for the host.

    Blocks of all kinds share one factor, as the host runs ahead from one to the next: how a graph divides them does not matter.
    """
    if micro.host_is_chip:
        return device + host
    regions, inner = micro.program.regions, micro.program.inner
    factors = host_factor(device, host)
    if len(inner) > 1:
        together = (sum_of([regions[i].count * times[:, i] for i in inner]) for times in (device, host))
        factors[:, inner.start : inner.stop] = host_factor(*together)[:, None]
    return np.asarray(device * factors + waits)


FORWARD_SHARE = 1.0 / 3.0
"""Share of a layer's inter-node host time in its forward pass: backward computes two gradients for each product."""


def host_factor(device: Array, host: Column) -> Any:
    """Return the factor by which host launches lengthen a pass of a micro-batch: (d^8 + h^8)^(1/8) / d. [-]

    This is a smooth maximum of device time d and host time h. Each pass has its own factor: a faster backward pass never shortens the
    forward pass, nor its window for overlapped communication, and vice versa.
    """
    ratio = host / np.maximum(device, _LEAST)
    square = ratio * ratio
    fourth = square * square
    return np.sqrt(np.sqrt(np.sqrt(1.0 + fourth * fourth)))


_LEAST = 1e-15
"""Smallest divisor, for regions without work. [s]"""


def host_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Column) -> Array:
    """Return the host time to launch each region's forward pass, and its backward pass with recomputation. [s]"""
    program, (launches, regather) = micro.program, with_communication(micro.launches, micro.collectives)
    launches = np.stack([*(FORWARD * launches[:-1]), launches[PHASES.index("backward")]])
    times = profile.timing.host_launch_time * passes_of(launches, regather, program, profile, recompute)
    if profile.timing.host_layer_time_per_tp_across_nodes > 0:
        layers = np.array([[region.host_layers if region.is_block else 0] for region in program.regions])
        across = layers * profile.timing.host_layer_time_per_tp_across_nodes * micro.crosses_nodes * tp
        recomputed = FORWARD_SHARE if recompute is Recompute.FULL else 0.0
        times = times + np.stack([FORWARD_SHARE * across, (1.0 - FORWARD_SHARE + recomputed) * across])
    return np.asarray(times)


def wait_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute) -> Array:
    """Return the time that the chip waits for the host in the passes of each region. [s]

    If the sizes of an exchange are counted on chips, the host reads them before it launches the exchange. Until then the chip has no
    queued work. Each wait costs one launch of a forward pass, again if the pass is recomputed. The copy itself is not counted.

    Source: Megatron-Core, `moe/token_dispatcher.py` (`MoEAlltoAllTokenDispatcher`: counts to the host before the all-to-all); torchtitan's
    `generate_permute_indices` and DeepEP's normal mode likewise.
    """
    assert micro.waits is not None
    counts = passes_of(by_phase(micro.waits[COMM.index(EXCHANGED) :: len(COMM)]), 0.0, micro.program, profile, recompute)
    return np.asarray(FORWARD * profile.timing.host_launch_time * counts)


def run_ahead_fraction(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Column) -> Any:
    """Return the fill of the launch queue: d / (d + h) of a block's device and host time; 0 without blocks. [-]

    It matters for collectives that the chip has not executed yet.
    """
    program, is_block = micro.program, micro.program.is_block
    if not program.inner:
        return 0.0 * tp
    core, rest, tail, backward = phase_times(micro, profile)[0]
    forward_host, backward_host = host_times(micro, profile, recompute, tp)
    counts = tuple(region.count for region in program.regions)
    device = mean_block(tuple(np.where(is_block, ((core + rest) + tail) + backward, 0.0)), program, counts)
    return device / (device + mean_block(tuple(np.where(is_block, forward_host + backward_host, 0.0)), program, counts))


def pace(values: Ranks, total: Column, num_ranks: Column, weight: float) -> Any:
    """Return the steady-state time per micro-batch: the slowest stage, or a mean weighted towards it (profile.uneven_stage_weight)."""
    slowest = slowest_stage(values)
    if weight == 1.0:
        return slowest
    mean = total / num_ranks
    return mean + weight * (slowest - mean)


def beat_of(regions: RegionTimes, stages: Stages, *, schedule: AnySchedule, num_ranks: Column, profile: ExecutionProfile) -> Any:
    """Return the time that each further micro-batch adds to a full pipeline. [s]"""
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    totals = region_sum(regions.forward, stages.total_sum), region_sum(regions.backward, stages.total_sum)
    return beat_with(f, b, totals, schedule, num_ranks, profile.timing.uneven_stage_weight)


def beat_with(f: Ranks, b: Ranks, totals: tuple[Any, Any], schedule: AnySchedule, num_ranks: Column, weight: float) -> Any:
    if schedule_of(schedule).paces_apart:
        return pace(f, totals[0], num_ranks, weight) + pace(b, totals[1], num_ranks, weight)
    return pace(plus(f, b), totals[0] + totals[1], num_ranks, weight)


def hop_time(
    boundary: Column, tp: Column, profile: ExecutionProfile, machine: Machine, grid: LayoutGrid, *, seq_len: Column, is_scattered: bool
) -> Any:
    """Return the time to send a micro-batch's boundary tensor to the next pipeline rank, averaged over the pairs of ranks. [s]

    The host spends `pipeline_send` on the schedule's bookkeeping of one pass of one micro-batch through one stage.
    If tp ranks hold equal copies, the profile may send the tensor in tp parts and gather it (Megatron's scatter-gather). If it sends
    activations and gradients differently, the time is their mean.
    """
    ranks, options = grid.degree["pp"], profile.stages
    runtime = np.minimum(ranks - 1.0, 1.0) * machine.host.times.get("pipeline_send", 0.0)
    is_split = options.scatters_pipeline_sends and not is_scattered
    part = boundary / tp if is_split else boundary
    forward = backward = send_time(part, ranks, grid.hop, machine)
    if options.sends_attention_mask:
        forward = send_time(part + MASK_BYTES * seq_len**2, ranks, grid.hop, machine)
    if not is_split:
        return (forward + backward) / 2.0 + runtime
    members = np.where(ranks > 1, tp, 1.0)
    group_inside = [np.minimum(tier, members) for tier in grid.group_inside(TENSOR_AXES)]
    gather = collective_time(CollectiveKind.ALL_GATHER, boundary, group_size=members, inside=group_inside, machine=machine)
    backward = send_time(boundary, ranks, grid.hop, machine) if options.sends_whole_gradients else backward + gather
    return (forward + gather + backward) / 2.0 + runtime


MASK_BYTES = 2.0
"""[byte] An element of an attention mask between pipeline stages: NCCL sends no booleans, so it is cast to 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTime:
    """Time of all micro-batches through the pipeline, with its exposed sends, and the time of a further micro-batch. [s]"""

    time: Any
    sends: Any
    beat: Any


def pipeline_step_time(regions: RegionTimes, stages: Stages, pipeline: Pipeline, *, hop: Column, profile: ExecutionProfile) -> PipelineTime:
    """Return the time of the passes of all micro-batches through the pipeline."""
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    total_f, total_b = region_sum(regions.forward, stages.total_sum), region_sum(regions.backward, stages.total_sum)
    num_ranks, weight = pipeline.num_ranks, profile.timing.uneven_stage_weight
    times = StageTimes(
        total_forward=total_f,
        total_backward=total_b,
        slowest_forward=pace(f, total_f, num_ranks, weight),
        slowest_backward=pace(b, total_b, num_ranks, weight),
        slowest=pace(plus(f, b), total_f + total_b, num_ranks, weight),
        unequal=stages.unequal * (mean_block(regions.forward, stages, stages.total) + mean_block(regions.backward, stages, stages.total)),
    )
    if pipeline.schedule.splits_backward:
        total_w = region_sum(regions.weights, stages.total_sum)
        slowest_w = pace(stage_sums(regions.weights, stages), total_w, num_ranks, weight)
        times = replace(times, total_weights=total_w, slowest_weights=slowest_w)
    if pipeline.schedule.is_simulated:
        weights = regions.weights if pipeline.schedule.splits_backward else (0.0,) * len(regions.backward)
        by_kind = (map(partial(region_sum, of), stages.stage_terms) for of in (regions.forward, regions.backward, weights))
        times = replace(times, by_stage=tuple(zip(*by_kind, strict=True)))
    schedule = schedule_of(pipeline.schedule)
    beat = times.slowest_forward + times.slowest_backward if schedule.paces_apart else times.slowest
    sends = exposed_sends(hop, beat / pipeline.virtual_stages, pipeline, profile)
    return PipelineTime(time=schedule.time(times, pipeline) + sends, sends=sends, beat=beat)


def exposed_sends(hop: Column, chunk: Column, pipeline: Pipeline, profile: ExecutionProfile) -> Any:
    """Return the time that sends add to the pipeline: the exposed part if they overlap with compute, else every send, fill and drain. [s]

    chunk  time of a further micro-batch on one virtual stage   [s]
    """
    if profile.stages.pp_overlap:
        return schedule_of(pipeline.schedule).send_delay(hop, chunk, pipeline)
    later = pipeline.num_microbatches * pipeline.virtual_stages - 1.0
    return 2.0 * (pipeline.num_ranks - 1.0) * hop + later * (2.0 * hop)
