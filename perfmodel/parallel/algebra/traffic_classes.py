"""Classes of collectives of activations, by the mesh axes of their group."""

from __future__ import annotations

from perfmodel.parallel.algebra.sharding import TENSOR_AXES

#: Communication of activations. Tensor-parallel collectives of backward that have a matrix product beside them on which nothing waits
#: are kept apart: gathering a saved input again (the input's gradient is computed meanwhile) and reducing an input's gradient (the
#: weight's gradient is).
COMM = ("tensor_parallel", "context_parallel", "regather", "input_gradient", "expert_parallel")
#: Those that a step's parts name; of the others one is part.
SHOWN_COMM = ("tensor_parallel", "context_parallel", "expert_parallel")
#: What can travel beside the passes of another microbatch, since no product of its own is beside it.
EXCHANGED = SHOWN_COMM[-1]
#: Between ranks that see different sequences only what experts send goes.
_SEQUENCES_APART = frozenset(("dp_ep",))


def comm_class(axes: frozenset[str]) -> str:
    """Class of a collective: tensor-parallel with any tp axis, expert-parallel where it leaves a sequence, else context-parallel."""
    if axes & _SEQUENCES_APART:
        return "expert_parallel"
    return "tensor_parallel" if axes & TENSOR_AXES else "context_parallel"
