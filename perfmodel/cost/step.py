"""The time of one training step, assembled from microbatches, parameters and the pipeline.

Every function takes arrays of any shapes that broadcast: a single plan is an array of one, a search evaluates blocks with one
dimension for each independent choice. The same code serves both, so their bits agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import CollectiveKind, collective_time, send_time
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
    """Sizes of an element of each copy, for one precision policy, optimizer and profile. [byte]

    stored     the weights that stay; gathered: as operators read them; gradient: as accumulated; reduced: on the wire
    produced   a gradient as backward makes it; whole_gradient, sharded_gradient: as they lie until the optimizer reads them
    state      optimizer state and master copy of one element; step: traffic of one optimizer step for one element
    optimizer_kernel   one that adds where the optimizer has no state, as that is a pass over weights and gradients
    accumulate traffic of adding one microbatch's gradient to the accumulator, for one element
    gradient_copy   whole gradients beside the accumulator
    projection      of gradients, where they are
    optimizer_copy  what a step of several kernels holds for itself
    hosts_weights     weights lie in the host's memory, frozen ones too
    frees_gradients   a gradient is gone as soon as its parameter is updated
    passed, scaled  traffic once a step of passes over a whole gradient, and of those only over one that data axes reduce
    hosted     of a step that the host does, what it moves in its own memory; carried: what travels between it and the chip
    """

    stored: float
    gathered: float
    gradient: float
    reduced: float
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
    from perfmodel.foundation.dtypes import itemsize

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
    # states of a paged optimizer are no memory of the allocator, and leave the chip where it is full
    fewer = plain - (0.0 if optimizer.is_paged else held) - projection.matrix * itemsize(policy.gradient)
    # the update is written at full size and read again; each projection matrix is read for both products
    passes = 2 * (held - plain) + (2 * itemsize(policy.gradient) * (1 + projection.matrix) if projection.flops else 0.0)
    sizes = Bytes(
        stored=master if stores_master else itemsize(policy.parameter),
        gathered=itemsize(policy.parameter),
        gradient=gradient,
        reduced=reduced,
        state=policy.state_bytes_per_parameter(optimizer) - fewer - (master if stores_master else 0.0),
        step=(policy.step_bytes_per_parameter(optimizer) + passes) * profile.timing.optimizer_bytes_factor,
        optimizer_kernel=KernelClass.OPTIMIZER if optimizer.num_states else KernelClass.ADD,
        accumulate=(2 * gradient - compute if profile.kernels.fuses_gradient_accumulation else 2 * gradient + compute)
        if accumulates_apart
        else 3 * gradient,
        keeps_compute_copy=stores_master,
        gradient_copy=profile.state.gradient_copy_bytes,
        produced=itemsize(policy.gradient),
        # where the master copy is what is stored, gradients arrive in its dtype, and wait in that of reduction
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
    """Without what lies in the host's memory: the optimizer's state and gradients, weights.

    step  traffic of the optimizer's step, which is the host's then
    """
    hosted, gone = sizes, _NOTHING
    if profile.state.offloads_optimizer:
        hosted = replace(
            hosted,
            **gone,
            stored=min(sizes.stored, sizes.gathered),
            keeps_compute_copy=False,
            hosted=step,
            carried=hosted_bytes(sizes.produced, sizes.gathered),
        )
    return replace(hosted, stored=0.0, keeps_compute_copy=False, hosts_weights=True) if profile.state.offloads_parameters else hosted


# --- time -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTimes:
    """Seconds of one microbatch by region, of a block once: forward and backward, recomputation in backward.

    free_forward, free_backward   the same without the time in which its own collectives hold the links between nodes: what collectives of
                                  parameters can hide under, which want those links too; empty where none do
    ends   how much longer both passes take alone than beside another microbatch's; empty where none run beside each other
    """

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    free_forward: tuple[Any, ...] = ()
    free_backward: tuple[Any, ...] = ()
    ends: tuple[Any, ...] = ()

    @property
    def under_forward(self) -> tuple[Any, ...]:
        """Compute that collectives of parameters can overlap."""
        return self.free_forward or self.forward

    @property
    def under_backward(self) -> tuple[Any, ...]:
        return self.free_backward or self.backward

    def map_columns(self, function: Callable[[Any], Any]) -> RegionTimes:
        """With each column as `each` makes it."""
        return RegionTimes(
            forward=tuple(function(x) for x in self.forward),
            backward=tuple(function(x) for x in self.backward),
            free_forward=tuple(function(x) for x in self.free_forward),
            free_backward=tuple(function(x) for x in self.free_backward),
            ends=tuple(function(x) for x in self.ends),
        )


def exposed_fraction(profile: ExecutionProfile, name: str) -> float:
    """Share of a class of communication that does not hide under compute."""
    match name:
        case "tensor_parallel":
            return 1.0 - profile.timing.tp_overlap_fraction
        case name if name == EXCHANGED:
            return 0.0 if profile.communication.hides_exchanges else 1.0
        case "regather" | "input_gradient":
            return 1.0 - max(profile.timing.tp_overlap_fraction, profile.timing.tp_backward_overlap_fraction)
    return 1.0


def communication_time(micro: MicrobatchCost, profile: ExecutionProfile, segment: int, which: int) -> Any:
    """A segment's time of the `which`-th class of communication as far as attention does not hide it. [s]

    Keys and values that pass from rank to rank travel beside the products of the block before: what sticks out is max(s - a, 0).
    """
    sent = micro.communication[segment * len(COMM) + which]
    if profile.communication.context_form not in RINGS or COMM[which] != "context_parallel":
        return sent
    region, phase = divmod(segment, len(PHASES))
    first, backward = region * len(PHASES), PHASES.index("backward")
    overlapping = (
        micro.attention[segment] if phase == backward else sum(micro.attention[first + i] for i in range(len(PHASES)) if i != backward)
    )
    return np.maximum(sent - overlapping, 0.0)


def phase_times(micro: MicrobatchCost, profile: ExecutionProfile, region: int) -> dict[str, Any]:
    """Work and exposed communication of each phase of a region; re-gathers apart."""
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


def passes_of(phase: Mapping[str, Any], it: Region, profile: ExecutionProfile, recompute: Recompute) -> tuple[Any, Any]:
    """Forward and backward of a region, of a quantity of each phase and of what is gathered again (`regather`); with what is recomputed, in
    blocks, in backward."""
    forward, backward = (phase["core"] + phase["rest"]) + phase["tail"], phase["backward"]
    if not it.is_block or recompute is not Recompute.FULL:  # full recomputation gathers its inputs anyway
        backward = backward + phase["regather"]
    if it.is_block:
        for name in recomputed_phases(recompute, profile):
            backward = backward + phase[name]
    return forward, backward


def region_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, tp: Array) -> RegionTimes:
    """Forward and backward of each region, with what is recomputed in blocks, and the host's floor under both, and no less than what is
    carried to the host's memory and back takes."""
    forward, backward = [], []
    alone: tuple[list[Any], list[Any]] = ([], [])
    for region, it in enumerate(micro.program.regions):
        f, b = passes_of(phase_times(micro, profile, region), it, profile, recompute)
        if profile.communication.hides_exchanges:
            unpaired = _alone_with_exchanges(micro, profile, recompute, region, f, b) if it.is_block else (f, b)
            for passes, pass_time in zip(alone, unpaired, strict=True):
                passes.append(pass_time)
        if profile.communication.hides_exchanges and it.is_block:
            f, b = _between_exchanges(micro, profile, recompute, region, f, b)
        elif micro.concurrent is not None and it.is_block:
            hidden = overlapped_exchange_time(micro, profile, recompute, region)
            f, b = f - hidden[0], b - hidden[1]
        forward.append(f)
        backward.append(b)
    if profile.has_host_floor:
        host = [host_times(micro, profile, recompute, tp, region) for region in range(len(forward))]
        waits = [wait_times(micro, profile, recompute, region) for region in range(len(forward))]
        of_pass = [([passes[i] for passes in host], [passes[i] for passes in waits]) for i in range(2)]
        forward, backward = (_with_host(micro, times, *of_pass[i]) for i, times in enumerate((forward, backward)))
        if profile.communication.hides_exchanges:
            alone = (_with_host(micro, alone[0], *of_pass[0]), _with_host(micro, alone[1], *of_pass[1]))
    carried = [carried_bytes(micro, profile, recompute, region) for region in range(len(forward))]
    forward, backward = (_no_less_than(times, carried, micro.host_bandwidth) for times in (forward, backward))
    ends: tuple[Any, ...] = ()
    if profile.communication.hides_exchanges:
        ends = tuple(np.maximum(sum(pair) - (f + b), 0.0) for pair, f, b in zip(zip(*alone, strict=True), forward, backward, strict=True))
    times = RegionTimes(forward=tuple(forward), backward=tuple(backward), ends=ends)
    return times if micro.between_nodes is None else _without_links(times, micro, micro.between_nodes, profile, recompute)


def _no_less_than(times: list[Any], carried: Sequence[Any], bandwidth: float) -> list[Any]:
    """Passes that take as long as what they carry to the host's memory, or from there; None: they carry nothing."""
    return [time if num_bytes is None else np.maximum(time, num_bytes / bandwidth) for time, num_bytes in zip(times, carried, strict=True)]


TRANSFER_UNITS = 20.0 / 132.0
"""Share of a chip's compute units that move what is exchanged, while another microbatch computes on the others: 20 of 132 on H800
(DeepSeek-V3, arXiv 2412.19437, section 3.2.2; DeepEP's normal kernels)."""


def exchanged_passes(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """Exchange time of a region in a forward and a backward pass. [s]"""
    segments = {phase: (region * len(PHASES) + i) * len(COMM) + COMM.index(EXCHANGED) for i, phase in enumerate(PHASES)}
    sent = {phase: micro.communication[segment] for phase, segment in segments.items()}
    return passes_of(sent | {"regather": 0.0}, micro.program.regions[region], profile, recompute)


def _between_exchanges(
    micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int, f: Column, b: Column
) -> tuple[Any, Any]:
    """Passes of a block where one microbatch's forward pass runs beside another's backward pass, each computing while the other sends. [s]

    max(f + u s_b, s_b) and max(b + u s_f, s_f); with delayed weight gradients max(f + b + u s, s), shared out as these two are

    s  what is sent in both passes, s_f + s_b    u  share of the compute units that the transfer takes while it lasts

    What backward sends travels beside the forward pass, and the other way round. Weight gradients that are apart fill either: the next
    transfer waits for the gradient of its rows alone.

    Source: Megatron-Core, `models/common/model_chunk_schedule_plan.py` (`TransformerLayerSchedulePlan.run`: combine backward beside
    attention forward, dispatch forward then backward beside the experts' backward, weight gradients and forward, combine forward beside
    attention backward); DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, backward for inputs and for weights apart.
    """
    sent_f, sent_b = exchanged_passes(micro, profile, recompute, region)
    forward, backward = np.maximum(f + TRANSFER_UNITS * sent_b, sent_b), np.maximum(b + TRANSFER_UNITS * sent_f, sent_f)
    if not profile.communication.delays_weight_gradients:
        return forward, backward
    sent = sent_f + sent_b
    factor = np.maximum((f + b) + TRANSFER_UNITS * sent, sent) / np.maximum(forward + backward, _LEAST)
    factor = np.minimum(factor, 1.0)  # where nothing sticks out it is one but for rounding
    return forward * factor, backward * factor


def _alone_with_exchanges(
    micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int, f: Column, b: Column
) -> tuple[Any, Any]:
    """Passes of a block beside which no other microbatch's runs: f + s_f and b + s_b - h. [s]

    h = (1 - u) sum over both exchanges of min(w, s_b / 2): of delayed weight gradients those of experts run beside what dispatch sends
    back, the others beside what the combine of the layer before does; 0 where none is delayed.   w  their time

    Source: as `_beside_exchanges`, where one of the layers is None.
    """
    sent_f, sent_b = exchanged_passes(micro, profile, recompute, region)
    if micro.weight_gradients is None:
        return f + sent_f, b + sent_b
    half = micro.communication[(region * len(PHASES) + PHASES.index("backward")) * len(COMM) + COMM.index(EXCHANGED)] / 2.0
    before, after = micro.weight_gradients[2 * region], micro.weight_gradients[2 * region + 1]
    hidden = (1.0 - TRANSFER_UNITS) * (np.minimum(before, half) + np.minimum(after, half))
    return f + sent_f, b + sent_b - hidden


def ends_time(regions: RegionTimes, stages: Stages) -> Any:
    """Extra time of the first microbatch's forward passes and the last one's backward passes. The schedule counts each pass as overlapped
    by another one, but no stage overlaps these. [s]

    1f1b: F + B of these two, (m - 1) pairs between. Interleaved, on the last rank: w = (v - 1) p + 1 chunks forward alone, m v - w pairs, w
    chunks back alone, and p - 1 chunks each way until it has its first and after its last: (p - 1 + w) / v = p whole passes as well.

    Source: Megatron-Core overlaps in the 1f1b phase alone (`overlap_moe_expert_parallel_comm`); the sum is `pipeline_time`'s.
    """
    return total_pass(regions.ends, stages) if regions.ends else 0.0


def overlapped_exchange_time(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """Overlapped time of exchanges, forward and backward, with independent work of the same microbatch: the shorter of both, less the
    slow-down of that work by the compute units of the transfer. [s]"""
    assert micro.concurrent is not None
    work = {phase: micro.concurrent[region * len(PHASES) + i] for i, phase in enumerate(PHASES)}
    passes = passes_of(work | {"regather": 0.0}, micro.program.regions[region], profile, recompute)
    sent = exchanged_passes(micro, profile, recompute, region)
    forward, backward = ((1.0 - TRANSFER_UNITS) * np.minimum(w, s) for w, s in zip(passes, sent, strict=True))
    return forward, backward


def exposed_exchange_time(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> Any:
    """How much longer passes of a block take for what is exchanged beside them. [s]"""
    f, b = passes_of(phase_times(micro, profile, region), micro.program.regions[region], profile, recompute)
    return sum(_between_exchanges(micro, profile, recompute, region, f, b)) - (f + b)


def _without_links(times: RegionTimes, micro: MicrobatchCost, held: Array, profile: ExecutionProfile, recompute: Recompute) -> RegionTimes:
    """With the time that is left where collectives of operators, hidden or not, have held the links between nodes."""
    forward, backward = [], []
    for region, it in enumerate(micro.program.regions):

        def on_links(phase: str, name: str, region: int = region) -> Any:
            return held[(region * len(PHASES) + PHASES.index(phase)) * len(COMM) + COMM.index(name)]

        by_phase = {phase: sum(on_links(phase, name) for name in COMM if name != "regather") for phase in PHASES}
        f, b = passes_of(by_phase | {"regather": on_links("backward", "regather")}, it, profile, recompute)
        forward.append(np.maximum(times.forward[region] - f, 0.0))
        backward.append(np.maximum(times.backward[region] - b, 0.0))
    return replace(times, free_forward=tuple(forward), free_backward=tuple(backward))


def _with_host(micro: MicrobatchCost, device: list[Any], host: list[Any], waits: list[Any]) -> list[Any]:
    """A pass of each region with the host's time, and with what the chip waits for it. Several kinds of blocks have one floor together, as
    the host runs ahead from one to the next: into which of them a graph is divided makes no difference."""
    if micro.host_is_chip:
        return [d + h for d, h in zip(device, host, strict=True)]
    regions, inner = micro.program.regions, inner_regions(micro.program.regions)
    factors = [host_factor(d, h) for d, h in zip(device, host, strict=True)]
    if len(inner) > 1:
        together = (sum_of([regions[i].count * times[i] for i in inner]) for times in (device, host))
        factors[inner.start : inner.stop] = [host_factor(*together)] * len(inner)
    return [d * factor + wait for d, factor, wait in zip(device, factors, waits, strict=True)]


FORWARD_SHARE = 1.0 / 3.0
"""Share of a layer's time across nodes that its forward pass waits: backward computes two gradients for each product."""


def host_factor(device: Array, host: Column) -> Any:
    """How many times longer a pass of a microbatch takes since it never takes less than the host needs to launch it:
    (d^8 + h^8)^(1/8) / d. [-]

    A maximum, smooth where the two are alike. Each pass has its own, so that a quicker backward pass never leaves less of the forward one,
    nor the other way round, and with it less to hide communication under.
    """
    ratio = host / np.maximum(device, _LEAST)
    square = ratio * ratio
    fourth = square * square
    return np.sqrt(np.sqrt(np.sqrt(1.0 + fourth * fourth)))


_LEAST = 1e-15
"""[s] What a region without work takes, where something is divided by it."""


def phase_launches(micro: MicrobatchCost, region: int) -> dict[str, Any]:
    """Kernels and collectives of each phase of a region; re-gathers apart."""
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
    """Host time to launch a region forward, and backward with recomputation. [s]"""
    it, launches = micro.program.regions[region], phase_launches(micro, region)
    launches |= {name: FORWARD * launches[name] for name in ("core", "rest", "tail")}
    forward, backward = passes_of(launches, it, profile, recompute)
    f, b = profile.timing.host_launch_time * forward, profile.timing.host_launch_time * backward
    if profile.timing.host_layer_time_per_tp_across_nodes > 0 and it.is_block:
        across = it.host_layers * profile.timing.host_layer_time_per_tp_across_nodes * micro.crosses_nodes * tp
        again = FORWARD_SHARE if recompute is Recompute.FULL else 0.0
        f, b = f + FORWARD_SHARE * across, b + (1.0 - FORWARD_SHARE + again) * across
    return f, b


def wait_times(micro: MicrobatchCost, profile: ExecutionProfile, recompute: Recompute, region: int) -> tuple[Any, Any]:
    """How long the chip waits for the host in the passes of a region: where sizes of an exchange are counted on chips, the host reads them
    before it launches the exchange, and until it has, nothing is left for the chip to do. [s]

    One launch of a forward pass for each; again where the pass is recomputed. The copy itself is not counted.

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
    """How full the host keeps the launch queue: d / (d + h) of a block's device and host time; 0 without blocks. [-]"""
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
    """Pace of a steady pipeline: the slowest stage, or a mean drawn towards it (profile.uneven_stage_weight)."""
    slowest = slowest_stage(values)
    if weight == 1.0:
        return slowest
    mean = total / num_ranks
    return mean + weight * (slowest - mean)


def beat_of(regions: RegionTimes, stages: Stages, *, schedule: PipelineSchedule, num_ranks: Column, profile: ExecutionProfile) -> Any:
    """Time that each further microbatch adds to a full pipeline: the pace of forward and backward, with gpipe of each by itself. [s]"""
    f, b = stage_sums(regions.forward, stages), stage_sums(regions.backward, stages)
    totals = total_pass(regions.forward, stages), total_pass(regions.backward, stages)
    return beat_with(f, b, totals, schedule, num_ranks, profile.timing.uneven_stage_weight)


def beat_with(f: Ranks, b: Ranks, totals: tuple[Any, Any], schedule: PipelineSchedule, num_ranks: Column, weight: float) -> Any:
    if schedule is PipelineSchedule.GPIPE:
        return pace(f, totals[0], num_ranks, weight) + pace(b, totals[1], num_ranks, weight)
    return pace(plus(f, b), totals[0] + totals[1], num_ranks, weight)


def hop_time(boundary: Column, tp: Column, profile: ExecutionProfile, machine: Machine, grid: LayoutGrid, *, is_scattered: bool) -> Any:
    """One send of a microbatch's boundary tensor to the next pipeline rank, the mean over the pairs of ranks. [s]

    The host spends `pipeline_send` on it: the schedule's own bookkeeping, of one pass of one microbatch through one stage.
    A tensor of which tp ranks hold equal copies is sent in tp parts and gathered (Megatron's scatter-gather), if the profile does so.
    """
    ranks = grid.degree["pp"]
    runtime = np.minimum(ranks - 1.0, 1.0) * machine.host_times.get("pipeline_send", 0.0)
    if is_scattered or not profile.communication.scatters_pipeline_sends:
        return send_time(boundary, ranks, grid.hop, machine) + runtime
    send = send_time(boundary / tp, ranks, grid.hop, machine)
    members = np.where(ranks > 1, tp, 1.0)
    group_inside = [np.minimum(tier, members) for tier in grid.group_inside(TENSOR_AXES)]
    gather = collective_time(CollectiveKind.ALL_GATHER, boundary, group_size=members, inside=group_inside, machine=machine)
    return send + gather + runtime


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
    """All microbatches through the pipeline, with the sends that do not hide. [s]"""
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
    """Time that sends add to the pipeline: the exposed part if they overlap compute; else each of them, and fill and drain. [s]

    chunk  what each further microbatch takes of one virtual stage   [s]
    """
    if profile.communication.pp_overlap:
        return send_delay(
            schedule=schedule, hop=hop, chunk=chunk, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual_stages=virtual_stages
        )
    later = num_microbatches * virtual_stages - 1.0
    return 2.0 * (num_ranks - 1.0) * hop + later * (2.0 * hop)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTerms:
    """Columns of one ZeRO stage: seconds by region of each event, and elements held of what is trained; `frozen`: of the rest, None where
    there is none; `casts`: None where no weight is cast. From `ParameterCost`, reshaped to broadcast."""

    gather_forward: dict[str, tuple[Any, ...]]
    gather_backward: dict[str, tuple[Any, ...]]
    tp_sum: dict[str, tuple[Any, ...]]
    reduce: dict[str, tuple[Any, ...]]
    publish: tuple[Any, ...]
    full: tuple[Any, ...]
    shard: tuple[Any, ...]
    padded: tuple[Any, ...]
    summed: tuple[Any, ...]
    """Empty where no gradient is summed by itself."""
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
    """Elements on each of the ranks that are told apart."""
    first, *between, last = stage_sums(terms.shard if sharded else terms.full, stages)
    twice = stages.is_single * terms.tied[int(sharded)]
    return first - twice, *between, last - twice


def frozen_bytes(frozen: FrozenBytes, stages: Stages, *, sharded: bool) -> Ranks:
    """Bytes of weights that are not trained on each of the ranks that are told apart."""
    first, *between, last = stage_sums(frozen.shard if sharded else frozen.full, stages)
    twice = stages.is_single * frozen.tied[int(sharded)]
    return first - twice, *between, last - twice


def optimizer_time(terms: ParameterTerms, stages: Stages, sizes: Bytes, machine: Machine) -> Any:
    """The optimizer streams over its state once: the fullest rank. [s]"""
    return update_time(slowest_stage(held_elements(terms, stages, sharded=terms.zero >= 1)), sizes, machine)


def update_time(elements: Column, sizes: Bytes, machine: Machine) -> Any:
    """The optimizer's step of so many elements: the chip's, or the host's with what travels there and back. [s]"""
    if sizes.hosted:
        return elements * (sizes.hosted / machine.host_memory_bandwidth + sizes.carried / machine.host_bandwidth)
    low = sizes.projection
    time = streaming_time(num_bytes=elements * sizes.step, num_elements=elements, kernel_class=sizes.optimizer_kernel, machine=machine)
    return time + elements * (low.flops / machine.matmul.flop_rate + low.time) if low.flops else time


def tied_time(program: Program, terms: ParameterTerms, sizes: Bytes, machine: Machine, grid: LayoutGrid) -> Any:
    """The gradient of a matrix that the first and the last stage share: all-reduced over the two, once a step (R18). [s]

    With one stage the group has one member. Where gradients lie sharded, so does the reduction.
    """
    if not any(len(p.regions) > 1 and not p.is_frozen for p in program.parameters):
        return 0.0
    elements = (terms.shard if terms.program.holds_sharded_gradients else terms.full)[-1]
    members = np.where(grid.degree["pp"] > 1, 2.0, 1.0)
    inside = [np.where(hop < 2, 1.0, members) for hop in grid.hop[:-1]] + [members]
    return collective_time(CollectiveKind.ALL_REDUCE, elements * sizes.reduced, group_size=members, inside=inside, machine=machine)


def accumulation_time(terms: ParameterTerms, stages: Stages, sizes: Bytes, machine: Machine, *, num_microbatches: Column) -> Any:
    """Adding each microbatch's weight gradients to the accumulator. The first needs no adding where the dtypes agree. [s]"""
    return adding_time(
        slowest_stage(held_elements(terms, stages, sharded=False)),
        sizes,
        machine,
        num_microbatches=num_microbatches,
        holds_sharded_weights=terms.program.holds_sharded_weights,
        is_reduced=terms.is_reduced,
    )


def cast_time(terms: ParameterTerms, stages: Stages) -> Any:
    """Casts of weights to fewer bits once a step. [s]

    Each stage casts its weights when the first microbatch gets there, and no later stage may begin before: the casts of all stages are
    on the way of that microbatch. What follows the optimizer's pass all stages do at once: the fullest.
    """
    if terms.casts is None:
        return 0.0
    return total_pass(terms.casts.first, stages) + slowest_stage(stage_sums(terms.casts.update, stages))


def adding_time(
    elements: Column, sizes: Bytes, machine: Machine, *, num_microbatches: Column, holds_sharded_weights: bool, is_reduced: Column
) -> Any:
    """`accumulation_time` of so many elements, and passes over them once a step. [s]"""
    times = num_microbatches if sizes.gradient > sizes.gathered else num_microbatches - 1.0
    bandwidth = machine.memory_bandwidth
    # gradients of whole weights may be copied into one buffer of their unit, from which they leave
    copy = 0.0 if holds_sharded_weights else machine.host_times.get("gradient_mebibyte", 0.0) / MEBIBYTE
    passes = (sizes.passed + sizes.scaled * is_reduced) / bandwidth
    return times * (elements * (sizes.accumulate / bandwidth)) + elements * (sizes.gradient * copy + passes)
