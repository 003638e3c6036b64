"""Products in 8 and 4 bits: which are, what is cast, what is kept."""

import pytest

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.parallel.choices import Dispatcher
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.graph import NO_CASTS
from perfmodel.workload.job import PRECISION_POLICIES, Precision
from perfmodel.workload.low_precision import with_recipe
from perfmodel.workload.models import load_model
from perfmodel.workload.recipes import RECIPES
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass, Product, Stream, extent
from tests.cost.jobs import estimator_of, make_job


def graph_of(model="llama-3-8b", recipe="", **behaviours):
    graph = build_graph(load_model(model), seq_len=1024, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    return with_recipe(graph, RECIPES[recipe], **behaviours) if recipe else graph


def saved_bytes(graph, names):
    """Return the saved bytes of these operators, per token."""
    tokens = 1024.0
    total = 0.0
    for name in names:
        op = graph.operator(name)
        for data in op.saved:
            size = 1.0
            for length, _ in data.extent:
                size *= length
            total += size * (data.itemsize or graph.tensors[op.operands[data.of].tensor].itemsize)
    return total / tokens


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_of_linear_operators_are_low_and_no_others(recipe):
    graph = graph_of(recipe=recipe)
    low = {op.name for op in graph.operators for work in (*op.forward, *op.backward) if isinstance(work, Product) and work.is_low}
    assert low == LINEAR
    products = [work for op in graph.operators if op.name in LINEAR for work in (*op.forward, *op.backward) if isinstance(work, Product)]
    assert len(products) == 3 * len(LINEAR)
    assert all(work.is_low for work in products)


def test_routers_and_gates_stay_high():
    graph = graph_of("qwen2-57b-a14b", "fp8-block")
    low = {op.name for op in graph.operators for work in op.forward if isinstance(work, Product) and work.is_low}
    assert {"experts_up", "experts_down", "shared_up_proj"} <= low
    assert not low & {"router", "shared_gate", "lm_head"}


def test_an_input_is_cast_once_for_all_that_read_it():
    graph = graph_of(recipe="fp8-current")
    casts = {name: sum(isinstance(work, Stream) for work in graph.operator(name).forward) for name in LINEAR}
    assert casts == {"q_proj": 1, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 1, "up_proj": 0, "down_proj": 1}
    assert all(sum(isinstance(work, Stream) for work in graph.operator(name).backward) == 1 for name in LINEAR)


def test_rows_travel_to_experts_as_they_are_cast_and_back_in_full():
    """DeepSeek-V3: dispatch in blocks of 128 with a scale in float32 each, combine in 16 bits; backward the other way round."""

    def sent(recipe, dispatcher="alltoall", **behaviours):
        graph = build_graph(
            load_model("deepseek-v3"), seq_len=4096, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0,
            dispatcher=dispatcher,
        )  # fmt: skip
        derivation = derive(with_recipe(graph, RECIPES[recipe], **behaviours), apply_rules(graph, rule_set_of("megatron-sp")))
        rows = [row for row in derivation.traffic if row.region == "layer" and row.kind is CollectiveKind.ALL_TO_ALL]
        return {(row.phase, row.tensor.partition(".")[2]): row.itemsize for row in rows if "dp_ep" in row.axes}

    low = 1.0 + 4.0 / 128.0
    both = {
        (Pass.FORWARD, "permute.out"): low, (Pass.FORWARD, "unsort.out"): 2.0,
        (Pass.BACKWARD, "unsort.out"): low, (Pass.BACKWARD, "permute.out"): 2.0,
    }  # fmt: skip
    assert sent("fp8-block", sends_rows=True) == sent("fp8-block", "flex", sends_rows=True) == both
    assert set(sent("fp8-block").values()) == set(sent("fp8-current", sends_rows=True).values()) == {2.0}


@pytest.mark.parametrize(
    "recipe, keeps, extra, gathered",
    [("fp8-delayed", True, 0.0, 1.0), ("fp8-delayed", False, 0.0, 1.0), ("fp8-block", True, 0.0625, 1.03125), ("mxfp8", True, 2.0625, 0.0)],
)
def test_weights_may_live_and_be_gathered_in_8_bits_alone(recipe, keeps, extra, gathered):
    """Two copies less the two bytes in 16 bits; with mxfp8 each direction has scales of its own, so nothing is saved."""
    graph = graph_of(recipe=recipe, keeps_copies=keeps, gathers_weights=True)
    weight = graph.tensors["q_proj.weight"]
    assert (weight.copy_bytes, weight.gathered_bytes) == (extra, gathered)
    assert graph.tensors["lm_head.weight"].gathered_bytes == 0.0


@pytest.mark.parametrize(
    "recipe, behaviours, casts",
    [
        ("fp8-delayed", {}, (4.0, 3.0, 0.0)),
        ("fp8-current", {}, (6.0, 5.0, 0.0)),
        ("mxfp8", {"gathers_weights": True}, (2 + 2 * 33 / 32, 2 + 33 / 32, 0.0)),
        ("fp8-delayed", {"gathers_weights": True}, (2.0, 0.0, 3.0)),
        ("fp8-current", {"gathers_weights": True, "master_bytes": 2.0}, (2.0, 0.0, 3.0)),
        ("fp8-current", {"keeps_copies": False}, (0.0, 0.0, 0.0)),
        ("fp8-current", {"keeps_copies": False, "gathers_weights": True}, (0.0, 0.0, 4.0)),
    ],
)
def test_casts_of_weights_move_what_their_copies_need(recipe, behaviours, casts):
    graph = graph_of(recipe=recipe, **behaviours)
    weight_casts = graph.tensors["q_proj.weight"].casts
    assert (weight_casts.all_copies, weight_casts.one_copy, weight_casts.update) == casts
    assert graph.tensors["lm_head.weight"].casts == graph.tensors["attention_norm.weight"].casts == NO_CASTS


@pytest.mark.parametrize("gathers, forward, backward", [(False, 2 * 2 + 1, 2 * 2 + 1), (True, 0, 1 + 1)])
def test_who_keeps_no_copies_casts_weights_in_every_pass(gathers, forward, backward):
    """Weights that are gathered in 8 bits are only reordered for backward, from the copy."""
    op = graph_of(recipe="fp8-current", keeps_copies=False, gathers_weights=gathers).operator("up_proj")

    def moved(works):
        accesses = [data for work in works if isinstance(work, Stream) for data in work.accesses if data.of == 1 or data.of is None]
        return sum(data.itemsize or 2.0 for data in accesses if data.extent == extent(op.dims, op.inputs[1].dims))

    assert (moved(op.forward), moved(op.backward)) == (forward, backward)


def test_parameters_in_8_bits_are_half_of_what_is_gathered():
    job = make_job(load_model("llama-3-8b"), batch=8, precision=Precision.FP8_DELAYED)
    usual = estimator_of(job, chips=8)
    low = estimator_of(job, chips=8, profile=usual.profile.having(gathers_low_weights=True))
    plan = make_plan(job, cluster="test", num_chips=8, zero=1, profile="megatron")
    before, after = (estimator.predict(plan).memory["weights"] for estimator in (usual, low))
    in_layers = sum(graph_of().tensors[f"{name}.weight"].num_elements for name in LINEAR) * job.model.num_hidden_layers
    assert before - after == pytest.approx(2.0 * in_layers)

    def gathered(estimator):
        program = estimator.programs.parameter_program(estimator.programs.program_of(plan), plan.rules, 1, pipelined=False)
        return sorted({itemsize for (itemsize,) in program.events.itemsize.tolist()})

    assert (gathered(usual), gathered(low)) == ([2.0, 4.0], [1.0, 2.0, 4.0])


@pytest.mark.parametrize("recipe, accesses", [("fp8-delayed", 2), ("fp8-current", 3), ("fp8-block", 2)])
def test_what_makes_a_tensor_writes_its_copies(recipe, accesses):
    """After a norm a cast only writes; where its largest entry must be known first, it reads once. After attention it reads too."""
    graph = graph_of(recipe=recipe)
    assert len(graph.operator("q_proj").forward[0].accesses) == accesses
    assert len(graph.operator("o_proj").forward[0].accesses) == accesses + 1


def test_copies_are_kept_in_place_of_inputs_by_who_keeps_them():
    before, kept, again = graph_of(), graph_of(recipe="fp8-block"), graph_of(recipe="fp8-block", keeps_copies=False)
    assert saved_bytes(before, ["o_proj"]) == saved_bytes(again, ["o_proj"]) == 2.0 * 4096
    assert saved_bytes(kept, ["o_proj"]) == (1 + 4 / 128) * 4096
    assert saved_bytes(kept, ["k_proj", "v_proj"]) == 0.0
    assert kept.tensors["q_proj.weight"].copy_bytes == 2 * (1 + 4 / 128)
    assert kept.tensors["lm_head.weight"].copy_bytes == again.tensors["q_proj.weight"].copy_bytes == 0.0


def test_everything_else_is_mixed_precision():
    for name in (Precision.FP8_DELAYED, Precision.MXFP8, Precision.NVFP4):
        policy, mixed = PRECISION_POLICIES[name], PRECISION_POLICIES[Precision.BF16_MIXED]
        assert (policy.compute, policy.master, policy.gradient_reduce) == (mixed.compute, mixed.master, mixed.gradient_reduce)
        assert policy.recipe is not None
        assert policy.recipe.product in (Dtype.FP8, Dtype.FP4)


def test_rows_of_experts_are_copied_to_multiples_before_and_after_their_products():
    def copies(op):
        passes = (op.forward, op.backward)
        return [sum(isinstance(work, Stream) and work.kernel == "permute" for work in works) for works in passes]

    apart, padded = (graph_of("qwen3-30b-a3b", "mxfp8", pads_rows=behaviour) for behaviour in (False, True))
    assert [copies(apart.operator(name)) for name in ("experts_up", "experts_down", "q_proj")] == [[0, 0]] * 3
    assert [copies(padded.operator(name)) for name in ("experts_up", "experts_down", "q_proj")] == [[1, 1], [1, 1], [0, 0]]


def test_kernels_that_exchange_or_multiply_rows_pad_them_themselves():
    profile = load_profile("nemo")
    assert profile.pads_rows(Dispatcher.ALL_TO_ALL)
    assert profile.pads_rows(Dispatcher.FLEX)
    assert not profile.having(permutes_in_exchange=True).pads_rows(Dispatcher.FLEX)
    assert not profile.having(fuses_experts=True).pads_rows(Dispatcher.ALL_TO_ALL)
