"""Mixtral 8x7B as its arithmetic has it: FLOP, traffic, memory (sharding algebra; Megatron-Core's dispatchers)."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.assemble import plan_columns
from perfmodel.cost.evaluate import amount_values, product_flops
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.rewrites import with_behaviour
from perfmodel.frameworks.settings import with_settings
from perfmodel.hardware.fabric import Topology
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import Pass
from tests.cost.jobs import estimator_of, make_job
from tests.cost.machines import make_tier

MIXTRAL = load_model("mixtral-8x7b")
SLOW = (make_tier(size=8), make_tier(Topology.FAT_TREE, size=4096, bandwidth=1e9, latency=5e-6))
EP = frozenset(("dp_ep", "cp_ep", "tp_kv_ep", "tp_q_ep"))


def derived(dispatcher, rules="megatron-sp"):
    graph = build_graph(
        MIXTRAL, seq_len=4096, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0, dispatcher=dispatcher
    )
    return derive(graph, apply_rules(graph, rule_set_of(rules)))


def sent(derivation, sizes):
    """(kind, pass, bytes of the buffer of one sequence a rank) of what rides on experts' axes or inside an expert; other axes are 1."""

    def size(axes):
        total = 1
        for axis in axes:
            total *= sizes.get(axis, 1)
        return total

    collectives = []
    for traffic in derivation.traffic:
        if traffic.region == "layer" and size(traffic.axes) > 1:
            # a microbatch is one sequence for each data rank
            collectives.append((traffic.kind, traffic.phase, traffic.amount.on(size) * sizes.get("dp_ep", 1)))
    return collectives


def test_parameters_and_flop():
    graph = derived("alltoall").graph
    assert graph.num_parameters == MIXTRAL.num_parameters == 46_702_792_704
    assert graph.flops / 4096 == pytest.approx(26.571e9, rel=1e-4)
    assert sum(flops.at(1, causal=False) for flops in graph.flops_by_length) > graph.flops


def test_an_all_to_all_moves_a_row_for_each_expert_that_a_token_chose():
    """67.11 MB (T k h B), twice forward and twice backward."""
    collectives = sent(derived("alltoall"), {"dp_ep": 8})
    assert collectives == [(CollectiveKind.ALL_TO_ALL, phase, 4096 * 2 * 4096 * 2.0) for phase in (Pass.FORWARD, Pass.BACKWARD) * 2]


def test_an_all_gather_moves_every_token_to_every_rank():
    """The buffer is n T h B: 234.9 MB on the wire where eight ranks gather; of each choice its weight and its expert, 8 bytes."""
    collectives = sent(derived("allgather"), {"dp_ep": 8})
    there, back = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    tokens, choices = ([kind for kind, _, amount in collectives if amount == 8 * 4096 * row_bytes] for row_bytes in (4096 * 2.0, 2 * 8.0))
    assert tokens == [there, back, back, there]
    assert choices == [there, back]
    assert len(collectives) == 6


def test_what_is_weighted_by_a_kernel_of_its_own_is_kept_for_it():
    """Experts without halves have no kernel that weights rows too (Megatron-Core's TEGroupedMLP): gelu's output stays, w bytes more."""

    def kept(dispatcher, **experts):
        model = MIXTRAL.having(experts=replace(MIXTRAL.parts.experts, **experts))
        graph = build_graph(
            model, seq_len=4096, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0, dispatcher=dispatcher
        )
        op = next(op for op in graph.operators if op.name_in_layer == "experts_activation")
        return len(op.saved), len(op.forward)

    assert kept("allgather", gated=False) == (3, 2)
    assert kept("allgather", gated=True) == (2, 1)  # with the weights
    assert kept("alltoall", gated=False) == (1, 1)


def test_tensor_parallelism_inside_experts_gathers_their_rows():
    """Over etp the rows of its ranks: t T k h B, gathered after the dispatch, reduced before rows go back."""
    collectives = [collective for collective in sent(derived("alltoall"), {"tp_kv": 2}) if collective[2] == 4096 * 2 * 4096 * 2.0]
    assert [kind for kind, _, _ in collectives] == [
        CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER,
    ]  # fmt: skip


def test_gradients_of_experts_are_partial_over_what_experts_leave():
    layouts = {parameter.name: parameter for parameter in derived("alltoall").parameters}
    assert layouts["experts_up.weight"].gradient_axes == {"dp_replicate", "dp_shard", "cp"}
    assert layouts["q_proj.weight"].gradient_axes >= {"dp_shard", "dp_ep", "cp", "cp_ep"}
    assert layouts["router.weight"].gradient_axes >= EP


def test_memory_of_a_rank():
    """tp 1, pp 4, ep 8, vpp 8 on 64 chips: 1.745 B parameters and, on the first rank, the embedding."""
    estimator = estimator_of(make_job(MIXTRAL, batch=256, seq_len=4096), chips=64, node=8)
    plan = make_plan(
        estimator.job, cluster="test", num_chips=64, pp=4, dp=16, ep=8, zero=1, schedule="interleaved", virtual_stages=8, profile="megatron"
    )
    memory = estimator.predict(plan).memory
    layer = 32 // 4
    attention, router, norms, expert, embedding = 41_943_040, 32_768, 2 * 4096, 176_160_768, 32_000 * 4096
    dense = layer * (attention + router + norms) + embedding
    assert memory["weights"] == 2.0 * (dense + layer * expert)
    assert memory["gradients"] == 4.0 * (dense + layer * expert)
    assert memory["optimizer"] == pytest.approx(
        12.0 * (dense / 16 + layer * expert / 2), rel=1e-4
    )  # the router's eight rows are padded to sixteen


@pytest.mark.parametrize(
    "knobs, sentence",
    [
        ({"ep": 3}, "ep=3: must divide the 8 experts"),
        ({"ep": 8, "tp": 2, "etp": 3}, "etp=3: must divide"),
        ({"ep": 8, "tp": 4, "dp": 1, "pp": 2}, "takes 2 ways of the data axis, which has 1"),
    ],
)
def test_what_experts_cannot_follow_is_refused(knobs, sentence):
    with pytest.raises(InputError, match=sentence):
        make_plan(make_job(MIXTRAL, batch=64, seq_len=4096), cluster="test", num_chips=8, **knobs)


def test_a_model_without_experts_has_none_to_deal_out():
    with pytest.raises(InputError, match="ep=2: small has no experts"):
        make_plan(make_job(), cluster="test", num_chips=8, ep=2)


def test_deterministic_runs_keep_the_rows_that_are_added_up():
    profile = load_profile("megatron")
    deterministic = with_settings(profile, {"megatron_args": ["deterministic-mode=True"]})
    for dispatcher, more in (("allgather", 1), ("alltoall", 0)):  # which keeps them anyway, to weight them
        kept = [
            next(len(op.saved) for op in with_behaviour(derived(dispatcher), behaviour).graph.operators if op.kind == "unpermute")
            for behaviour in (profile, deterministic)
        ]
        assert kept[1] - kept[0] == more


def test_a_block_of_the_concurrent_microbatch_is_kept_too():
    """Forward of one runs concurrently with backward of another, layer by layer: at most a block of each is resident twice."""
    estimator = estimator_of(make_job(MIXTRAL, batch=64, seq_len=4096), chips=64, node=8)
    hiding = estimator_of(estimator.job, chips=64, node=8, profile=estimator.profile.having(hides_exchanges=True))
    for ep, is_more in ((8, True), (1, False)):
        plan = make_plan(estimator.job, cluster="test", num_chips=64, dp=16, pp=4, ep=ep, zero=1, profile="megatron")
        shown, hidden = (variant.predict(plan).memory for variant in (estimator, hiding))
        more = sum(hidden[name] - shown[name] for name in ("activations", "temporary"))
        assert (more > 0) == is_more
        assert more < shown["activations"] / 8 * 2 + shown["temporary"]  # of eight blocks one, and what its passes take


def test_shared_experts_overlap_exchanges():
    """Only DeepSeek-V3's shared expert neither needs nor makes an exchange; exchanges are overlapped for as long as it runs."""
    model = load_model("deepseek-v3").with_layers(4)
    job = make_job(model, batch=64, seq_len=4096)
    usual = estimator_of(job, chips=64, node=8)
    overlapped = estimator_of(job, chips=64, node=8, profile=with_settings(usual.profile, {"moe_shared_overlap": True}))
    plan = make_plan(job, cluster="test", num_chips=64, ep=64, zero=1, profile="megatron")
    names = {
        name
        for rows in (overlapped.programs.program_of(plan).concurrent.matmul, overlapped.programs.program_of(plan).concurrent.streaming)
        for name in rows.names
    }
    assert {name.partition(".")[2].partition(".")[0] for name in names} == {
        "shared_gate_proj", "shared_up_proj", "shared_activation", "shared_product", "shared_down_proj"
    }  # fmt: skip
    shown, hidden = (variant.predict(plan) for variant in (usual, overlapped))
    name = "expert_parallel_communication"
    assert hidden.parts[name] < shown.parts[name]
    assert shown.step_time - hidden.step_time == pytest.approx(shown.parts[name] - hidden.parts[name], rel=0.02)
    assert sum(hidden.parts.values()) == pytest.approx(hidden.step_time)
    alone = make_plan(job, cluster="test", num_chips=64, ep=1, dp=64, zero=1, profile="megatron")
    assert usual.predict(alone).step_time == overlapped.predict(alone).step_time  # nothing to hide


def test_exchanges_are_overlapped_by_another_microbatch():
    """Both take as long as the longer one; compute has fewer units meanwhile. The first forward pass of all stages and the last backward
    pass have no concurrent pass: four passes of sixteen."""
    job = make_job(MIXTRAL, batch=256, seq_len=4096)
    for tiers, is_bound in (((), False), (SLOW, True)):
        estimator = estimator_of(job, chips=64, node=8, tiers=tiers)
        hiding = estimator_of(job, chips=64, node=8, tiers=tiers, profile=estimator.profile.having(hides_exchanges=True))
        knobs = {"cluster": "test", "num_chips": 64, "dp": 16, "pp": 4, "ep": 8, "zero": 1, "profile": "megatron"}
        if is_bound:
            knobs["order"] = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
        plan = make_plan(job, **knobs)
        shown, hidden = (variant.predict(plan) for variant in (estimator, hiding))
        parts = [prediction.parts["expert_parallel_communication"] for prediction in (shown, hidden)]
        assert hidden.step_time < shown.step_time
        assert sum(hidden.parts.values()) == pytest.approx(hidden.step_time)
        compute = sum(shown.parts[part] for part in ("forward", "backward"))
        if is_bound:
            assert parts[1] == pytest.approx(parts[0] - compute * (1 - 4 / 16), rel=0.02)  # embedding and head overlap nothing
        else:
            assert parts[1] == pytest.approx(parts[0] * (20 / 132 + (1 - 20 / 132) * 4 / 16), rel=1e-5)


def overlapping(batch=64, *, delays, tiers=(), **knobs):
    """Return estimator, plan and prediction of MIXTRAL with exchanges overlapped by another microbatch, weight gradients delayed or not."""
    usual = estimator_of(make_job(MIXTRAL, batch=batch, seq_len=4096), chips=64, node=8, tiers=tiers)
    stated = {"moe_overlap": True, "delayed_weight_gradients": delays}
    estimator = estimator_of(usual.job, chips=64, node=8, tiers=tiers, profile=with_settings(usual.profile, stated))
    plan = make_plan(usual.job, cluster="test", num_chips=64, **({"ep": 8, "zero": 1, "profile": "megatron"} | knobs))
    return estimator, plan, estimator.predict(plan)


def test_weight_gradients_that_are_apart_are_those_of_weights():
    """Their FLOP equal those of the forward products: of each token in attention and router, of each row in its expert."""
    estimator, plan, _ = overlapping(delays=True)
    program = estimator.programs.program_of(plan)
    columns = plan_columns(estimator, [plan])
    amount, _ = amount_values(program.weight_gradients.amounts, columns.grid, np.array([1.0]), 4096.0)
    flops = product_flops(program.weight_gradients, amount)[:, 0]
    block = [region.is_block for region in program.regions].index(True)
    h, f, kv = MIXTRAL.hidden_size, MIXTRAL.parts.experts.width, MIXTRAL.num_key_value_heads * MIXTRAL.head_dim
    before = 2.0 * 4096 * (h * (2 * h + 2 * kv) + h * MIXTRAL.parts.experts.num_experts)
    after = 2.0 * 4096 * MIXTRAL.parts.experts.top_k * 3 * h * f
    assert (flops[2 * block], flops[2 * block + 1]) == pytest.approx((before, after))
    assert flops.sum() == pytest.approx(before + after + 2.0 * 4096 * h * MIXTRAL.vocab_size)  # and the head
    assert overlapping(delays=False)[0].programs.program_of(plan).weight_gradients is None


def test_delayed_weight_gradients_hide_what_the_last_microbatch_sends_back():
    """With one microbatch nothing else overlaps: weight gradients of experts overlap dispatch, the others combine, on 112 of 132 units."""
    for tiers in ((), SLOW):
        estimator, plan, late = overlapping(delays=True, tiers=tiers)
        _, _, usual = overlapping(delays=False, tiers=tiers)
        assert plan.num_microbatches == 1
        micro = plan_columns(estimator, [plan]).micro
        block = [region.is_block for region in micro.program.regions].index(True)
        half = usual.parts["expert_parallel_communication"] / MIXTRAL.num_hidden_layers / 4
        hidden = sum(np.minimum(micro.weight_gradients[2 * block + i].item(), half) for i in range(2))
        assert usual.step_time - late.step_time == pytest.approx(MIXTRAL.num_hidden_layers * hidden * 112 / 132, rel=1e-5)
        assert sum(late.parts.values()) == pytest.approx(late.step_time)


def test_exchanges_of_backward_are_overlapped_by_forward_alone_unless_weight_gradients_wait():
    """Delayed weight gradients gain where exchanges last longer than forward but not longer than both passes."""
    gains = {}
    for bandwidth in (25e9, 8e9, 6e9, 1e8):
        tiers = (make_tier(size=8), make_tier(Topology.FAT_TREE, size=4096, bandwidth=bandwidth, latency=5e-6))
        order = ("pp", "tp", "cp", "dp_shard", "dp_replicate")
        steps = []
        for delays in (False, True):
            times = [overlapping(batch, delays=delays, tiers=tiers, dp=16, pp=4, order=order)[2].step_time for batch in (256, 512)]
            steps.append((times[1] - times[0]) / 16)  # of a microbatch: the ends are the same
        assert steps[1] <= steps[0] * (1 + 1e-12)
        gains[bandwidth] = steps[0] / steps[1] - 1
    assert gains[25e9] == pytest.approx(0.0, abs=1e-9)
    assert gains[1e8] == pytest.approx(0.0, abs=1e-3)
    assert max(gains.values()) > 0.01


def test_delayed_weight_gradients_keep_what_they_multiply():
    """The peak is at the backward pass of the experts' activation: the down projection then keeps its input and the gradient of its
    output in addition, f and h entries of each row. Nothing where nothing is exchanged."""
    rows = 4096 * MIXTRAL.parts.experts.top_k
    kept = 2.0 * rows * (MIXTRAL.parts.experts.width + MIXTRAL.hidden_size)
    for ep in (8, 1):
        usual, late = (overlapping(delays=delays, dp=16, pp=4, ep=ep)[2].memory for delays in (False, True))
        assert sum(late[name] - usual[name] for name in ("activations", "temporary")) == (kept if ep > 1 else 0)


def test_weight_gradients_wait_for_nothing_without_another_microbatch():
    with pytest.raises(InputError, match="delayed_weight_gradients=true: needs moe_overlap"):
        load_profile("megatron+delayed_weight_gradients")
    with pytest.raises(InputError, match="delays_weight_gradients=true: needs hides_exchanges=true"):
        load_profile("megatron").having(delays_weight_gradients=True)
    flags = ["overlap-moe-expert-parallel-comm=True", "delay-wgrad-compute=True"]
    read = with_settings(load_profile("megatron"), {"megatron_args": flags})
    assert (read.exchanges.hides_exchanges, read.exchanges.delays_weight_gradients) == (True, True)
    assert not with_settings(load_profile("megatron"), {"megatron_args": flags[:1]}).exchanges.delays_weight_gradients
    assert not with_settings(load_profile("megatron"), {"megatron_args": flags[1:]}).exchanges.delays_weight_gradients


def test_flex_sends_a_token_once_to_each_node_and_copies_it_on_the_way():
    """Qwen3-235B's 8 of 128 experts over 8 nodes of 8: 8 (1 - C(112, 8) / C(128, 8)) of them, one in eight its own."""
    plain, flex = derived("alltoall"), derived("flex")
    assert {traffic.copies for traffic in plain.traffic} == {None}
    copies = [traffic.copies for traffic in flex.traffic if traffic.copies is not None]
    assert [copy.distinct(8) for copy in copies] == [2.0] * 4
    assert [op.name for op in flex.graph.operators if op.kind in ("permute", "unpermute") and not op.forward] == ["permute", "unpermute"]
    estimator = estimator_of(make_job(load_model("qwen3-235b-a22b").with_layers(4), batch=64, seq_len=4096), chips=64, node=8)
    plans = {name: make_plan(estimator.job, cluster="test", num_chips=64, ep=64, zero=1, dispatcher=name) for name in ("alltoall", "flex")}
    by = {name: estimator.predict(plan).parts for name, plan in plans.items()}
    sent = {name: parts["expert_parallel_communication"] for name, parts in by.items()}
    assert sent["flex"] / sent["alltoall"] == pytest.approx(8 * (1 - 0.3396) / 8, rel=0.02)  # C(112, 8) / C(128, 8) = 0.3396
    assert by["flex"]["forward"] < by["alltoall"]["forward"]


def test_biases_of_shared_experts_are_there():
    model = MIXTRAL.having(experts=replace(MIXTRAL.parts.experts, bias=True, shared_width=64, router_bias=True))
    graph = build_graph(model, seq_len=64, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0)
    assert graph.num_parameters == model.num_parameters
