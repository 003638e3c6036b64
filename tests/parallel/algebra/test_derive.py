"""Sharded graphs: what is refused, how buffers are counted, where parameters lie."""

from dataclasses import replace

import pytest

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.derive import amount_of, derive
from perfmodel.parallel.algebra.rules import RuleSet, apply_rules, load_rule_set
from perfmodel.parallel.algebra.sharding import Held
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass
from tests.laws.volumes import amount_bytes, derivation_of
from tests.parallel.small_graphs import SIZE, operator, small_graph

MADE = operator("a[b,f] = x[b,h] * w[f,h]")
READ = operator("y[b,f] = a[b,f]")


def llama(rules: dict[str, tuple[str, ...]]):
    graph = build_graph(load_model("llama-3-8b"), seq_len=1024, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    return derive(graph, apply_rules(graph, RuleSet(name="mine", rules=rules, source="")))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_every_operator_needs_a_sharding():
    with pytest.raises(InputError, match="operator y: has no sharding"):
        derive(small_graph(MADE, READ), {"a": {}})


@pytest.mark.parametrize(
    ("sharding", "words"),
    [({"b": ("cp",), "f": ("cp",)}, "axis cp cuts both"), ({"z": ("cp",)}, "no dim"), ({"b": ("data",)}, "not a fine axis")],
)
def test_shardings_are_checked_whoever_makes_them(sharding, words):
    with pytest.raises(InputError, match=words):
        derive(small_graph(MADE, READ), {"a": sharding, "y": {}})


def test_a_parameter_has_one_layout():
    again = operator("y[b,g] = a[b,f] * w[f,g]")
    with pytest.raises(InputError, match="parameter w: a and y need it in 2 layouts; cut f alike, by one rule"):
        derive(small_graph(MADE, again), {"a": {"f": ("tp_kv",)}, "y": {}})


def test_a_parameter_is_read():
    graph = small_graph(MADE)
    spare = replace(graph.tensors["w"], name="spare")
    with pytest.raises(InputError, match="parameter spare: no operator reads it"):
        derive(replace(graph, tensors={**graph.tensors, "spare": spare}), {"a": {}})


def test_layers_follow_one_another_as_they_follow_the_embedding():
    """An edge between regions is where layers meet: its traffic would be counted wrong, so its layout may not change."""
    first = replace(MADE, layer="embedding")
    with pytest.raises(InputError, match=r"layer boundary: .* must be one layout"):
        derive(small_graph(first, READ), {"a": {}, "y": {"b": ("cp",)}})
    assert derive(small_graph(first, READ), {"a": {"b": ("cp",)}, "y": {"b": ("cp",)}}).traffic == ()


def test_copies_of_keys_are_cut_as_they_are_read():
    rules = load_rule_set("megatron").rules
    for name in ("kv_copies", "attn_q_per_kv"):
        with pytest.raises(InputError, match=r"copies \(kv_copies\) must be cut as they are read"):
            llama({key: axes for key, axes in rules.items() if key != name})


# --- amounts --------------------------------------------------------------------------------------------------------


def test_local_amounts_divide_by_the_axes_of_their_dims():
    amount = amount_of(MADE, {"b": ("dp_shard",), "h": ("tp_kv",)}, ("b", "f"), scale=2.0)
    assert (amount.base, amount.axes) == (2.0 * SIZE * SIZE, {"dp_shard"})
    assert amount.scaled(3.0).base == 3 * amount.base


def test_vocabulary_is_padded_up():
    """50257 over 4 chips is 12565 on each."""
    derivation = derivation_of("gpt2", "megatron")
    table = next(p for p in derivation.parameters if p.name == "embedding.weight")
    assert table.num_rows == 50257
    head = next(op for op in derivation.graph.operators if op.name == "lm_head")
    logits = amount_of(head, derivation.shardings["lm_head"], ("b", "s", "v"))
    assert amount_bytes(logits, {"tp_kv": 4}, micro_batch=2) == 2 * 2048 * 12565


def test_a_padded_dim_that_moves_is_counted_at_one_position():
    """vocabulary cut -> sequence cut: the local buffer leaves as made, ceil(v / n) columns wide."""
    v_cut = replace(MADE, dims={**MADE.dims, "f": 5}, roles=replace(MADE.roles, padded=("f",)))
    read = replace(READ, dims={**READ.dims, "f": 5})
    derivation = derive(small_graph(v_cut, read), {"a": {"f": ("tp_kv",)}, "y": {"b": ("tp_kv",)}})
    (exchange,) = (t for t in derivation.traffic if t.phase is Pass.FORWARD)
    assert exchange.kind is CollectiveKind.ALL_TO_ALL
    assert amount_bytes(exchange.amount, {"tp_kv": 4}) == 2.0 * SIZE * 2


def test_microbatches_scale_activations_and_not_weights():
    derivation = derivation_of("llama-3-8b", "megatron-sp")
    for traffic in derivation.traffic:
        assert traffic.amount.batch_dim
        assert amount_bytes(traffic.amount, {"tp_kv": 8}, micro_batch=3) == 3 * amount_bytes(traffic.amount, {"tp_kv": 8})


def test_all_to_all_counts_the_local_buffer_and_gathers_the_whole():
    exchanged = derive(small_graph(MADE, READ), {"a": {"f": ("tp_kv",)}, "y": {"b": ("tp_kv",)}})
    gathered = derive(small_graph(MADE, READ), {"a": {"f": ("tp_kv",)}, "y": {}})
    assert [(t.kind, t.amount.axes) for t in exchanged.traffic] == [(CollectiveKind.ALL_TO_ALL, {"tp_kv"})] * 2
    assert [(t.kind, t.amount.axes) for t in gathered.traffic] == [(CollectiveKind.ALL_GATHER, frozenset())]


# --- parameters and records -------------------------------------------------------------------------------------------


def test_stored_rows_and_columns_of_a_layer():
    """Dim 0 of the stored matrix is what leads: heads and head dim for q, hidden for o."""
    parameters = {p.name: p for p in derivation_of("llama-3-8b", "megatron").parameters}
    shapes = {name: (p.num_rows, p.num_columns) for name, p in parameters.items()}
    assert shapes["q_proj.weight"] == (4096, 4096)
    assert shapes["k_proj.weight"] == (1024, 4096)
    assert shapes["o_proj.weight"] == (4096, 4096)
    assert shapes["down_proj.weight"] == (4096, 14336)
    assert shapes["mlp_norm.weight"] == (4096, 1)
    assert parameters["o_proj.weight"].column_axes == {"tp_kv", "tp_q"}
    assert parameters["o_proj.weight"].row_axes == frozenset()
    assert parameters["q_proj.weight"].num_elements == 4096 * 4096


def test_derivation_names_the_layouts_it_found():
    derivation = derive(small_graph(MADE, READ), {"a": {"h": ("tp_kv",)}, "y": {"b": ("cp",)}})
    assert str(derivation.left["a"]) == "[-, -] partial(tp_kv)"
    assert str(derivation.needed["y", 0]) == "[cp, -]"
    assert derivation.needed["y", 0].partial == frozenset()


def test_no_operator_that_is_not_linear_ever_receives_a_partial_sum():
    for rules in ("megatron", "megatron-sp", "ulysses"):
        assert all(layout.partial == frozenset() for layout in derivation_of("gpt2", rules, dropout=True).needed.values())


def test_one_dim_of_an_operator_may_be_padded():
    with pytest.raises(InputError, match="at most one may be padded"):
        derive(small_graph(replace(MADE, roles=replace(MADE.roles, padded=("b", "f"))), READ), {"a": {}, "y": {}})


# --- a plan's own word ----------------------------------------------------------------------------------------------


def test_a_held_tensor_goes_by_way_of_its_layout_and_every_reader_from_there():
    """a is left partial over p and q; held on b -> p; the first reader takes it so, the second wants f -> p."""
    first, second = operator("y[b,f] = a[b,f]"), operator("z[b,g] = a[b,f] * v[f,g]")
    graph = replace(small_graph(MADE, first, second), repeats=())
    shardings = {"a": {"h": ("p", "q")}, "y": {"b": ("p",)}, "z": {"f": ("p",), "g": ("q",)}}
    held = {"a": Held(cuts=(("p",), ()), partial=frozenset("q"))}
    derivation = derive(graph, shardings, held=held, axes=("p", "q"))
    moved = [(str(t.phase), str(t.kind), "".join(sorted(t.axes)), t.operator) for t in derivation.traffic]
    assert sorted(moved) == [
        ("backward", "all_gather", "p", "a"),  # the sum, to where a was left: whole
        ("backward", "all_reduce", "q", "a"),
        ("backward", "all_to_all", "p", "z"),  # z's gradient to where it is added up, still partial over q
        ("forward", "all_reduce", "q", "a"),
        ("forward", "all_to_all", "p", "z"),
        ("forward", "reduce_scatter", "p", "a"),
    ]
    assert all(t.itemsize == graph.tensors["a"].itemsize for t in derivation.traffic)


def test_partial_inputs_of_an_addition_are_reduced_apart_where_a_plan_says_how_tensors_are_held():
    other = operator("c[b,f] = u[b,h] * t[f,h]")
    add = replace(operator("s[b,f] = a[b,f] + c[b,f]"), is_linear=True)
    graph = small_graph(MADE, other, add)
    shardings = {"a": {"h": ("tp_kv",)}, "c": {"h": ("tp_kv",)}, "s": {}}
    assert [t.tensor for t in derive(graph, shardings).traffic] == ["a"]
    assert [t.tensor for t in derive(graph, shardings, held={}).traffic] == ["a", "c"]


def test_operators_lie_before_within_and_after_the_exchange_of_their_block():
    sharded = derivation_of("deepseek-v3", "megatron")
    positions = {name.rpartition(".")[2]: str(position) for name, position in sharded.exchange_position.items()}
    assert positions["router"] == positions["q_a_proj"] == "before"
    assert {position for name, position in positions.items() if name.startswith("shared_")} == {"beside"}
    assert positions["experts_down"] == positions["unpermute"] == "after"
    assert not derivation_of("gpt2", "megatron").exchange_position


def test_a_repeated_region_is_entered_by_what_it_carries_and_the_head_by_what_the_blocks_leave():
    entering = derivation_of("gpt2", "ddp").entering
    assert entering["embedding"] == frozenset()
    assert (entering["layer"], entering["head"]) == ({"block_input.out"}, {"head_input.out"})


def test_key_value_heads_are_held_once_and_expanded_by_the_products_that_read_them():
    sharded = derivation_of("llama-3-8b", "ddp", attention="unfused")
    product = next(op for op in sharded.graph.operators if op.name_in_layer == "scores")
    keys = product.inputs[1]
    expanded, single = (sharded.operand_bytes(product, keys, is_expanded=is_expanded).base for is_expanded in (True, False))
    assert expanded == 4 * single
