"""The graph of a decoder, interpreted, is the model that torch's modules are; and it runs under any rules."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.execute.audit.count import _before_first_backward, torch_counts
from perfmodel.execute.audit.program import fake_group
from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.measure.instrument import CollectiveCounter, StorageTracker
from perfmodel.execute.per_operator import model as network_model
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.execute.per_operator.model import NetworkProgram
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan
from perfmodel.execute.run import run_plan
from perfmodel.execute.uniform.model import Transformer
from perfmodel.execute.uniform.weights import canonical_name, fill
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.executable import not_executable_reason, not_modules_reason
from perfmodel.parallel.per_operator.by_rules import graph_of, interpreter_reason, plan_by_rules
from perfmodel.workload.graph import TensorRole
from perfmodel.workload.job import Precision
from tests.execute.jobs import VARIANTS, tiny, tiny_plan
from tests.marks import NIGHTLY

pytestmark = [pytest.mark.timeout(600)]

_BATCH = {"batch": ("dp_replicate", "dp_shard")}
MLP_ONLY = RuleSet(name="mlp-only", source="", rules={**_BATCH, "ffn": ("tp_kv", "tp_q")})


@pytest.mark.parametrize(
    "variant, attention", [*((variant, "flash") for variant in VARIANTS), ("llama", "unfused"), ("gemma2", "unfused"), ("bloom", "unfused")]
)
def test_both_ways_compute_the_same(variant, attention):
    """Loss and every gradient, with the same weights and tokens, in one process."""
    config = tiny(variant)
    model = Transformer(config, fused_attention=attention == "flash").double()
    for name, parameter in model.named_parameters():
        fill(config, canonical_name(name), parameter)
    plan = tiny_plan(1, model=config, batch=2, micro_batch=2, attention=attention)
    graph = graph_of(plan)
    program = NetworkProgram(Worker(rank=0, world_size=1, device="cpu"), graph, plan_by_rules(plan, graph), dtype=torch.float64)
    ours = {canonical_name(name).replace("layers.", "layer"): parameter for name, parameter in model.named_parameters()}
    for name, tensor in program.parameters.tensors.items():
        tensor.detach().copy_(ours[name].detach().reshape(tensor.shape))
    assert program.parameters.tensors.keys() == ours.keys()
    given = {name: tensor for (name, _, _), tensor in program.inputs.items()}
    labels = graph.operator("cross_entropy").inputs[1].tensor
    tokens = next(tensor for name, tensor in given.items() if name != labels and tensor.shape == given[labels].shape)
    for tensor in given.values():
        if tensor.shape != tokens.shape:  # positions
            tensor.copy_(torch.arange(len(tensor)) + config.positions.position_offset)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), given[labels].flatten())
    loss.backward()
    assert float(program.forward_backward()) == pytest.approx(loss.item(), rel=1e-6)
    largest = max(float(parameter.grad.abs().max()) for parameter in ours.values())
    for name, gradient in program.gradients().items():
        # norms and angles are in float32 in the modules
        torch.testing.assert_close(gradient, ours[name].grad.reshape(gradient.shape), atol=1e-6 * largest, rtol=1e-4)


#: Plans of every form and schedule; MORE_FORMS are the same put together otherwise.
FORMS = [
    ("llama", dict(tp=2, dp_shard=2, zero=3, micro_batch=2)),
    ("gpt2", dict(tp=2, dp_shard=2, zero=1, micro_batch=2, recompute="selective", attention="unfused", sequence_parallel=False)),
    ("olmo2", dict(tp=2, pp=2, zero=1, micro_batch=2, recompute="full")),
    ("llama", dict(dp_replicate=2, dp_shard=2, zero=3, recompute="full")),
    ("llama", dict(pp=2, dp_shard=2, zero=3, virtual_stages=2)),
    ("qwen3", dict(pp=2, dp_shard=2, zero=3)),
    ("llama", dict(cp=2, tp=2, zero=3, micro_batch=4, order=("cp", "tp", "dp_replicate", "dp_shard", "pp"))),
    ("bloom", dict(cp=2, dp_replicate=2, zero=1, attention="unfused", rules="ulysses")),
]
MORE_FORMS = [
    ("llama", dict(pp=2, tp=2, micro_batch=4, schedule="gpipe")),
    ("gemma2", dict(cp=2, tp=2, attention="unfused", recompute="selective")),
    ("gpt2", dict(tp=2, dp_shard=2, zero=1, micro_batch=2)),
    ("llama", dict(dp_replicate=2, dp_shard=2, zero=1)),
    ("gpt2", dict(pp=2, dp_shard=2, zero=1)),
    ("qwen3", dict(pp=2, tp=2, virtual_stages=2, recompute="full")),
    ("llama", dict(pp=4, micro_batch=4)),
    ("gemma2", dict(cp=4, zero=2)),
    ("bloom", dict(cp=2, tp=2)),
    ("gpt2", dict(cp=2, pp=2, zero=1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant, knobs", [*FORMS, *(pytest.param(*form, marks=NIGHTLY) for form in MORE_FORMS)])
def test_megatrons_rules_equal_one_process(variant, knobs, groups):
    plan = tiny_plan(4, model=tiny(variant), **knobs)
    result = check_network_plan(graph_of(plan), plan_by_rules(plan, graph_of(plan)), NetworkOptions(steps=2), group=groups(4))
    assert max(result.gradient_error, result.loss_error) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [dict(dp_shard=2, zero=1), dict(dp_shard=2, zero=3, recompute="full"), dict(pp=2)])
def test_bf16_keeps_float32_masters_and_sends_what_it_says(knobs, groups):
    """Weights are gathered in bf16, gradients reduced in float32; losses of four steps are those of one process."""
    plan = tiny_plan(4, tp=2, micro_batch=2, precision=Precision.BF16_MIXED, **knobs)
    options = NetworkOptions(dtype="", steps=4, optimizer="adamw", learning_rate=1e-3)
    result = check_network_plan(graph_of(plan), plan_by_rules(plan, graph_of(plan)), options, group=groups(4))
    assert result.loss_error < 2e-3
    sizes = {row.what: row.itemsize for row in result.traffic}
    # norms' weights are added up over tp as they are made
    of_zero = {1: {"weights": 2.0}, 3: {"weights": 2.0, "sum": 2.0}}
    assert sizes == {"edge": 2.0, "own": 4.0, "gradient": 4.0} | of_zero.get(int(plan.zero), {})


def test_what_bf16_would_round_away_adds_up_in_float32():
    plan = tiny_plan(1, model=tiny("llama"), batch=2, micro_batch=1, precision=Precision.BF16_MIXED)
    graph = graph_of(plan)
    worker = Worker(rank=0, world_size=1, device="cpu")
    program = NetworkProgram(worker, graph, plan_by_rules(plan, graph), dtype=None, learning_rate=1e-3)
    units = [unit for _, unit in program.parameters.flat]
    before = [(unit.weights.clone(), unit.master.clone()) for unit in units]
    program.step()
    for unit, (weights, masters) in zip(units, before, strict=True):
        assert (unit.weights.dtype, unit.master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(unit.weights, unit.master.bfloat16())
        assert (unit.master != masters).sum() > (unit.weights != weights).sum()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param(Precision.FP32, marks=NIGHTLY), Precision.BF16_MIXED])
def test_run_plan_runs_the_users_own_rules(precision, groups):
    plan = tiny_plan(4, tp=2, dp_shard=2, zero=3, micro_batch=2, rules=MLP_ONLY, precision=precision)
    assert not_modules_reason(plan).startswith("rules=mlp-only")
    assert not_executable_reason(plan) == ""
    measurement = run_plan(plan, steps=2, warmup=1, group=groups(4))
    assert measurement.plan == plan
    assert measurement.gradient_error < 1e-4
    # of each of two microbatches: the mlp's output in each of four layers forward, its input backward
    size = 2 * 32 * 64 * (4 if precision is Precision.FP32 else 2)
    assert {(c.kind, c.axis): (c.count, c.num_bytes) for c in measurement.collectives}["all_reduce", "tp"] == (16, 16 * size)
    assert set(measurement.parts) == {"communication.dp_shard", "communication.tp"}


@pytest.mark.parametrize(
    "knobs, says",
    [
        (dict(precision=Precision.FP16_MIXED), "otherwise only without the loss scaling that fp16-mixed needs; use precision=bf16-mixed"),
        (dict(recompute="full"), ""),
        (dict(dp_shard=1, dp_replicate=2, pp=2, tp=1, batch=8, model=tiny("gpt2")), ""),
        (dict(dp_shard=2, pp=2, tp=2, zero=3), ""),
    ],
)
def test_what_neither_way_runs_has_a_reason(knobs, says):
    degrees = dict(tp=2, dp_shard=2, zero=3) | knobs
    chips = degrees["tp"] * degrees["dp_shard"] * degrees.get("pp", 1) * degrees.get("dp_replicate", 1)
    if degrees["dp_shard"] == 1:
        degrees["zero"] = 0
    plan = tiny_plan(chips, rules=MLP_ONLY, **degrees)
    assert not_executable_reason(plan).endswith(says)
    assert bool(interpreter_reason(plan)) == bool(says) or not not_modules_reason(plan)


@pytest.mark.slow
def test_under_fake_tensors_both_ways_send_and_keep_the_same(monkeypatch):
    """Eight ranks of which none exists: tensor and sequence parallelism, ZeRO 3. Norms are added up over tp before they are cut."""
    config = tiny("llama", num_hidden_layers=2, hidden_size=128, num_attention_heads=16, num_key_value_heads=8, intermediate_size=256)
    plan = tiny_plan(8, model=config, tp=4, dp_shard=2, zero=3, micro_batch=1, batch=2, seq_len=64)
    number = plan.num_microbatches
    modules = torch_counts(plan, 0, [number])[number]
    graph = graph_of(plan)
    by_rules = plan_by_rules(plan, graph)
    monkeypatch.setattr(network_model, "make_tensor", _without_values)
    saved = []
    with fake_group(0, plan.num_chips) as worker:
        for axes in ({"tp_kv"}, {"dp_shard"}):
            NetworkMesh(worker, by_rules.cuts.axes).group(axes)
        with FakeTensorMode(allow_non_fake_inputs=True):
            program = NetworkProgram(worker, graph, by_rules, optimizer="", learning_rate=1e-4)
            program.step()
            counter = CollectiveCounter(program.mesh.label, times_them=False)
            with StorageTracker() as tracker, counter, _before_first_backward(lambda: saved.append(tracker.allocated)):
                program.step()
    sent = {key: (count, counter.tally.num_bytes[key]) for key, count in counter.tally.counts.items()}
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        assert sent[kind, "tp_kv"] == modules.collectives[kind, "tp"]
    for kind in ("all_gather", "reduce_scatter"):
        count, num_bytes = sent[kind, "dp_shard"]
        assert count == modules.collectives[kind, "dp_shard"][0]
        assert num_bytes == pytest.approx(modules.collectives[kind, "dp_shard"][1], rel=0.01)
    assert saved[0] == pytest.approx(modules.saved, rel=0.01)
    assert 0.9 * modules.peak < tracker.peak < 1.01 * modules.peak


def _without_values(network, name, seed, dtype, microbatch=0):
    tensor = network.tensors[name]
    return torch.zeros(tensor.shape, dtype=torch.int64 if tensor.role is TensorRole.INDEX else dtype)
