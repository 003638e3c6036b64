"""Layouts of one operator, and what may not be asked for. Redistributions are executed in tests/oracles."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import (
    Layout,
    check_sharding,
    gradient_layout,
    input_layout,
    join_gradients,
    output_layout,
    redistribute,
    sliced_towards,
)
from tests.parallel.small_graphs import operator

LINEAR = operator("y[b,s,f] = x[b,s,h] * w[f,h]")
MEGATRON_COLUMN = {"b": ("dp_shard",), "f": ("tp_kv", "tp_q")}
MEGATRON_ROW = {"b": ("dp_shard",), "h": ("tp_kv", "tp_q")}


def layout(*cuts: str, partial: str = "") -> Layout:
    return Layout(cuts=tuple(tuple(cut.split()) for cut in cuts), partial=frozenset(partial.split()))


def test_column_parallel_linear():
    x, w = LINEAR.inputs
    assert input_layout(MEGATRON_COLUMN, x) == layout("dp_shard", "", "")
    assert output_layout(LINEAR, MEGATRON_COLUMN) == layout("dp_shard", "", "tp_kv tp_q")
    assert gradient_layout(MEGATRON_COLUMN, x) == layout("dp_shard", "", "", partial="tp_kv tp_q")
    assert gradient_layout(MEGATRON_COLUMN, w) == layout("tp_kv tp_q", "", partial="dp_shard")


def test_row_parallel_linear():
    x, w = LINEAR.inputs
    assert output_layout(LINEAR, MEGATRON_ROW) == layout("dp_shard", "", "", partial="tp_kv tp_q")
    assert gradient_layout(MEGATRON_ROW, x) == layout("dp_shard", "", "tp_kv tp_q")
    assert gradient_layout(MEGATRON_ROW, w) == layout("", "tp_kv tp_q", partial="dp_shard")


def test_replicated_compute_leaves_whole_gradients():
    """An axis that the operator does not use needs no reduction."""
    for operand in LINEAR.inputs:
        assert gradient_layout({}, operand).partial == frozenset()


def test_data_axes_of_a_weight_are_found():
    sharding = {"b": ("dp_replicate", "dp_shard"), "s": ("cp",)}
    assert gradient_layout(sharding, LINEAR.inputs[1]).partial == {"dp_replicate", "dp_shard", "cp"}


def test_an_addition_takes_what_it_is_cut_as():
    add = operator("y[s,h] = a[s,h] + c[s,h]")
    assert add.is_linear
    assert output_layout(add, {"s": ("tp_kv",)}) == layout("tp_kv", "")
    assert not LINEAR.is_linear


@pytest.mark.parametrize(
    ("op", "sharding", "words"),
    [
        (LINEAR, {"b": ("cp",), "s": ("cp",)}, "axis cp cuts both b and s"),
        (LINEAR, {"b": ("cp", "cp")}, "axis cp cuts both b and b"),
        (LINEAR, {"z": ("cp",)}, "no dim 'z'"),
        (LINEAR, {"b": ("tp",)}, "not a fine axis"),
        (LINEAR, {"b": ("pp",)}, "not a fine axis"),
        (operator("p[q,z] = scores[q,z]", unsplit="z"), {"z": ("cp",)}, "dim z is cut by cp"),
        (operator("o[q,d] = q[q,d], k[z,d], v[z,d]", unsplit="z"), {"z": ("cp",)}, "dim z is cut by cp"),
        (operator("s[q,z] = q[q,d] * k[z,d]", unsplit="d"), {"d": ("tp_kv",)}, "dim d is cut by tp_kv"),
    ],
)
def test_what_may_not_be_cut(op, sharding, words):
    with pytest.raises(InputError, match=words):
        check_sharding(op, sharding)


def test_softmax_over_uncut_keys_is_fine():
    check_sharding(operator("p[q,z] = scores[q,z]", unsplit="z"), {"q": ("cp",)})


def test_nothing_becomes_partial_by_communication():
    with pytest.raises(AssertionError):
        redistribute(layout(""), layout("", partial="cp"))


def test_equal_layouts_send_nothing():
    for one in (layout(""), layout("cp tp_kv", "tp_q"), layout("cp", partial="tp_kv")):
        assert redistribute(one, one) == ()


def test_grouped_query_gradients_are_promoted_and_joined():
    """q's gradient is partial on both halves of tp, k's and v's on one: one reduction, not two."""
    q, k = layout("", partial="tp_kv tp_q"), layout("", partial="tp_kv")
    assert join_gradients([q, k, k]) == [q]
    assert join_gradients([k, q]) == [q]
    assert join_gradients([layout("", partial="tp_kv"), layout("", partial="tp_q")]) == [q]


def test_gradients_cut_otherwise_stay_apart_unpromoted():
    """A whole gradient that cannot join a partial one is not made partial for nothing."""
    complete, partial = layout("", ""), layout("cp", "", partial="tp_kv")
    assert join_gradients([complete, partial]) == [complete, partial]


def test_slices_come_first():
    assert sliced_towards(layout("", ""), layout("cp tp_kv", "tp_q")) == layout("cp tp_kv", "tp_q")
    assert sliced_towards(layout("cp"), layout("cp tp_kv")) == layout("cp tp_kv")
    assert sliced_towards(layout("tp_kv"), layout("cp tp_kv")) == layout("tp_kv"), "an outer cut is no slice"
    assert sliced_towards(layout("", partial="cp"), layout("cp tp_kv")) == layout("", partial="cp"), "cp is scattered, then tp cut inside"
    assert sliced_towards(layout("", "cp"), layout("cp", "")) == layout("", "cp"), "an axis on another position moves"


def test_a_layout_reads_well():
    assert str(layout("cp tp_kv", "", partial="tp_q")) == "[cp*tp_kv, -] partial(tp_q)"
