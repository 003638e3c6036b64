"""Memory of a collective library's communicators: buffers of each process group, which no framework's allocator counts.

NCCL allocates a communicator's buffers at its first collective. They grow with the number of its channels, which follows from the
bandwidth of the links that it fills, and hardly with the number of ranks.

Source: NVIDIA/nccl issues 864 and 986 (memory is linear in channels and communicators; ring connections do not grow with ranks),
src/graph/connect.cc (channels).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.foundation.columns import Column
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.parallel.grid import LayoutGrid

#: Axes with a process group each, and the parts that make the group's members. The group exists if the axis's degree exceeds 1.
_GROUPS = {
    "dp_replicate": AXIS_PARTS["dp_replicate"],
    "dp_shard": (*AXIS_PARTS["dp_shard"], "dp_ep"),
    "cp": (*AXIS_PARTS["cp"], "cp_ep"),
    "tp": (*AXIS_PARTS["tp"], "tp_kv_ep", "tp_q_ep"),
}


def communicator_bytes(machine: Machine, grid: LayoutGrid) -> Any:
    """Return the buffers of all communicators of a chip, for each layout. [byte]

    There is one communicator for each mesh axis with more than one rank, one for experts and one for the replicas of experts. With several
    communicators there is also one of all ranks (gradient norm, barriers). Communicators inside a node have the channels of its links.
    """
    total: Column = 0.0
    largest: Column = 0.0
    count: Column = 0.0
    others = grid.fine.keys() - chain(*_GROUPS.values())
    for axis, parts in _GROUPS.items():
        # axes that are not named count as data-parallel
        buffers = _buffers(machine, np.greater(grid.group_inside((*parts, *others) if axis == "dp_replicate" else parts), 1.0))
        is_used = np.minimum(grid.degree[axis] - 1.0, 1.0)
        total, largest, count = total + is_used * buffers, np.maximum(largest, is_used * buffers), count + is_used
    is_pipelined = np.minimum(grid.degree["pp"] - 1.0, 1.0)
    sends = is_pipelined * _buffers(machine, np.greater_equal(grid.hop, 2.0))
    total, largest, count = total + sends, np.maximum(largest, sends), count + is_pipelined
    if not grid.fine.keys().isdisjoint(EXPERT_AXES):
        has_groups = np.minimum(grid.size(EXPERT_AXES) - 1.0, 1.0)
        total = total + has_groups * (2.0 * _buffers(machine, np.greater(grid.group_inside(EXPERT_AXES), 1.0)))
    return total + np.minimum(np.maximum(count - 1.0, 0.0), 1.0) * largest


def world_communicator_bytes(machine: Machine, num_chips: int) -> float:
    """Return the buffers of the one communicator of all ranks. [byte]"""
    for num_bytes, size in zip(machine.memory.communicator_bytes, machine.tier_sizes, strict=True):
        if min(size, num_chips) > 1:
            return num_bytes
    return 0.0


def _buffers(machine: Machine, is_inside: NDArray[np.bool_]) -> Any:
    """Return the buffers of one communicator, by the innermost tier inside which it has several ranks. [byte]"""
    if not machine.memory.communicator_bytes:
        return 0.0
    buffers: Column = machine.memory.communicator_bytes[-1]
    for num_bytes, inside in reversed(list(zip(machine.memory.communicator_bytes, is_inside, strict=True))):
        buffers = np.where(inside, num_bytes, buffers)
    return buffers
