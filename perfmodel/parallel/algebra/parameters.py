"""Collectives of a parameter in a step: gathers, gradient reductions, publishing (ZeRO, FSDP and HSDP).

A parameter has three layouts: as stored Lp, as accumulated gradient La, as optimizer state Lo. It has two lifetimes: the time that it stays
gathered, and the time that its gradient accumulates before the reduction. Partial sums are added without communication, so the time of the
reduction is a layout too (R14 of the sharding algebra). On the axes that ZeRO may shard (R replicated, S sharded by rows of the stored
matrix, P partial):

    ZeRO-0, once a step          Lp R, La P, Lo R       ZeRO-2, full copies      Lp R, La S, Lo S
    ZeRO-0, each microbatch      Lp R, La R, Lo R       ZeRO-2, stores shards    Lp S, freed after backward, La S, Lo S
    ZeRO-1                       Lp R, La P, Lo S       ZeRO-3 (FSDP)            Lp S, freed after forward too, La S, Lo S

where La is P instead of S if gradients are reduced on the last micro-batch only. On the other axes of the gradient (HSDP's
replicate axis, tp for a norm weight under sequence parallelism) a shard is all-reduced once a step, after the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.algebra.sharding import TENSOR_AXES
from perfmodel.parallel.choices import ZERO_STAGES

#: Axes over which ZeRO shards nothing: replicas of the model, and tensor parallelism, which shards weights itself.
#: Parameters may be sharded over any other axis; cp is a data axis for weights.
_UNSHARDED_AXES = frozenset(("dp_replicate",)) | TENSOR_AXES

What = Literal["gather_forward", "gather_backward", "sum", "reduce", "finish", "publish", "tied"]
Times = Literal["microbatch", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEvent:
    """One collective on a parameter or its gradient.

    what    gather_forward, gather_backward   stored -> operator layout
            sum                               whole gradient over tp, per tensor, before anything else
            reduce                            gradient of one microbatch -> accumulator
            finish                            accumulator -> optimizer layout
            publish                           optimizer layout -> stored, after the update
            tied                              sum over the pipeline stages that hold a copy (axis pp, a group of two stages)
    times   once per micro-batch or once per step
    dtype   of the buffer: the parameter's, or that of gradient reduction
    """

    kind: CollectiveKind
    axes: frozenset[str]
    what: What
    times: Times
    dtype: Literal["parameter", "gradient"]


def shard_axes(axes: frozenset[str]) -> frozenset[str]:
    """Return the axes over which ZeRO shards a parameter, of those on which its gradient is partial.

    Over the others, replicas and tensor parallelism, the gradient of a shard is all-reduced.
    """
    return axes - _UNSHARDED_AXES


def parameter_events(
    parameter: ParameterLayout,
    *,
    zero: int,
    stores_shards_zero2: bool,
    reduces_each_microbatch: bool,
    keeps_gathered: bool,
    is_wanted_at_once: bool = False,
    reduces_tp_first: bool = False,
    tied_across_stages: bool = False,
) -> tuple[ParameterEvent, ...]:
    """Return the events of one parameter under ZeRO stage `zero`, in the order of a step.

    stores_shards_zero2      ZeRO-2 stores shards and gathers them for forward, instead of full copies published once a step
    reduces_each_microbatch  gradients go to their accumulator after each microbatch, instead of once a step
    keeps_gathered           gathered once a step, for all microbatches (pipelines)
    is_wanted_at_once        its unit holds the last region, whose backward directly follows its forward: not freed in between
    reduces_tp_first         with sharded storage, a gradient that is partial over tp is all-reduced over tp before it is scattered
    tied_across_stages       stored on the first and on the last pipeline stage: summed over both (R18)
    """
    if zero not in ZERO_STAGES:
        raise InputError(f"zero={zero}: must be a ZeRO stage; use 0, 1, 2 or 3")
    cut = shard_axes(parameter.gradient_axes) if zero else frozenset[str]()
    stores_shards = zero == 3 or (zero == 2 and stores_shards_zero2)
    first = parameter.gradient_axes & TENSOR_AXES if reduces_tp_first and stores_shards else frozenset[str]()
    rest = parameter.gradient_axes - cut - first
    reduction_times: Times = "microbatch" if reduces_each_microbatch else "step"
    reduction: What = "reduce" if reduces_each_microbatch else "finish"
    due: list[tuple[CollectiveKind, frozenset[str], What, Times]] = []
    if stores_shards:
        due.append((CollectiveKind.ALL_GATHER, cut, "gather_forward", "step" if keeps_gathered else "microbatch"))
    if zero == 3 and not keeps_gathered and not is_wanted_at_once and parameter.runs_backward:
        due.append((CollectiveKind.ALL_GATHER, cut, "gather_backward", "microbatch"))
    if not parameter.is_frozen:  # else there is no gradient to reduce, and nothing new to publish
        due.append((CollectiveKind.ALL_REDUCE, first, "sum", reduction_times))
        if zero >= 2:
            due.append((CollectiveKind.REDUCE_SCATTER, cut, reduction, reduction_times))
        elif zero == 1:
            due.append((CollectiveKind.REDUCE_SCATTER, cut, "finish", "step"))
        due.append((CollectiveKind.ALL_REDUCE, rest, *((reduction, reduction_times) if zero == 0 else ("finish", "step"))))
        if tied_across_stages and len(parameter.regions) > 1:
            due.append((CollectiveKind.ALL_REDUCE, frozenset(("pp",)), "tied", "step"))
        if zero and not stores_shards:
            due.append((CollectiveKind.ALL_GATHER, cut, "publish", "step"))
    events = []
    for kind, axes, what, times in due:
        if axes:
            # a gradient that has not been accumulated is still in the dtype in which it was computed, the weight's
            as_computed = kind is CollectiveKind.ALL_GATHER or (what == "sum" and times == "microbatch")
            events.append(ParameterEvent(kind=kind, axes=axes, what=what, times=times, dtype="parameter" if as_computed else "gradient"))
    return tuple(events)


def with_gathered_bias_gradients(parameters: Iterable[ParameterLayout]) -> tuple[ParameterLayout, ...]:
    """Return the parameters with biases that take the gathered gradient of a summed output: not partial over the axes of the sum."""
    return tuple(replace(parameter, gradient_axes=parameter.gradient_axes - parameter.sum_axes) for parameter in parameters)


def is_one_end_unit(parameters: Iterable[ParameterLayout], *, zero: int, pipelined: bool) -> bool:
    """Return whether the first and the last region form one unit.

    Where ZeRO shards weights, a matrix that both use on one stage belongs to one unit.
    """
    return zero >= 2 and not pipelined and any(parameter.is_end and len(parameter.regions) > 1 for parameter in parameters)


def stored_rows(rows: Column, zero_size: Column) -> Any:
    """Return the rows of the stored matrix on one chip, of the `rows` in its tensor-parallel shard. [-]

    ceil(rows / n): each matrix is padded to a multiple of n rows; the padded matrix is gathered and scattered.
    """
    return np.ceil(rows / zero_size)
