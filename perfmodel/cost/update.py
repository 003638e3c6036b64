"""Parameters in a step outside its pipeline: bytes of each copy of an element, elements that a rank holds, and the time of gradient
accumulation, of the optimizer, of weight casts and of tied gradients.

Every function takes arrays of any shapes that broadcast, as those of `cost/step.py` do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfmodel.cost.collectives import CollectiveKind, collective_time, lone_rate
from perfmodel.cost.compression import CompressionCost
from perfmodel.cost.compute import streaming_time
from perfmodel.cost.machine import MEBIBYTE, Machine
from perfmodel.cost.parameters import TIMES, WHAT, CastTimes, FrozenBytes, ParameterCost, ParameterProgram
from perfmodel.cost.stages import Ranks, Stages, region_sum, slowest_stage, stage_sums
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.hardware.calibration import KernelClass
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.workload.job import Optimizer, PrecisionPolicy
from perfmodel.workload.projection import NO_PROJECTION, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBytes:
    """Bytes of an element of a gradient, and memory traffic of the passes over it. [byte]

    accumulated, reduced   as accumulated, and as sent in a reduction
    tied            of a tied matrix, as sent between the first and the last stage
    produced        as backward outputs it
    unsharded, sharded   as held until the optimizer step
    copy            of full gradients that are held in addition to the accumulator
    adding          traffic to add one micro-batch's gradient to the accumulator
    passed, scaled  traffic per step of passes over a full gradient; `scaled`: only over gradients that data axes reduce
    frees_early     a gradient is freed as soon as its parameter is updated
    """

    accumulated: float
    reduced: float
    tied: float
    produced: float
    unsharded: float
    sharded: float
    copy: float
    adding: float
    passed: float
    scaled: float
    frees_early: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Bytes of an element of the optimizer state, and traffic of one optimizer step. [byte]

    state            optimizer state and master copy
    step             memory traffic of one optimizer step
    kernel           kernel class of the step; ADD without optimizer state, as the step then passes over weights and gradients only
    copy             temporary copy of an optimizer step that has several kernels
    hosted, carried  optimizer step on the host: its host-memory traffic, and bytes between host and chip
    projection       of gradients to a low rank
    """

    state: float
    step: float
    kernel: KernelClass
    copy: float
    hosted: float = 0.0
    carried: float = 0.0
    projection: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes of an element of each copy, for one precision policy, optimizer and profile. [byte]

    stored, gathered    weights as stored between steps, and as operators read them
    keeps_compute_copy  weights are held as operators read them, in addition to the stored master copy
    hosts_weights       weights, frozen ones included, are stored in host memory
    """

    stored: float
    gathered: float
    keeps_compute_copy: bool
    hosts_weights: bool = False
    gradient: GradientBytes
    optimizer: OptimizerBytes


@session_cache(maxsize=64)
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
        keeps_compute_copy=stores_master,
        gradient=GradientBytes(
            accumulated=gradient,
            reduced=reduced,
            tied=reduced if profile.state.stores_master_weights else min(gradient, reduced),
            produced=itemsize(policy.gradient),
            # if the master copy is the stored weight, gradients arrive in its dtype and are held in the reduction dtype
            unsharded=reduced if stores_master else gradient,
            sharded=master if stores_master else gradient,
            copy=profile.state.gradient_copy_bytes,
            adding=(2 * gradient - compute if profile.kernels.fuses_gradient_accumulation else 2 * gradient + compute)
            if accumulates_apart
            else 3 * gradient,
            passed=profile.state.gradient_pass_bytes,
            scaled=profile.state.gradient_scaling_bytes,
            frees_early=profile.state.steps_in_backward,
        ),
        optimizer=OptimizerBytes(
            state=policy.state_bytes_per_parameter(optimizer) - fewer - (master if stores_master else 0.0),
            step=(policy.step_bytes_per_parameter(optimizer) + passes) * profile.timing.optimizer_bytes_factor,
            kernel=KernelClass.OPTIMIZER if optimizer.num_states else KernelClass.ADD,
            copy=itemsize(policy.optimizer_state) if profile.state.optimizer_copies and optimizer.num_states else 0.0,
            projection=projection,
        ),
    )
    is_hosted = profile.state.offloads_optimizer or profile.state.offloads_parameters
    return _on_host(sizes, profile, policy.step_bytes_per_parameter(optimizer)) if is_hosted else sizes


def _on_host(sizes: Bytes, profile: ExecutionProfile, step: float) -> Bytes:
    """Return the sizes without what is offloaded to host memory. step: traffic of the optimizer step, which then runs on the host."""
    hosted = sizes
    if profile.state.offloads_optimizer:
        carried = sizes.gradient.produced + sizes.gathered  # gradient to the host, new weight back
        hosted = replace(
            hosted,
            stored=min(sizes.stored, sizes.gathered),
            keeps_compute_copy=False,
            gradient=replace(sizes.gradient, accumulated=0.0, unsharded=0.0, sharded=0.0, adding=0.0, passed=0.0, scaled=0.0),
            optimizer=replace(sizes.optimizer, state=0.0, step=0.0, hosted=step, carried=carried),
        )
    return replace(hosted, stored=0.0, keeps_compute_copy=False, hosts_weights=True) if profile.state.offloads_parameters else hosted


@session_cache(maxsize=64)
def on_chip(profile: ExecutionProfile) -> ExecutionProfile:
    """Return the profile without offloading."""
    return profile.having(offloads_checkpoints=False, offloads_activations=False, offloads_optimizer=False, offloads_parameters=False)


# --- elements and times ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTerms:
    """Columns of one ZeRO stage, from `ParameterCost`, reshaped to broadcast: times of events and trained elements, by region.

    frozen, casts   frozen parameters and casts of weights; None: there are none
    compression     of gradients; None: they are not compressed
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
    compression: CompressionCost | None = None


def parameter_terms(program: ParameterProgram, cost: ParameterCost) -> ParameterTerms:
    forward, backward, sums, reduce, publish = cost.time.reshape(len(WHAT), len(TIMES), len(cost.full), -1)
    return ParameterTerms(
        gather_forward=dict(zip(TIMES, map(tuple, forward), strict=True)),
        gather_backward=dict(zip(TIMES, map(tuple, backward), strict=True)),
        tp_sum=dict(zip(TIMES, map(tuple, sums), strict=True)),
        reduce=dict(zip(TIMES, map(tuple, reduce), strict=True)),
        publish=tuple(publish[TIMES.index("step")]),
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
        compression=cost.compression,
    )


def held_elements(terms: ParameterTerms | FrozenBytes, stages: Stages, *, sharded: bool) -> Ranks:
    """Return the trained elements, or the bytes of frozen weights, on each distinct rank."""
    first, *between, last = stage_sums(terms.shard if sharded else terms.full, stages)
    twice = terms.tied[int(sharded)]
    return first - stages.has_both_ends[0] * twice, *between, last - stages.is_single * twice


def optimizer_time(elements: Column, sizes: OptimizerBytes, machine: Machine) -> Any:
    """Return the time of an optimizer step, one pass over the state of `elements`: on the chip, or on the host with its transfers. [s]"""
    if sizes.hosted:
        return elements * (sizes.hosted / machine.host.memory_bandwidth + sizes.carried / machine.host.bandwidth)
    low = sizes.projection
    time = streaming_time(num_bytes=elements * sizes.step, num_elements=elements, kernel_class=sizes.kernel, machine=machine)
    return time + elements * (low.flops / machine.matmul.flop_rate + low.time) if low.flops else time


def update_times(terms: ParameterTerms, stages: Stages, sizes: Bytes, machine: Machine, *, num_microbatches: Column) -> tuple[Any, Any]:
    """Return the times of the optimizer step and of gradient accumulation, each on the rank with the most elements. [s]"""
    full = slowest_stage(held_elements(terms, stages, sharded=False))
    updated = slowest_stage(held_elements(terms, stages, sharded=True)) if terms.zero else full
    accumulation = accumulation_time(
        full,
        sizes,
        machine,
        num_microbatches=num_microbatches,
        holds_sharded_weights=terms.program.holds_sharded_weights,
        is_reduced=terms.is_reduced,
    )
    return optimizer_time(updated, sizes.optimizer, machine), accumulation


def tied_time(terms: ParameterTerms, sizes: Bytes, machine: Machine, grid: LayoutGrid) -> Any:
    """Return the time to all-reduce the gradient of a tied matrix over the first and the last stage, once a step (R18). [s]

    With one stage the group has one member. Sharded gradients are reduced as shards, others as they are accumulated.
    """
    elements = (terms.shard if terms.program.holds_sharded_gradients else terms.full)[-1]
    members = np.where(grid.degree["pp"] > 1, 2.0, 1.0)
    inside = [np.where(hop < 2, 1.0, members) for hop in grid.hop[:-1]] + [members]
    num_bytes = elements * sizes.gradient.tied / lone_rate(grid.degree["pp"], grid.hop, machine)
    return collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group_size=members, inside=inside, machine=machine)


def cast_time(casts: CastTimes, stages: Stages) -> Any:
    """Return the time of weight casts to fewer bits, once a step. [s]

    Each stage casts its weights when the first micro-batch arrives, and no later stage can begin before. The casts of all stages are
    therefore on the critical path. Casts after the optimizer step run on all stages at once: the fullest rank counts.
    """
    return region_sum(casts.first, stages.total_sum) + slowest_stage(stage_sums(casts.update, stages))


def compression_time(terms: ParameterTerms, stages: Stages, *, num_microbatches: Column) -> Any:
    """Return the time of a step in which gradients are compressed and decompressed, on the slowest rank. [s]

    It is that of kernels on the chip: backward, with which the messages overlap, waits meanwhile.
    """
    assert terms.compression is not None
    times = num_microbatches if ("reduce", "microbatch") in terms.program.happens else 1.0
    return times * slowest_stage(stage_sums(terms.compression.time, stages))


def accumulation_time(
    elements: Column, sizes: Bytes, machine: Machine, *, num_microbatches: Column, holds_sharded_weights: bool, is_reduced: Column
) -> Any:
    """Return the time to add each micro-batch's weight gradients to the accumulator, with the passes over gradients once a step. [s]

    If the dtypes agree, the first is not added.
    """
    gradient = sizes.gradient
    times = num_microbatches if gradient.accumulated > sizes.gathered else num_microbatches - 1.0
    bandwidth = machine.memory.bandwidth
    # gradients of unsharded weights may be copied into one buffer of their unit before the reduction
    copy = 0.0 if holds_sharded_weights else machine.host.times.get("gradient_mebibyte", 0.0) / MEBIBYTE
    passes = (gradient.passed + gradient.scaled * is_reduced) / bandwidth
    return times * (elements * (gradient.adding / bandwidth)) + elements * (gradient.accumulated * copy + passes)
