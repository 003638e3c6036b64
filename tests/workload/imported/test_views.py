"""Dims followed through reshapes, against index arithmetic on real arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.input_spec import InputSpec, parse_inputs
from perfmodel.workload.imported.views import Stride, expanded, identity_view, permuted, reshaped

SIZES = {"a": 4, "b": 6, "c": 8}
FACTORINGS = [(4, 6, 8), (24, 8), (2, 2, 6, 8), (4, 48), (8, 24), (4, 3, 2, 2, 4), (192,), (1, 4, 6, 1, 8), (12, 16), (4, 6, 2, 4)]


def index_of(dim, view, shape):
    """Return the index of a dim at every entry of the view, from the runs."""
    total = np.zeros(shape, dtype=np.int64)
    for axis, position in enumerate(view):
        rest = np.arange(shape[axis])
        for run in reversed(position):
            if run.dim == dim:
                part = (rest % run.size) * run.inner
                total = total + part.reshape([-1 if index == axis else 1 for index in range(len(shape))])
            rest = rest // run.size
    return total


@given(st.lists(st.tuples(st.sampled_from(FACTORINGS), st.randoms(use_true_random=False)), min_size=1, max_size=4))
def test_runs_say_where_each_entry_comes_from(steps):
    shape = tuple(SIZES.values())
    arrays = {dim: np.broadcast_to(np.arange(SIZES[dim]).reshape([-1 if d == dim else 1 for d in SIZES]), shape) for dim in SIZES}
    view = identity_view(shape, tuple(SIZES))
    for target, random in steps:
        view, arrays = reshaped(view, target), {dim: array.reshape(target) for dim, array in arrays.items()}
        order = random.sample(range(len(target)), len(target))
        view, arrays = permuted(view, order), {dim: array.transpose(order) for dim, array in arrays.items()}
    assert tuple(int(np.prod([run.size for run in position])) for position in view) == arrays["a"].shape
    if all(run.dim for position in view for run in position):  # not lost
        for dim, array in arrays.items():
            assert (index_of(dim, view, array.shape) == array).all()


def test_there_and_back_is_the_same_view():
    view = identity_view((4, 6, 8), ("a", "b", "c"))
    assert reshaped(reshaped(view, (2, 2, 48)), (4, 6, 8)) == view
    assert reshaped(view, (24, 8))[0] == (Stride(dim="a", size=4, inner=1), Stride(dim="b", size=6, inner=1))
    assert reshaped(view, (2, 2, 6, 8))[:2] == ((Stride(dim="a", size=2, inner=2),), (Stride(dim="a", size=2, inner=1),))


def test_sizes_that_do_not_cut_evenly_lose_the_dims():
    assert {run.dim for position in reshaped(identity_view((4, 6), ("a", "b")), (3, 8)) for run in position} == {""}


def test_an_expanded_position_is_nobodys():
    assert expanded(identity_view((1, 8), ("a", "c")), (5, 3, 8)) == (
        (Stride(dim="", size=5, inner=1),),
        (Stride(dim="", size=3, inner=1),),
        (Stride(dim="c", size=8, inner=1),),
    )


def test_inputs_are_read_with_and_without_names():
    assert parse_inputs(["float32[ 2 , 3 ] tokens = int64[4]; mask=bool[]", "y=bf16[1]"]) == (
        InputSpec(name="", dtype="float32", shape=(2, 3)),
        InputSpec(name="tokens", dtype="int64", shape=(4,)),
        InputSpec(name="mask", dtype="bool", shape=()),
        InputSpec(name="y", dtype="bfloat16", shape=(1,)),
    )


BAD_INPUTS = [
    "x", "x=", "[2]", "x=float32", "x=float32[2", "x=float32[2]]", "x=float32[a]", "x=float32[-1]", "x=float32[2,]", "x=float32[2.5]",
    "x=no[2]", "x=float32[2] x=float32[2]", "x=float32[2] float32[2]", "x=float32[99999999999,99999999999]", "1x=float32[2]",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_INPUTS)
def test_bad_inputs_are_one_sentence(text):
    with pytest.raises(InputError, match=r"inputs=.*:"):
        parse_inputs([text])
