"""Events of one parameter: which collectives, on which axes, how often."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile, profile_events
from perfmodel.parallel.algebra.derive import Amount, ParameterLayout
from perfmodel.parallel.algebra.parameters import parameter_events, shard_axes, stored_rows, with_gathered_bias_gradients


def parameter(gradient_axes: str = "dp_replicate dp_shard cp", regions: tuple[str, ...] = ("layer",)) -> ParameterLayout:
    return ParameterLayout(
        name="w",
        num_rows=1024,
        num_columns=4096,
        row_axes=frozenset(("tp_kv",)),
        column_axes=frozenset(),
        gradient_axes=frozenset(gradient_axes.split()),
        sum_axes=frozenset(),
        regions=regions,
        elements=Amount(base=1024.0 * 4096, axes=frozenset(("tp_kv",))),
    )


def events(one: ParameterLayout, zero: int, **changes) -> list[tuple[str, str, str, str]]:
    settings = {"stores_shards_zero2": False, "reduces_each_microbatch": False, "keeps_gathered": False}
    layout_events = parameter_events(one, zero=zero, **{**settings, **changes})
    return [(str(e.kind), " ".join(sorted(e.axes)), e.what, e.times) for e in layout_events]


SHARD = "cp dp_shard"
GATHER = ("all_gather", SHARD, "gather_forward", "microbatch")
GATHER_AGAIN = ("all_gather", SHARD, "gather_backward", "microbatch")
SCATTER_EACH = ("reduce_scatter", SHARD, "reduce", "microbatch")
SCATTER_ONCE = ("reduce_scatter", SHARD, "finish", "step")
REST = ("all_reduce", "dp_replicate", "finish", "step")
PUBLISH = ("all_gather", SHARD, "publish", "step")


@pytest.mark.parametrize(
    ("zero", "settings", "expected"),
    [
        (0, {}, [("all_reduce", "cp dp_replicate dp_shard", "finish", "step")]),
        (0, {"reduces_each_microbatch": True}, [("all_reduce", "cp dp_replicate dp_shard", "reduce", "microbatch")]),
        (1, {}, [SCATTER_ONCE, REST, PUBLISH]),
        (1, {"reduces_each_microbatch": True}, [SCATTER_ONCE, REST, PUBLISH]),
        (2, {}, [SCATTER_ONCE, REST, PUBLISH]),
        (2, {"reduces_each_microbatch": True}, [SCATTER_EACH, REST, PUBLISH]),
        (2, {"stores_shards_zero2": True, "reduces_each_microbatch": True}, [GATHER, SCATTER_EACH, REST]),
        (3, {"reduces_each_microbatch": True}, [GATHER, GATHER_AGAIN, SCATTER_EACH, REST]),
        (3, {}, [GATHER, GATHER_AGAIN, SCATTER_ONCE, REST]),
        (3, {"keeps_gathered": True}, [(*GATHER[:3], "step"), SCATTER_ONCE, REST]),
        (2, {"keeps_gathered": True, "stores_shards_zero2": True}, [(*GATHER[:3], "step"), SCATTER_ONCE, REST]),
    ],
    ids=str,
)
def test_events(zero, settings, expected):
    assert events(parameter(), zero, **settings) == expected


@pytest.mark.parametrize(("pipelined", "zero", "times"), [(True, 0, "microbatch"), (False, 0, "step"), (True, 1, "step")])
def test_nanotron_reduces_whole_gradients_of_a_pipeline_every_microbatch(pipelined, zero, times):
    reductions = profile_events(parameter(), load_profile("nanotron"), zero=zero, pipelined=pipelined, joins_ends=False)
    assert reductions[0].times == times


def test_zero_cuts_only_where_the_gradient_is_partial():
    """An expert's or a one-weird-trick weight that dp_shard already cuts is not cut again."""
    assert shard_axes(parameter("dp_replicate cp").gradient_axes) == {"cp"}
    assert events(parameter("dp_replicate"), 3) == [REST]
    assert events(parameter(""), 3) == []


def test_a_norm_weight_under_sequence_parallelism_is_reduced_over_tp_too():
    """Scattered over the data axes, then one all-reduce of the shard over dp_replicate and tp."""
    reductions = events(parameter("dp_replicate dp_shard cp tp_kv tp_q"), 3, reduces_each_microbatch=True)
    assert reductions[-1] == ("all_reduce", "dp_replicate tp_kv tp_q", "finish", "step")


def test_where_shards_are_stored_a_gradient_may_be_summed_over_tp_before_it_is_scattered():
    """torch: each norm weight by itself, whole, as often as the data axes reduce. Full copies reduce their shard as ever."""
    norm = parameter("dp_replicate dp_shard cp tp_kv tp_q")
    first = ("all_reduce", "tp_kv tp_q", "sum", "microbatch")
    settings = {"reduces_tp_first": True, "reduces_each_microbatch": True}
    assert events(norm, 3, **settings) == [GATHER, GATHER_AGAIN, first, SCATTER_EACH, REST]
    assert events(norm, 3, **settings | {"reduces_each_microbatch": False})[2] == (*first[:3], "step")
    assert events(norm, 2, **settings)[-2] == ("all_reduce", "dp_replicate tp_kv tp_q", "finish", "step")
    assert events(parameter(), 3, **settings) == events(parameter(), 3, reduces_each_microbatch=True)


@pytest.mark.parametrize("reduces_each, dtype", [(True, "parameter"), (False, "gradient")])
def test_what_is_summed_at_once_is_still_in_the_dtype_of_the_weight(reduces_each, dtype):
    gradient_events = parameter_events(
        parameter("dp_shard tp_kv"),
        zero=3,
        stores_shards_zero2=True,
        reduces_each_microbatch=reduces_each,
        keeps_gathered=not reduces_each,
        reduces_tp_first=True,
    )
    assert [event.dtype for event in gradient_events if event.what == "sum"] == [dtype]


def test_a_bias_may_take_the_gathered_gradient():
    """Then its gradient is partial over no axis over which the product was summed; other parameters stay as they are."""
    bias = replace(parameter("dp_shard tp_kv tp_q"), sum_axes=frozenset(("tp_kv", "tp_q")))
    assert with_gathered_bias_gradients((bias, parameter())) == (replace(bias, gradient_axes=frozenset(("dp_shard",))), parameter())


def test_tied_across_stages():
    tied = parameter(regions=("embedding", "head"))
    assert ("all_reduce", "pp", "tied", "step") not in events(tied, 0)
    assert events(tied, 1, tied_across_stages=True) == [SCATTER_ONCE, REST, ("all_reduce", "pp", "tied", "step"), PUBLISH]
    assert events(parameter(), 1, tied_across_stages=True) == [SCATTER_ONCE, REST, PUBLISH]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gathers_carry_parameters_and_reductions_gradients(zero):
    for event in parameter_events(parameter(), zero=zero, stores_shards_zero2=True, reduces_each_microbatch=True, keeps_gathered=False):
        assert event.dtype == ("parameter" if event.kind == "all_gather" else "gradient")


@pytest.mark.parametrize("zero", [-1, 4])
def test_other_stages_are_refused(zero):
    with pytest.raises(InputError, match=f"zero={zero}"):
        events(parameter(), zero)


def test_rows_are_padded_to_whole_shards():
    assert stored_rows(1024, 64) == 16
    assert stored_rows(1024, 4096) == 1
    assert stored_rows(128256, 4096) == 32
    assert stored_rows(np.array([8.0, 65.0]), np.array([1.0, 64.0])).tolist() == [8.0, 2.0]
