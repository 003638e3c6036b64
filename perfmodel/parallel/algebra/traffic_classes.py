"""Classes of collectives of activations, by the mesh axes of their group."""

from __future__ import annotations

from perfmodel.parallel.algebra.sharding import TENSOR_AXES

#: Communication of activations. Two tensor-parallel collectives of backward have their own class, because an independent matrix product
#: can overlap with them: the all-gather of a saved input (with the input's gradient), and the reduction of an input's gradient (with the
#: weight's gradient).
COMM = ("tensor_parallel", "context_parallel", "regather", "input_gradient", "expert_parallel")
#: Classes that are parts of a step; the other two are included in one of them.
SHOWN_COMM = ("tensor_parallel", "context_parallel", "expert_parallel")
#: The class that can overlap with the passes of another micro-batch, since no product of its own overlaps with it.
EXCHANGED = SHOWN_COMM[-1]
#: Axis between ranks with different sequences: only the traffic of experts crosses it.
_SEQUENCES_APART = frozenset(("dp_ep",))


def comm_class(axes: frozenset[str]) -> str:
    """Return the class of a collective: expert-parallel between sequences, tensor-parallel with any tp axis, else context-parallel."""

    if axes & _SEQUENCES_APART:
        return "expert_parallel"
    return "tensor_parallel" if axes & TENSOR_AXES else "context_parallel"
