"""Runs of adapters on a frozen base: gradients of the adapters alone, and the collectives of the frozen graph."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfmodel.cost.counts import executor_profile
from perfmodel.cost.estimate import memory_on_rank
from perfmodel.execute.audit.count import _before_first_backward
from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.measure.instrument import StorageTracker
from perfmodel.execute.per_operator.model import NetworkProgram
from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan
from perfmodel.execute.run import run_plan
from perfmodel.parallel.executable import not_executable_reason, not_modules_reason
from perfmodel.parallel.per_operator.by_rules import graph_of, plan_by_rules
from perfmodel.workload.adapters import SCALE
from perfmodel.workload.training import training_of
from tests.cost.jobs import estimator_of
from tests.execute.jobs import tiny, tiny_plan
from tests.marks import NIGHTLY

pytestmark = [pytest.mark.timeout(600)]


def adapted(train, *given, **knobs):
    plan = tiny_plan(*given, **knobs)
    return replace(plan, job=replace(plan.job, train=training_of(train)))


def program_of(plan, dtype=torch.float64):
    graph = graph_of(plan)
    return NetworkProgram(Worker(rank=0, world_size=1, device="cpu"), graph, plan_by_rules(plan, graph), dtype=dtype)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_gradients_are_those_of_weights_with_the_adapters_in_them(variant):
    """W' = W + s B A: the gradient of A is s B^T dW', that of B s dW' A^T, and the loss is the same."""
    plan = adapted("lora:4", 1, model=tiny(variant), batch=2, micro_batch=2)
    program, merged = program_of(plan), program_of(replace(plan, job=replace(plan.job, train=training_of("full"))))
    adapters, weights = program.parameters.tensors, merged.parameters.tensors
    names = [name.removesuffix("_lora_a.weight") for name in adapters if name.endswith("_lora_a.weight")]
    assert adapters.keys() == {f"{name}_lora_{part}.weight" for name in names for part in "ab"}

    def flat(tensor, rows):
        return tensor.detach().reshape(rows, -1)

    pairs = {
        name: (flat(adapters[f"{name}_lora_a.weight"], 4), flat(adapters[f"{name}_lora_b.weight"].movedim(-1, 0), 4).T) for name in names
    }
    for name, tensor in program.parameters.frozen.items():
        weights[name].detach().copy_(tensor)
    for name, (a, b) in pairs.items():
        weight = weights[f"{name}.weight"]
        weight.detach().add_((SCALE * b @ a).reshape(weight.shape))
    assert float(program.forward_backward()) == pytest.approx(float(merged.forward_backward()), rel=1e-9)
    gradients, merged_gradients = program.gradients(), merged.gradients()
    assert gradients.keys() == adapters.keys()
    for name, (a, b) in pairs.items():
        gradient = merged_gradients[f"{name}.weight"].reshape(len(b), -1)
        torch.testing.assert_close(flat(gradients[f"{name}_lora_a.weight"], 4), SCALE * b.T @ gradient, atol=1e-9, rtol=1e-6)
        torch.testing.assert_close(
            flat(gradients[f"{name}_lora_b.weight"].movedim(-1, 0), 4).T, SCALE * gradient @ a.T, atol=1e-9, rtol=1e-6
        )


@pytest.mark.parametrize(
    "train, recompute",
    [
        ("lora:4", "none"),
        ("lora:4:o_proj", "none"),
        *(pytest.param(*form, marks=pytest.mark.slow) for form in [("lora:4", "full"), ("lora:4:q_proj+v_proj", "none")]),
    ],
)
@pytest.mark.slow
def test_torch_counts_what_is_predicted(train, recompute):
    """FLOP of a step exactly, what its forward pass keeps to the tokens."""
    plan = adapted(train, 1, model=tiny("gpt2"), batch=2, micro_batch=2, attention="unfused", recompute=recompute)
    estimator = estimator_of(plan.job, chips=1, node=1, profile=executor_profile(plan.job.policy))
    program = program_of(plan, None)
    with FlopCounterMode(display=False) as counter:
        program.forward_backward()
    program.release()
    kept = []
    with StorageTracker() as tracker, _before_first_backward(lambda: kept.append(tracker.allocated)):
        program.forward_backward()
    prediction = estimator.predict(plan)
    assert counter.get_total_flops() == pytest.approx(prediction.hfu * prediction.step_time * prediction.peak_flop_rate, rel=1e-12)
    assert kept[0] == pytest.approx(memory_on_rank(estimator, plan, 0)[0], rel=0.01)


FORMS = [
    ("llama", dict(tp=2, dp_shard=2, zero=3, micro_batch=2)),
    ("gpt2", dict(tp=2, dp_shard=2, zero=1, micro_batch=2, recompute="selective", attention="unfused", sequence_parallel=False)),
    ("llama", dict(pp=2, dp_shard=2, zero=3)),
]
MORE_FORMS = [
    ("olmo2", dict(tp=2, pp=2, zero=1, micro_batch=2, recompute="full")),
    ("llama", dict(dp_replicate=2, dp_shard=2, zero=3, recompute="full")),
    ("llama", dict(cp=2, tp=2, zero=3, micro_batch=4, order=("cp", "tp", "dp_replicate", "dp_shard", "pp"))),
    ("gpt2", dict(pp=2, dp_shard=2, zero=1)),
    ("gemma2", dict(cp=4, zero=2)),
    ("falcon", dict(dp_replicate=4)),
]


FEW_OPERATORS = "lora:2:o_proj+up_proj"


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, knobs, train",
    [
        *((*form, "lora:4") for form in FORMS),
        (*MORE_FORMS[0], "lora:4"),
        (*MORE_FORMS[2], FEW_OPERATORS),
        *(pytest.param(*form, "lora:4", marks=NIGHTLY) for form in MORE_FORMS[1:]),
        *(pytest.param(*form, FEW_OPERATORS, marks=NIGHTLY) for form in (*FORMS, *MORE_FORMS[:2], *MORE_FORMS[3:])),
    ],
)
def test_plans_of_every_form_equal_one_process(variant, knobs, train, groups):
    plan = adapted(train, 4, model=tiny(variant), **knobs)
    assert not_executable_reason(plan) == ""
    result = check_network_plan(graph_of(plan), plan_by_rules(plan, graph_of(plan)), NetworkOptions(steps=2), group=groups(4))
    assert max(result.gradient_error, result.loss_error) < 1e-9
    assert all("_lora_" in row.tensor for row in result.traffic if row.what in ("gradient", "sum"))


@pytest.mark.slow
def test_run_plan_trains_adapters(groups):
    plan = adapted("lora:4", 4, tp=2, dp_shard=2, zero=3, micro_batch=2)
    assert run_plan(plan, steps=1, warmup=1, group=groups(4)).gradient_error < 1e-4


def test_training_that_is_not_run_has_a_reason():
    assert not_modules_reason(adapted("lora:4", 1)).startswith("train=lora:4: torch's own modules train all parameters")
    assert not_executable_reason(adapted("qlora:4:q_proj", 1)).endswith("no weights in nf4-dq; use train=lora:4:q_proj")
    assert not_executable_reason(adapted("galore:4", 1)).endswith("projects no gradients; use train=full")
    assert not_executable_reason(adapted("dora:4:q_proj", 1)).endswith("no magnitudes of rows; use train=lora:4:q_proj")
