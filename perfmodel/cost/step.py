"""Time of one training step, assembled from micro-batches, parameters and the pipeline.

Every function takes arrays of any shapes that broadcast. A single plan is an array of one; a search evaluates blocks with one
dimension for each independent choice. The same code serves both, so the results agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import CollectiveKind, collective_time, lone_rate, send_time
from perfmodel.cost.compute import streaming_time
from perfmodel.cost.launches import FORWARD
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.cost.memory.offload import carried_bytes, hosted_bytes
from perfmodel.cost.microbatch import MicrobatchCost
from perfmodel.cost.parameters import CastTimes, FrozenBytes, ParameterCost, ParameterProgram
from perfmodel.cost.pipeline import pipeline_time, send_delay
from perfmodel.cost.program import PHASES, Program
from perfmodel.cost.stages import Ranks, Stages, inner_regions, mean_block, plus, slowest_stage, stage_sums, sum_of, total_pass
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import itemsize
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import KernelClass
from perfmodel.parallel.algebra.sharding import TENSOR_AXES
from perfmodel.parallel.algebra.traffic_classes import COMM, EXCHANGED
from perfmodel.parallel.context_forms import RINGS
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.parallel.layout import PipelineSchedule, Recompute
from perfmodel.workload.graph import Region
from perfmodel.workload.job import Optimizer, PrecisionPolicy
from perfmodel.workload.projection import NO_PROJECTION, Projection

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of an element of each copy, for one precision policy, optimizer and profile. [byte]

    stored, gathered   weights as stored between steps, and as operators read them
    gradient, reduced  gradients as accumulated, and as sent in a reduction
    tied               gradients of a tied matrix as sent between the first and the last stage
    produced           gradients as backward outputs them; whole_gradient, sharded_gradient: as held until the optimizer step
    gradient_copy      full gradients held in addition to the accumulator
    state, step        optimizer state and master copy; memory traffic of one optimizer step
    accumulate         memory traffic to add one micro-batch's gradient to the accumulator
    optimizer_kernel   kernel class of the step; ADD without optimizer state, as the step then passes over weights and gradients only
    optimizer_copy     temporary copy of an optimizer step that has several kernels
    passed, scaled     traffic per step of passes over a full gradient; `scaled`: only over gradients that data axes reduce
    frees_gradients    a gradient is freed as soon as its parameter is updated
    hosts_weights      weights, frozen ones included, are stored in host memory
    hosted, carried    optimizer step on the host: its host-memory traffic, and bytes between host and chip
    """

    stored: float
    gathered: float
    gradient: float
    reduced: float
    tied: float
    state: float
    step: float
    optimizer_kernel: KernelClass
    accumulate: float
    keeps_compute_copy: bool
    gradient_copy: float
    produced: float
    whole_gradient: float
    sharded_gradient: float
    passed: float
    scaled: float
    optimizer_copy: float = 0.0
    frees_gradients: bool = False
    hosts_weights: bool = False
    hosted: float = 0.0
    carried: float = 0.0
    projection: Projection = NO_PROJECTION


def element_bytes(
    policy: PrecisionPolicy, optimizer: Optimizer, profile: ExecutionProfile, projection: Projection = NO_PROJECTION
) -> Bytes:
    """Return the bytes of an element of each copy."""
    compute = itemsize(policy.compute)
    fp32 = 4.0
    gradient = fp32 if profile.state.accumulate_dtype == "fp32" or policy.master is policy.parameter else itemsize(policy.gradient)
    if policy.master is policy.parameter:
        gradient = max(itemsize(policy.gradient), fp32 if profile.state.accumulate_dtype == "fp32" else 0.0)
    reduced = fp32 if profile.communication.reduce_dtype == "fp32" else itemsize(policy.gradient)
    master = itemsize(policy.master)
    stores_master = profile.state.stores_master_weights and policy.has_master_copy
    accumulates_apart = gradient > itemsize(policy.gradient)
    plain = optimizer.state_bytes(itemsize(policy.optimizer_state))
    held = plain * projection.state
    # paged optimizer states are not allocator memory; they are evicted from a full chip
    fewer = plain - (0.0 if optimizer.is_paged else held) - projection.matrix * itemsize(policy.gradient)
    # the update is written at full size and read again; each projection matrix is read for both products
    passes = 2 * (held - plain) + (2 * itemsize(policy.gradient) * (1 + projection.matrix) if projection.flops else 0.0)
    sizes = Bytes(
        stored=master if stores_master else itemsize(policy.parameter),
        gathered=itemsize(policy.parameter),
        gradient=gradient,
        reduced=reduced,
        tied=reduced if profile.state.stores_master_weights else min(gradient, reduced),
        state=policy.state_bytes_per_parameter(optimizer) - fewer - (master if stores_master else 0.0),
        step=(policy.step_bytes_per_parameter(optimizer) + passes) * profile.timing.optimizer_bytes_factor,
        optimizer_kernel=KernelClass.OPTIMIZER if optimizer.num_states else KernelClass.ADD,
        accumulate=(2 * gradient - compute if profile.kernels.fuses_gradient_accumulation else 2 * gradient + compute)
        if accumulates_apart
        else 3 * gradient,
        keeps_compute_copy=stores_master,
        gradient_copy=profile.state.gradient_copy_bytes,
        produced=itemsize(policy.gradient),
        # if the master copy is the stored weight, gradients arrive in its dtype and are held in the reduction dtype
        whole_gradient=reduced if stores_master else gradient,
        sharded_gradient=master if stores_master else gradient,
        passed=profile.state.gradient_pass_bytes,
        scaled=profile.state.gradient_scaling_bytes,
        frees_gradients=profile.state.steps_in_backward,
        projection=projection,
        optimizer_copy=itemsize(policy.optimizer_state) if profile.state.optimizer_copies and optimizer.num_states else 0.0,
    )
    is_hosted = profile.state.offloads_optimizer or profile.state.offloads_parameters
    return _on_host(sizes, profile, policy.step_bytes_per_parameter(optimizer)) if is_hosted else sizes


_NOTHING: Mapping[str, Any] = dict.fromkeys(
    ("state", "gradient", "whole_gradient", "sharded_gradient", "step", "accumulate", "passed", "scaled"), 0.0
)


def _on_host(sizes: Bytes, profile: ExecutionProfile, step: float) -> Bytes:
    """Return the sizes without what is offloaded to host memory. step: traffic of the optimizer step, which then runs on the host."""
    hosted = sizes
    if profile.state.offloads_optimizer:
        hosted = replace(
            hosted,
            **_NOTHING,
            stored=min(sizes.stored, sizes.gathered),
            keeps_compute_copy=False,
            hosted=step,
            carried=hosted_bytes(sizes.produced, sizes.gathered),
        )
    return replace(hosted, stored=0.0, keeps_compute_copy=False, hosts_weights=True) if profile.state.offloads_parameters else hosted


# --- time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTimes:
    """Time of one micro-batch by region, a block counted once: forward, and backward with recomputation. [s]

    free_forward, free_backward   the same, less the time in which the region's own collectives occupy inter-node links. Parameter
                                  collectives need these links and overlap only with the rest. Empty if no collective occupies them.
    ends   extra time of both passes without a concurrent micro-batch; empty if the schedule pairs none
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    free_forward: tuple[Any, ...] = ()
    free_backward: tuple[Any, ...] = ()
    ends: tuple[Any, ...] = ()

    @property
    def window_forward(self) -> tuple[Any, ...]:
        """Window of each forward pass in which parameter collectives overlap with compute."""
        return self.free_forward or self.forward

    @property
    def window_backward(self) -> tuple[Any, ...]:
        return self.free_backward or self.backward

    def map_columns(self, function: Callable[[Any], Any]) -> RegionTimes:
        """Return a copy with `function` applied to each column."""
        return RegionTimes(
            forward=tuple(function(x) for x in self.forward),
            backward=tuple(function(x) for x in self.backward),
            free_forward=tuple(function(x) for x in self.free_forward),
            free_backward=tuple(function(x) for x in self.free_backward),
            ends=tuple(function(x) for x in self.ends),
        )


def exposed_fraction(profile: ExecutionProfile, name: str) -> float:
    """Return the share of a communication class that does not overlap with compute. [-]"""
    match name:
        case "tensor_parallel":
            return 1.0 - profile.timing.tp_overlap_fraction
        case name if name == EXCHANGED:
            return 0.0 if profile.communication.hides_exchanges else 1.0
        case "regather" | "input_gradient":
            return 1.0 - max(profile.timing.tp_overlap_fraction, profile.timing.tp_backward_overlap_fraction)
    return 1.0


def communication_time(micro: MicrobatchCost, profile: ExecutionProfile, segment: int, which: int) -> Any:
    """Return the time of the `which`-th communication class of a segment, less the overlap with attention. [s]

    Ring attention sends keys and values during the products of the previous block: max(s - a, 0) stays exposed.
    """
    sent = micro.communication[segment * len(COMM) + which]
    if profile.communication.context_form not in RINGS or COMM[which] != "context_parallel":
        return sent
    region, phase = divmod(segment, len(PHASES))
    first, backward = region * len(PHASES), PHASES.index("backward")
    hidden = micro.attention[segment] if phase == backward else sum(micro.attention[first + i] for i in range(len(PHASES)) if i != backward)
    return np.maximum(sent - hidden, 0.0)


def phase_times(micro: MicrobatchCost, profile: ExecutionProfile, region: int) -> dict[str, Any]:
    """Return compute and exposed communication of each phase of a region; `regather` is separate. [s]"""
    times: dict[str, Any] = {}
    for i, phase in enumerate(PHASES):
        segment = region * len(PHASES) + i
        total = (micro.matmul[segment] + micro.attention[segment]) + micro.streaming[segment]
        for j, name in enumerate(COMM):
            if name != "regather":
                total = total + communication_time(micro, profile, segment, j) * exposed_fraction(profile, name)
        times[phase] = total
    regather = (region * len(PHASES) + PHASES.index("backward")) * len(COMM) + COMM.index("regather")
    times["regather"] = micro.communication[regather] * exposed_fraction(profile, "regather")
    return times


def recomputed_phases(recompute: Recompute, profile: ExecutionProfile) -> tuple[str, ...]:
    match recompute:
        case Recompute.NONE:
            return ()
        case Recompute.SELECTIVE:
            return ("core",)
        case Recompute.FULL:
            return ("core", "rest") if profile.activations.recompute_stops_early else ("core", "rest", "tail")


def passes_of(phase: Mapping[str, Any], graph_region: Region, profile: ExecutionProfile, recompute: Recompute) -> tuple[Any, Any]:
    """Return forward and backward sums of a quantity given by phase, recomputation in backward. `regather`: repeated all-gathers."""
    forward, backward = (phase["core"] + phase["rest"]) + phase["tail"], phase["backward"]
    if not graph_region.is_block or recompute is not Recompute.FULL:  # full recomputation repeats these all-gathers anyway
        backward = backward + phase["regather"]
    if graph_region.is_block:
        for name in recomputed_phases(recompute, profile):
            backward = backward + phase[name]
    return forward, backward


def region_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Array) -> RegionTimes:
    """Return forward and backward times of each region. Host launches and host-memory transfers are lower bounds."""
    forward, backward = [], []
    unpaired: tuple[list[Any], list[Any]] = ([], [])
    for region, graph_region in enumerate(micro.program.regions):
        f, b = passes_of(phase_times(micro, profile, region), graph_region, profile, recompute)
        if profile.communication.hides_exchanges:
            pair = _alone_with_exchanges(micro, profile, recompute, region, f, b) if graph_region.is_block else (f, b)
            for passes, pass_time in zip(unpaired, pair, strict=True):
                passes.append(pass_time)
        if profile.communication.hides_exchanges and graph_region.is_block:
            f, b = _between_exchanges(micro, profile, recompute, region, f, b)
        elif micro.concurrent is not None and graph_region.is_block:
            hidden = overlapped_exchange_time(micro, profile, recompute, region)
            f, b = f - hidden[0], b - hidden[1]
        forward.append(f)
        backward.append(b)
    if profile.has_host_floor:
        host = [host_times(micro, profile, recompute, tp, region) for region in range(len(forward))]
        waits = [wait_times(micro, profile, recompute, region) for region in range(len(forward))]
        of_pass = [([passes[i] for passes in host], [passes[i] for passes in waits]) for i in range(2)]
        forward, backward = (_with_host_time(micro, times, *of_pass[i]) for i, times in enumerate((forward, backward)))
        if profile.communication.hides_exchanges:
            unpaired = (_with_host_time(micro, unpaired[0], *of_pass[0]), _with_host_time(micro, unpaired[1], *of_pass[1]))
    carried = [carried_bytes(micro, profile, recompute, region) for region in range(len(forward))]
    forward, backward = (_at_least_transfers(times, carried, micro.host_bandwidth) for times in (forward, backward))
    ends: tuple[Any, ...] = ()
    if profile.communication.hides_exchanges:
        ends = tuple(np.maximum(sum(t) - (f + b), 0.0) for t, f, b in zip(zip(*unpaired, strict=True), forward, backward, strict=True))
    times = RegionTimes(forward=tuple(forward), backward=tuple(backward), ends=ends)
    return times if micro.between_nodes is None else _free_times(times, micro, micro.between_nodes, profile, recompute)


def _at_least_transfers(times: list[Any], carried: Sequence[Any], bandwidth: float) -> list[Any]:
    """Return pass times with their host-memory transfers as lower bounds; None: the pass transfers nothing."""
    return [time if num_bytes is None else np.maximum(time, num_bytes / bandwidth) for time, num_bytes in zip(times, carried, strict=True)]


TRANSFER_UNITS = 20.0 / 132.0
"""Share of a chip's compute units that a transfer occupies while another micro-batch computes on the others: 20 of 132 on H800
(DeepSeek-V3, arXiv 2412.19437, section 3.2.2; DeepEP's normal kernels).
"""


def exchanged_passes(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """Return the exchange time of a region in a forward and a backward pass. [s]"""
    segments = {phase: (region * len(PHASES) + i) * len(COMM) + COMM.index(EXCHANGED) for i, phase in enumerate(PHASES)}
    sent = {phase: micro.communication[segment] for phase, segment in segments.items()}
    return passes_of(sent | {"regather": 0.0}, micro.program.regions[region], profile, recompute)


def _between_exchanges(
    micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int, f: Column, b: Column
) -> tuple[Any, Any]:
    """Return pass times of a block whose forward pass runs with another micro-batch's backward pass. [s]

        max(f + u s_b, s_b) and max(b + u s_f, s_f)
        with delayed weight gradients: max(f + b + u s, s), divided in the ratio of these two

        s  exchange time of both passes, s_f + s_b    u  share of the compute units that a transfer occupies

    The exchange of backward overlaps with the forward pass and vice versa. Delayed weight gradients overlap with either exchange, because
    the next transfer needs only the gradient of its rows.

    Source: Megatron-Core, `models/common/model_chunk_schedule_plan.py` (`TransformerLayerSchedulePlan.run`: combine backward with
    attention forward, dispatch forward then backward with the experts' backward, weight gradients and forward, combine forward with
    attention backward); DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, separate backward for inputs and for weights.
    """
    sent_f, sent_b = exchanged_passes(micro, profile, recompute, region)
    forward, backward = np.maximum(f + TRANSFER_UNITS * sent_b, sent_b), np.maximum(b + TRANSFER_UNITS * sent_f, sent_f)
    if not profile.communication.delays_weight_gradients:
        return forward, backward
    sent = sent_f + sent_b
    factor = np.maximum((f + b) + TRANSFER_UNITS * sent, sent) / np.maximum(forward + backward, _LEAST)
    factor = np.minimum(factor, 1.0)  # without exposed exchanges the factor is 1 up to rounding
    return forward * factor, backward * factor


def _alone_with_exchanges(
    micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int, f: Column, b: Column
) -> tuple[Any, Any]:
    """Return pass times of a block without a concurrent micro-batch: f + s_f and b + s_b - h. [s]

        h = (1 - u) sum over both exchanges of min(w, s_b / 2)    w  time of the weight gradients

    Delayed weight gradients of experts overlap with the backward of dispatch. The others overlap with the backward of the previous
    layer's combine. h is 0 if none is delayed.

    Source: as `_between_exchanges`, where one of the layers is None.
    """
    sent_f, sent_b = exchanged_passes(micro, profile, recompute, region)
    if micro.weight_gradients is None:
        return f + sent_f, b + sent_b
    half = micro.communication[(region * len(PHASES) + PHASES.index("backward")) * len(COMM) + COMM.index(EXCHANGED)] / 2.0
    before, after = micro.weight_gradients[2 * region], micro.weight_gradients[2 * region + 1]
    hidden = (1.0 - TRANSFER_UNITS) * (np.minimum(before, half) + np.minimum(after, half))
    return f + sent_f, b + sent_b - hidden


def ends_time(regions: RegionTimes, stages: Stages) -> Any:
    """Return the extra time of the first forward and the last backward passes: the schedule counts them as overlapped, they are not. [s]

    1f1b: F + B of these two, (m - 1) pairs between. Interleaved, on the last rank: w = (v - 1) p + 1 chunks forward alone, m v - w pairs, w
    chunks backward alone, and p - 1 chunks each way before its first and after its last: (p - 1 + w) / v = p full passes as well.

    Source: Megatron-Core overlaps only in the 1f1b phase (`overlap_moe_expert_parallel_comm`); the sum is `pipeline_time`'s.
    """
    return total_pass(regions.ends, stages) if regions.ends else 0.0


def overlapped_exchange_time(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """Return the overlap of exchanges with independent work of the same micro-batch, less the slow-down of that work. [s]"""
    assert micro.concurrent is not None
    work = {phase: micro.concurrent[region * len(PHASES) + i] for i, phase in enumerate(PHASES)}
    passes = passes_of(work | {"regather": 0.0}, micro.program.regions[region], profile, recompute)
    sent = exchanged_passes(micro, profile, recompute, region)
    forward, backward = ((1.0 - TRANSFER_UNITS) * np.minimum(w, s) for w, s in zip(passes, sent, strict=True))
    return forward, backward


def exposed_exchange_time(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> Any:
    """Return the time that exchanges add to the passes of a block, with the overlap of another micro-batch. [s]"""
    f, b = passes_of(phase_times(micro, profile, region), micro.program.regions[region], profile, recompute)
    return sum(_between_exchanges(micro, profile, recompute, region, f, b)) - (f + b)


def _free_times(times: RegionTimes, micro: MicrobatchCost, held: Array, profile: ExecutionProfile, recompute: Recompute) -> RegionTimes:
    """Return the times with `free_forward` and `free_backward`. held: time in which collectives occupy inter-node links. [s]"""
    forward, backward = [], []
    for region, graph_region in enumerate(micro.program.regions):

        def on_links(phase: str, name: str, region: int = region) -> Any:
            return held[(region * len(PHASES) + PHASES.index(phase)) * len(COMM) + COMM.index(name)]

        by_phase = {phase: sum(on_links(phase, name) for name in COMM if name != "regather") for phase in PHASES}
        f, b = passes_of(by_phase | {"regather": on_links("backward", "regather")}, graph_region, profile, recompute)
        forward.append(np.maximum(times.forward[region] - f, 0.0))
        backward.append(np.maximum(times.backward[region] - b, 0.0))
    return replace(times, free_forward=tuple(forward), free_backward=tuple(backward))


def _with_host_time(micro: MicrobatchCost, device: list[Any], host: list[Any], waits: list[Any]) -> list[Any]:
    """Return the pass time of each region with the host's launch time, and with the chip's waits for the host.

    Blocks of all kinds share one factor, as the host runs ahead from one to the next: how a graph divides them does not matter.
    """
    if micro.host_is_chip:
        return [d + h for d, h in zip(device, host, strict=True)]
    regions, inner = micro.program.regions, inner_regions(micro.program.regions)
    factors = [host_factor(d, h) for d, h in zip(device, host, strict=True)]
    if len(inner) > 1:
        together = (sum_of([regions[i].count * times[i] for i in inner]) for times in (device, host))
        factors[inner.start : inner.stop] = [host_factor(*together)] * len(inner)
    return [d * factor + wait for d, factor, wait in zip(device, factors, waits, strict=True)]


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


def phase_launches(micro: MicrobatchCost, region: int) -> dict[str, Any]:
    """Return the kernels and collectives of each phase of a region; `regather` is separate."""
    launches: dict[str, Any] = {}
    for i, phase in enumerate(PHASES):
        segment = region * len(PHASES) + i
        total = micro.launches[segment]
        for j, name in enumerate(COMM):
            if name != "regather":
                total = total + micro.collectives[segment * len(COMM) + j]
        launches[phase] = total
    launches["regather"] = micro.collectives[(region * len(PHASES) + PHASES.index("backward")) * len(COMM) + COMM.index("regather")]
    return launches


def host_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Column, region: int) -> tuple[Any, Any]:
    """Return the host time to launch a region's forward pass, and its backward pass with recomputation. [s]"""
    graph_region, launches = micro.program.regions[region], phase_launches(micro, region)
    launches |= {name: FORWARD * launches[name] for name in ("core", "rest", "tail")}
    forward, backward = passes_of(launches, graph_region, profile, recompute)
    f, b = profile.timing.host_launch_time * forward, profile.timing.host_launch_time * backward
    if profile.timing.host_layer_time_per_tp_across_nodes > 0 and graph_region.is_block:
        across = graph_region.host_layers * profile.timing.host_layer_time_per_tp_across_nodes * micro.crosses_nodes * tp
        recomputed = FORWARD_SHARE if recompute is Recompute.FULL else 0.0
        f, b = f + FORWARD_SHARE * across, b + (1.0 - FORWARD_SHARE + recomputed) * across
    return f, b


def wait_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """Return the time that the chip waits for the host in the passes of a region. [s]

    If the sizes of an exchange are counted on chips, the host reads them before it launches the exchange. Until then the chip has no
    queued work. Each wait costs one launch of a forward pass, again if the pass is recomputed. The copy itself is not counted.

    Source: Megatron-Core, `moe/token_dispatcher.py` (`MoEAlltoAllTokenDispatcher`: counts to the host before the all-to-all); torchtitan's
    `generate_permute_indices` and DeepEP's normal mode likewise.
    """
    if micro.waits is None:
        return 0.0, 0.0
    counts = {phase: micro.waits[(region * len(PHASES) + i) * len(COMM) + COMM.index(EXCHANGED)] for i, phase in enumerate(PHASES)}
    passes = passes_of(counts | {"regather": 0.0}, micro.program.regions[region], profile, recompute)
    forward, backward = (FORWARD * profile.timing.host_launch_time * count for count in passes)
    return forward, backward


def run_ahead_fraction(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Column) -> Any:
    """Return the fill of the launch queue: d / (d + h) of a block's device and host time; 0 without blocks. [-]"""
    regions = micro.program.regions
    inner = inner_regions(regions)
    if not inner:
        return 0.0 * tp

    def device_time(region: int) -> Any:
        phase = phase_times(micro, profile, region)
        return ((phase["core"] + phase["rest"]) + phase["tail"]) + phase["backward"]

    times = tuple(device_time(i) if region.is_block else 0.0 for i, region in enumerate(regions))
    counts = tuple(region.count for region in regions)
    device = mean_block(times, regions, inner, counts)
    launching = [host_times(micro, profile, recompute, tp, i) if region.is_block else (0.0, 0.0) for i, region in enumerate(regions)]
    return device / (device + mean_block(tuple(f + b for f, b in launching), regions, inner, counts))


def pace(values: Ranks, total: Column, num_ranks: Column, weight: float) -> Any:
    """Return the steady-state time per micro-batch: the slowest stage, or a mean weighted towards it (profile.uneven_stage_weight)."""
    slowest = slowest_stage(values)
    if weight == 1.0:
        return slowest
    mean = total / num_ranks
    return mean + weight * (slowest - mean)


def beat_of(regions: RegionTimes, stages: Stages, *, schedule: PipelineSchedule, num_ranks: Column, profile: ExecutionProfile) -> Any:
    """Return the time that each further micro-batch adds to a full pipeline; gpipe paces forward and backward separately. [s]"""
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    totals = total_pass(regions.forward, stages), total_pass(regions.backward, stages)
    return beat_with(f, b, totals, schedule, num_ranks, profile.timing.uneven_stage_weight)


def beat_with(f: Ranks, b: Ranks, totals: tuple[Any, Any], schedule: PipelineSchedule, num_ranks: Column, weight: float) -> Any:
    if schedule is PipelineSchedule.GPIPE:
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
    ranks, options = grid.degree["pp"], profile.communication
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


def pipeline_step_time(
    regions: RegionTimes,
    stages: Stages,
    *,
    schedule: PipelineSchedule,
    num_ranks: Column,
    num_microbatches: Column,
    virtual_stages: Column,
    hop: Column,
    profile: ExecutionProfile,
) -> Any:
    """Return the time of all micro-batches through the pipeline, with exposed sends. [s]"""
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    total_f, total_b = total_pass(regions.forward, stages), total_pass(regions.backward, stages)
    weight = profile.timing.uneven_stage_weight
    slowest = pace(plus(f, b), total_f + total_b, num_ranks, weight)
    slowest_f, slowest_b = pace(f, total_f, num_ranks, weight), pace(b, total_b, num_ranks, weight)
    time = pipeline_time(
        schedule=schedule,
        total_forward=total_f,
        total_backward=total_b,
        slowest_forward=slowest_f,
        slowest_backward=slowest_b,
        slowest=slowest,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        num_ranks=num_ranks,
        unequal=stages.unequal * (stages.mean_block(regions.forward) + stages.mean_block(regions.backward)),
    )
    return time + exposed_sends(
        hop,
        (slowest_f + slowest_b if schedule is PipelineSchedule.GPIPE else slowest) / virtual_stages,
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        profile=profile,
    )


def exposed_sends(
    hop: Column,
    chunk: Column,
    *,
    schedule: PipelineSchedule,
    num_ranks: Column,
    num_microbatches: Column,
    virtual_stages: Column,
    profile: ExecutionProfile,
) -> Any:
    """Return the time that sends add to the pipeline: the exposed part if they overlap with compute, else every send, fill and drain. [s]

    chunk  time of a further micro-batch on one virtual stage   [s]
    """
    if profile.communication.pp_overlap:
        return send_delay(
            schedule=schedule, hop=hop, chunk=chunk, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages
        )
    later = num_microbatches * virtual_stages - 1.0
    return 2.0 * (num_ranks - 1.0) * hop + later * (2.0 * hop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTerms:
    """Columns of one ZeRO stage, from `ParameterCost`, reshaped to broadcast: times of events and trained elements, by region.

    frozen, casts   frozen parameters and casts of weights; None: there are none
    """

    gather_forward: dict[str, tuple[Any, ...]]
    gather_backward: dict[str, tuple[Any, ...]]
    tp_sum: dict[str, tuple[Any, ...]]
    reduce: dict[str, tuple[Any, ...]]
    publish: tuple[Any, ...]
    full: tuple[Any, ...]
    shard: tuple[Any, ...]
    padded: tuple[Any, ...]
    summed: tuple[Any, ...]
    """Elements of the largest separately summed gradient, by region; empty if there is none."""
    is_reduced: Column
    tied: tuple[Any, Any]
    zero: int
    program: ParameterProgram
    frozen: FrozenBytes | None = None
    casts: CastTimes | None = None


def parameter_terms(program: ParameterProgram, cost: ParameterCost) -> ParameterTerms:
    def by_region(what: str, times: str) -> tuple[Any, ...]:
        return tuple(cost.of(what, times))

    both = ("microbatch", "step")
    return ParameterTerms(
        gather_forward={times: by_region("gather_forward", times) for times in both},
        gather_backward={times: by_region("gather_backward", times) for times in both},
        tp_sum={times: by_region("sum", times) for times in both if ("sum", times) in program.happens},
        reduce={times: by_region("reduce", times) for times in both},
        publish=by_region("publish", "step"),
        full=tuple(cost.full),
        shard=tuple(cost.shard),
        padded=tuple(cost.padded),
        summed=() if cost.summed is None else tuple(cost.summed),
        is_reduced=cost.is_reduced,
        tied=(cost.tied[0], cost.tied[1]),
        zero=program.zero,
        program=program,
        frozen=cost.frozen,
        casts=cost.casts,
    )


def held_elements(terms: ParameterTerms, stages: Stages, *, sharded: bool) -> Ranks:
    """Return the trained elements on each distinct rank."""
    first, *between, last = stage_sums(terms.shard if sharded else terms.full, stages)
    twice = stages.is_single * terms.tied[int(sharded)]
    return first - twice, *between, last - twice


def frozen_bytes(frozen: FrozenBytes, stages: Stages, *, sharded: bool) -> Ranks:
    """Return the bytes of frozen weights on each distinct rank."""
    first, *between, last = stage_sums(frozen.shard if sharded else frozen.full, stages)
    twice = stages.is_single * frozen.tied[int(sharded)]
    return first - twice, *between, last - twice


def optimizer_time(terms: ParameterTerms, stages: Stages, sizes: Bytes, machine: Machine) -> Any:
    """Return the time of the optimizer step: one pass over the optimizer state of the fullest rank. [s]"""
    return update_time(slowest_stage(held_elements(terms, stages, sharded=terms.zero >= 1)), sizes, machine)


def update_time(elements: Column, sizes: Bytes, machine: Machine) -> Any:
    """Return the time of an optimizer step over `elements`: on the chip, or on the host with its transfers. [s]"""
    if sizes.hosted:
        return elements * (sizes.hosted / machine.host.memory_bandwidth + sizes.carried / machine.host.bandwidth)
    low = sizes.projection
    time = streaming_time(num_bytes=elements * sizes.step, num_elements=elements, kernel_class=sizes.optimizer_kernel, machine=machine)
    return time + elements * (low.flops / machine.matmul.flop_rate + low.time) if low.flops else time


def tied_time(program: Program, terms: ParameterTerms, sizes: Bytes, machine: Machine, grid: LayoutGrid) -> Any:
    """Return the time to all-reduce the gradient of a tied matrix over the first and the last stage, once a step (R18). [s]

    With one stage the group has one member. Sharded gradients are reduced as shards, others as they are accumulated.
    """
    if not any(len(p.regions) > 1 and not p.is_frozen for p in program.parameters):
        return 0.0
    elements = (terms.shard if terms.program.holds_sharded_gradients else terms.full)[-1]
    members = np.where(grid.degree["pp"] > 1, 2.0, 1.0)
    inside = [np.where(hop < 2, 1.0, members) for hop in grid.hop[:-1]] + [members]
    num_bytes = elements * sizes.tied / lone_rate(grid.degree["pp"], grid.hop, machine)
    return collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group_size=members, inside=inside, machine=machine)


def accumulation_time(terms: ParameterTerms, stages: Stages, sizes: Bytes, machine: Machine, *, num_microbatches: Column) -> Any:
    """Return the time to add each micro-batch's weight gradients to the accumulator. If the dtypes agree, the first is not added. [s]"""
    return adding_time(
        slowest_stage(held_elements(terms, stages, sharded=False)),
        sizes,
        machine,
        num_microbatches=num_microbatches,
        holds_sharded_weights=terms.program.holds_sharded_weights,
        is_reduced=terms.is_reduced,
    )


def cast_time(terms: ParameterTerms, stages: Stages) -> Any:
    """Return the time of weight casts to fewer bits, once a step. [s]

    Each stage casts its weights when the first micro-batch arrives, and no later stage can begin before. The casts of all stages are
    therefore on the critical path. Casts after the optimizer step run on all stages at once: the fullest rank counts.
    """
    if terms.casts is None:
        return 0.0
    return total_pass(terms.casts.first, stages) + slowest_stage(stage_sums(terms.casts.update, stages))


def adding_time(
    elements: Column, sizes: Bytes, machine: Machine, *, num_microbatches: Column, holds_sharded_weights: bool, is_reduced: Column
) -> Any:
    """Return `accumulation_time` for a number of elements, with the passes over gradients once a step. [s]"""
    times = num_microbatches if sizes.gradient > sizes.gathered else num_microbatches - 1.0
    bandwidth = machine.memory.bandwidth
    # gradients of unsharded weights may be copied into one buffer of their unit before the reduction
    copy = 0.0 if holds_sharded_weights else machine.host.times.get("gradient_mebibyte", 0.0) / MEBIBYTE
    passes = (sizes.passed + sizes.scaled * is_reduced) / bandwidth
    return times * (elements * (sizes.accumulate / bandwidth)) + elements * (sizes.gradient * copy + passes)
