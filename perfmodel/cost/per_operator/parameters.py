"""Parameters of networks on columns: time of their collectives and of the optimizer step, and the memory that they hold.

Events, elements and bytes are those of any plan (`parallel/algebra/parameters.py`, `cost/parameters.py`). A search adds operators one by
one. Each tensor therefore has a unit of its own, with its share of the collective of its layer or bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.cost.memory.chip import held_bytes
from perfmodel.cost.parameters import compile_parameters, parameter_cost
from perfmodel.cost.per_operator.operators import StepSetting
from perfmodel.cost.update import accumulation_time, optimizer_time, parameter_terms
from perfmodel.parallel.algebra.derive import ParameterLayout
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.workload.graph import Region

Array = NDArray[np.float64]

#: One region that contains all parameters.
_ALL = Region(name="all")
#: Elements of an optimizer step over many parameters at once: beyond all caches, without a kernel's floor.
_MANY = 1e10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterTimes:
    """Columns of parameters, as means over micro-batches.

    reductions, gathers   collectives that may overlap with compute, at full length                [s]
    published             collectives that do not overlap                                          [s]
    optimizer             optimizer step and gradient accumulation                                 [s]
    held_bytes            weights, gradients and optimizer state                                   [byte]
    """

    reductions: Array
    gathers: Array
    published: Array
    optimizer: Array
    held_bytes: Array


def parameter_times(
    parameters: Sequence[ParameterLayout], shares: Sequence[float], setting: StepSetting, machine: Machine, grid: LayoutGrid
) -> ParameterTimes:
    """Return the times of all parameters together, on each column.

    shares   elements that one collective gathers or reduces, over those of each parameter (`parameter_share`)
    """
    if not parameters:
        none = np.zeros(grid.num_rows)
        return ParameterTimes(reductions=none, gathers=none, published=none, optimizer=none, held_bytes=none)
    program = compile_parameters(
        tuple(replace(parameter, regions=(_ALL.name,)) for parameter in parameters),
        (_ALL,),
        setting.profile,
        zero=setting.zero,
        pipelined=False,
        parameter_bytes=setting.sizes.gathered,
        gradient_bytes=setting.sizes.gradient.reduced,
        shares=tuple(shares),
    )
    sizes, m = setting.sizes, float(setting.num_microbatches)
    cost = parameter_cost(program, setting.profile, machine, grid)
    terms = parameter_terms(program, cost)

    def of(times: Mapping[str, Sequence[Array]]) -> Array:
        return np.asarray(sum(times["microbatch"]) + sum(times["step"]) / m)

    full, shard = sum(terms.full), sum(terms.shard)
    updated = shard if setting.zero else full
    step = updated * (optimizer_time(_MANY, sizes.optimizer, machine) / _MANY)
    step = step + accumulation_time(
        full, sizes, machine, num_microbatches=m, holds_sharded_weights=program.holds_sharded_weights, is_reduced=1.0
    )
    weights, gradients, state, _ = held_bytes(program, sizes, full=full, shard=shard, states=updated, copy=0.0)
    if program.holds_sharded_weights:
        gradients = shard * sizes.gradient.sharded  # they are produced one by one: all are live when backward ends
    for parameter, elements in zip(program.parameters, cost.elements, strict=True):
        gradients = gradients + np.minimum(grid.size(parameter.gradient_axes) - 1.0, 1.0) * (sizes.gradient.copy * elements)
    return ParameterTimes(
        reductions=of(terms.reduce),
        gathers=of(terms.gather_forward) + of(terms.gather_backward),
        published=setting.profile.timing.publish_factor * sum(terms.publish) / m,
        optimizer=step / m,
        held_bytes=weights + gradients + state,
    )
