"""Layers other than plain attention and a dense MLP, interpreted: several processes compute what one does, and functions what they mean."""

import pytest
import torch
import torch.nn.functional as F

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import FUNCTIONS
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.per_operator.by_rules import graph_of, plan_by_rules
from perfmodel.workload.layer_specs import DeltaNet, LatentAttention, LayerSpec, Mamba
from tests.execute.jobs import tiny, tiny_plan
from tests.marks import one_in

LATENT = LatentAttention(query_rank=24, key_value_rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=6)
STATE = Mamba(num_heads=8, head_dim=4, num_groups=4, state_size=6, conv_kernel=4, chunk_size=8)
DELTA = DeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=4, conv_kernel=4, chunk_size=8)
HYBRID = (
    LayerSpec(name="layer", count=2, mixer="mamba", feed_forward="none", turn="t"),
    LayerSpec(name="dense_layer", count=1, mixer="none", turn="t"),
    LayerSpec(name="attention_layer", count=1, feed_forward="none", turn="t"),
)
MODELS = {
    "latent": dict(latent=LATENT, num_key_value_heads=8, num_hidden_layers=2),
    "chunks": dict(attention_chunk=8, full_attention_every=2, attention_sinks=True, num_hidden_layers=2),
    "gate": dict(attention_gate=True, sliding_window=8, attention_sinks=True, num_hidden_layers=2),
    "mamba": dict(mamba=STATE, kinds=HYBRID),
    "delta": dict(
        delta=DELTA,
        kinds=(LayerSpec(name="first", count=1), LayerSpec(name="layer", count=2, mixer="delta")),
        num_hidden_layers=3,
    ),
    "further": dict(num_mtp_layers=1, num_hidden_layers=2),
}  # fmt: skip
FORMS = [
    ("latent", dict(tp=2, dp_shard=2, zero=3, micro_batch=2)),
    ("mamba", dict(tp=2, cp=2, micro_batch=4)),
]
MORE_FORMS = [
    ("latent", dict(tp=2, cp=2, micro_batch=4)),
    ("latent", dict(tp=2, dp_shard=2, zero=1, attention="unfused", recompute="selective", sequence_parallel=False)),
    ("latent", dict(tp=2, pp=2, micro_batch=2, recompute="full")),
    ("chunks", dict(cp=2, tp=2, micro_batch=4)),
    ("chunks", dict(tp=2, dp_shard=2, zero=1, attention="unfused")),
    ("gate", dict(cp=2, tp=2, micro_batch=4)),
    ("gate", dict(cp=2, dp_shard=2, zero=3, rules="ulysses")),
    ("mamba", dict(pp=2, dp_shard=2, zero=1)),
    ("mamba", dict(cp=2, dp_shard=2, zero=3, rules="ulysses")),
    ("delta", dict(tp=2, dp_shard=2, zero=3)),
    ("delta", dict(tp=2, cp=2, micro_batch=4)),
    ("further", dict(tp=2, dp_shard=2, zero=1)),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, knobs", [*FORMS, *one_in(2, MORE_FORMS)])
def test_several_processes_compute_what_one_does(name, knobs, groups):
    plan = tiny_plan(4, model=tiny(**MODELS[name]), **knobs)
    assert not_executable_reason(plan) == ""
    result = check_network_plan(graph_of(plan), plan_by_rules(plan, graph_of(plan)), NetworkOptions(steps=2), group=groups(4))
    assert max(result.gradient_error, result.loss_error) < 1e-9


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, knobs", [("mamba", dict(cp=4)), ("delta", dict(cp=2, tp=2))])
def test_ranks_that_share_positions_pass_on_their_states(name, knobs, groups):
    """They send the traffic that their kinds declare, and compute the result of one process."""
    rules = {"batch": ("dp_replicate", "dp_shard"), **dict.fromkeys(("s_res", "s", "s_query", "s_scan"), ("cp",))}
    rules |= {"state_groups": ("tp_kv", "tp_q"), "scan_groups": ("tp_kv", "tp_q")}
    plan = tiny_plan(4, model=tiny(**MODELS[name]), micro_batch=8, rules=RuleSet(name="own", source="", rules=rules), **knobs)
    result = check_network_plan(graph_of(plan), plan_by_rules(plan, graph_of(plan)), NetworkOptions(steps=2), group=groups(4))
    assert max(result.gradient_error, result.loss_error) < 1e-9
    assert {row.kind for row in result.traffic if row.tensor.endswith(("scan.out", "conv.out"))} >= {CollectiveKind.SEND_RECV}


def context_of(graph, name):
    operator = graph.operator(name)
    return OperatorContext(NetworkMesh(Worker(0, 1, "cpu"), ()), operator, {}, dict(operator.dims))


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def graph_with(name):
    return graph_of(tiny_plan(1, model=tiny(**MODELS[name]), batch=2, micro_batch=2))


def test_a_scan_is_its_recurrence():
    graph = graph_with("mamba")
    context = context_of(graph, "layer0.layer.scan")
    shapes = [graph.tensors[operand.tensor].shape for operand in context.operator.inputs]
    x, steps, dt_bias, a_log, skip = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    heads, b, c = x.split((8, 6, 6), -1)  # two heads of four, the state's six
    heads, dt = heads.unflatten(-1, (2, 4)), F.softplus(steps + dt_bias)
    state, outputs = torch.zeros(2, 4, 2, 4, 6, dtype=torch.float64), []
    for position in range(x.shape[1]):
        decay = (-dt[:, position] * a_log.exp()).exp()[..., None, None]
        entering = (dt[:, position, ..., None] * heads[:, position])[..., None] * b[:, position, :, None, None, :]
        state = state * decay + entering
        outputs.append((state * c[:, position, :, None, None, :]).sum(-1) + skip[..., None] * heads[:, position])
    expected = torch.stack(outputs, 1).flatten(-2)
    torch.testing.assert_close(FUNCTIONS["state_scan"]((x, steps, dt_bias, a_log, skip), context), expected)


def test_a_convolution_sees_no_later_position():
    context = context_of(graph_with("mamba"), "layer0.layer.conv")
    x, weight, bias = random(2, 32, 4, 20, seed=0), random(4, 20, 4, seed=1), random(4, 20, seed=2)
    output = FUNCTIONS["causal_conv"]((x, weight, bias), context)
    changed = x.clone()
    changed[:, 20:] += 1.0
    torch.testing.assert_close(FUNCTIONS["causal_conv"]((changed, weight, bias), context)[:, :20], output[:, :20])
    last = (x[:, 7:11] * weight.permute(2, 0, 1)).sum(1) + bias
    torch.testing.assert_close(output[:, 10], F.silu(last))


def test_sinks_take_their_share_and_chunks_do_not_see_one_another():
    graph = graph_with("chunks")
    context = context_of(graph, "layer0.attention")
    q, k, v, sinks = (random(*graph.tensors[operand.tensor].shape, seed=i) for i, operand in enumerate(context.operator.inputs))
    output = FUNCTIONS["attention"]((q, k, v, sinks), context)
    scores = torch.einsum("bqgrd,bzgd->bgrqz", q, k) * 8**-0.5
    places = torch.arange(32)
    seen = (places[:, None] >= places) & (places[:, None] // 8 == places // 8)
    shares = scores.masked_fill(~seen, -torch.inf).exp()
    shares = shares / (shares.sum(-1, keepdim=True) + sinks.exp()[None, :, :, None, None])
    torch.testing.assert_close(output, torch.einsum("bgrqz,bzgd->bqgrd", shares, v))
    # the second layer has no chunks
    unchunked = FUNCTIONS["attention"]((q, k, v, sinks), context_of(graph, "layer1.attention"))
    torch.testing.assert_close(unchunked[:, :8], output[:, :8])
    assert not torch.allclose(unchunked[:, 8:], output[:, 8:])
