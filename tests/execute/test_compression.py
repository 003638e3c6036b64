"""Compressed gradients of real runs: torch's hooks under DDP, on flat units, and their documented mathematics agree."""

import numpy as np
import pytest

from perfmodel.execute.launch.rank_results import TOLERANCE
from perfmodel.execute.run import run_plan
from perfmodel.execute.runner import executable_reason, gradient_error, gradient_tolerance
from perfmodel.execute.uniform.gradient_check import check_gradients_on_rank
from perfmodel.foundation.errors import RunError
from perfmodel.workload.job import Precision
from tests.execute.audit.test_audit import differing_rows, predicted
from tests.execute.jobs import check_with_lost_error_feedback, reduced_by_ddp_and_by_unit, tiny, tiny_plan, worst_error

WORDS = ("fp16", "bf16", "powersgd:1", "powersgd:3")
#: Every axis next to data parallelism. gpt2: biases, positions, and a table that both stages hold.
FORMS = {
    "data, accumulated": (2, "llama", dict(micro_batch=2)),
    "context": (2, "gpt2", dict(cp=2)),
    "tensor and sequence": (4, "llama", dict(tp=2, micro_batch=2)),
    "pipeline": (4, "gpt2", dict(pp=2, micro_batch=2)),
    "experts, one copy of each": (2, "mixtral", dict(ep=2, micro_batch=2)),
    "experts, two copies of each": (4, "mixtral", dict(ep=2, micro_batch=2)),
}
RUNS = [(form, word) for form, (_, variant, _) in FORMS.items() for word in WORDS[: 2 if variant == "mixtral" else None]]


def compressed(form, word, **more):
    num_ranks, variant, knobs = FORMS[form]
    return tiny_plan(num_ranks, model=tiny(variant), profile=f"torch-gloo+gradient_compression={word}", **knobs, **more)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["fp16", "powersgd:1", "powersgd:3"])
def test_a_flat_unit_reduces_as_ddp_does_with_the_hook(word, groups):
    """The oracle: DDP's own gradients and messages, and P P^T M computed by numpy, of matrices of 40 x 48 and 24 x 40."""
    for gradients, by_ddp, by_unit in groups(2).call(reduced_by_ddp_and_by_unit, word):
        assert by_ddp == by_unit
        rank = {"powersgd:1": 1, "powersgd:3": 3}.get(word, 0)
        assert by_unit == ([(40, 4), ((40 + 24) * rank, 4), ((48 + 40) * rank, 4)] if rank else [(40 + 40 * 48 + 24 * 40, 2)])
        for of_ddp, of_unit, expected in gradients:
            np.testing.assert_allclose(of_unit, of_ddp, rtol=0, atol=1e-6 * np.abs(of_ddp).max())
            np.testing.assert_allclose(of_unit, expected, rtol=0, atol=(1e-5 if rank else 4e-3) * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("form, word", RUNS)
def test_gradients_equal_those_of_one_process_within_the_rounding(form, word, groups):
    plan = compressed(form, word)
    results = groups(plan.num_chips).call(check_gradients_on_rank, plan)
    name, error = worst_error(results)
    assert error < gradient_tolerance(plan), name
    assert gradient_error(results, gradient_tolerance(plan)) == error
    is_low = plan.compression.is_low_rank
    assert (gradient_tolerance(plan) == TOLERANCE) == is_low
    assert any(name.startswith("compression of ") for errors in results for name in errors) == is_low


@pytest.mark.slow
def test_factors_without_error_feedback_fail_the_check(groups):
    plan = compressed("data, accumulated", "powersgd:1")
    with pytest.raises(RunError, match="differs from one process"):
        gradient_error(groups(2).call(check_with_lost_error_feedback, plan), gradient_tolerance(plan))


@pytest.mark.slow
@pytest.mark.parametrize("form, word", RUNS)
def test_audits_count_the_messages(form, word, counting):
    assert differing_rows(counting, compressed(form, word, precision=Precision.BF16_MIXED)) == []


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bf16", "powersgd:2"])
def test_a_run_issues_the_predicted_messages(word, groups):
    """Counted by torch's dispatcher in a real step on gloo processes."""
    plan = compressed("tensor and sequence", word)
    measured = run_plan(plan, steps=1, warmup=1, device="cpu", group=groups(4))
    issued = {(row.kind, row.axis): (row.count, row.num_bytes) for row in measured.collectives}
    assert issued == predicted(plan, 0).collectives
    assert 0.0 < measured.gradient_error < gradient_tolerance(plan)


def test_what_the_interpreter_runs_is_refused_by_name():
    plan = tiny_plan(2, model=tiny("llama"), recompute="selective", recompute_operators=("attention_norm",), attention="unfused",
        profile="torch-gloo+gradient_compression=fp16")  # fmt: skip
    assert executable_reason(plan, 8).startswith("gradient_compression=fp16: the interpreter that runs such plans sums gradients")
