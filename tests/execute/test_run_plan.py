"""A plan run and measured: what the record holds, and what is refused before anything starts."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import perfmodel
from perfmodel.execute.run import run_plan
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.results import append_measurement, read_measurements
from perfmodel.workload.job import Precision
from tests.execute.jobs import tiny, tiny_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_measures_time_memory_and_traffic(groups, tmp_path):
    plan = tiny_plan(2, zero=3)
    measurement = run_plan(plan, steps=5, warmup=1, group=groups(2))
    assert measurement.plan == plan
    assert measurement.step_times == tuple(sorted(measurement.step_times, key=measurement.step_times.index))
    assert min(measurement.step_times) > 0
    assert sorted(measurement.step_times)[2] == measurement.step_time
    assert 0 <= measurement.step_time_spread <= max(measurement.step_times) - min(measurement.step_times)
    phases = {name: time for name, time in measurement.parts.items() if not name.startswith("communication.")}
    assert set(phases) == {"forward", "backward", "gradient_sync", "optimizer"}
    assert measurement.parts["communication.dp_shard"] > 0
    # at least the sharded weights, gradients and optimizer state of a rank
    assert measurement.peak_memory > plan.job.model.num_parameters * 16 / 2
    assert {(record.kind, record.axis) for record in measurement.collectives} == {
        ("all_gather", "dp_shard"),
        ("reduce_scatter", "dp_shard"),
    }
    assert measurement.gradient_error < 1e-4
    path = tmp_path / "measurements.jsonl"
    append_measurement(measurement, path)
    append_measurement(replace(measurement, loss=1.0), path)
    assert read_measurements(path) == (measurement, replace(measurement, loss=1.0))


def test_memory_is_the_same_from_run_to_run_and_smaller_when_sharded(groups):
    model = tiny(hidden_size=256, head_dim=32, intermediate_size=512)
    options = dict(steps=1, warmup=1, group=groups(2), check_gradients=False)
    replicated, again = (run_plan(tiny_plan(2, model=model), **options).peak_memory for _ in range(2))
    assert again == pytest.approx(replicated, rel=1e-3)
    sharded = run_plan(tiny_plan(2, model=model, zero=3), **options).peak_memory
    # half of weights, gradients and two optimizer states stay away, but one unit's are there whole at the peak
    assert replicated - sharded > 0.5 * model.num_parameters * 16 / 2


def test_full_recomputation_saves_memory_and_selective_saves_scores(groups):
    options = dict(steps=1, warmup=1, group=groups(2), check_gradients=False)

    def peak(**knobs):
        return run_plan(tiny_plan(2, seq_len=64, micro_batch=4, attention="unfused", **knobs), **options).peak_memory

    none, selective, full = peak(), peak(recompute="selective"), peak(recompute="full")
    assert full < selective < none


def test_losses_of_unlike_forms_are_the_same(groups):
    """Losses of the other forms are compared with those of one process in test_gradients.py."""
    options = dict(steps=1, warmup=0, group=groups(2), check_gradients=False)
    losses = [run_plan(tiny_plan(2, **knobs), **options).loss for knobs in (dict(), dict(zero=3), dict(pp=2, micro_batch=2))]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


ALONE = """
import sys
from perfmodel.execute.audit.audit import CountingProcess
import perfmodel
from perfmodel.execute.run import run_plan
from tests.execute.jobs import tiny_plan
if __name__ == "__main__":
    print(run_plan(tiny_plan(1), steps=2, warmup=0).collectives == ())
    with CountingProcess() as process:
        print(process.count(tiny_plan(1), 0).counts.parameters > 0)
    print("torch" in sys.modules)
"""


def test_one_process_is_a_plan_too_and_its_parent_imports_no_torch_and_leaves_nothing(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "plan, options, says",
    [
        (tiny_plan(512, batch=512), {}, "--shrink"),
        (tiny_plan(2, precision=Precision.FP16_MIXED), {}, "loss scaling"),
        (tiny_plan(2), dict(device="tpu"), "device=tpu"),
        (tiny_plan(2), dict(steps=0), "steps=0"),
        (tiny_plan(2, model=tiny(hidden_size=65536, intermediate_size=2**20)), dict(device="cpu"), "GiB"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(plan, options, says):
    with pytest.raises(InputError, match=says):
        run_plan(plan, **options)


MINE = """\
name: heads-by-context
source: a test
rules:
  batch: [dp_replicate, dp_shard]
  s: [cp]
  s_res: [cp]
  attn_kv_heads: [cp]
  ffn: [tp]
"""


@pytest.mark.usefixtures("audits_share_a_process")
def test_the_users_own_rules_are_searched_saved_audited_and_run(groups, tmp_path):
    """Not one of the shipped sets, but with one rank of tp it cuts as Ulysses does, which the executor realises."""
    rules, saved = tmp_path / "mine.yaml", tmp_path / "plan.yaml"
    rules.write_text(MINE, encoding="utf-8")
    job = dict(model=tiny(), cluster="dgx-h100", chips=2, global_batch=4, seq_len=32, precision="fp32", profile="torch-gloo")
    search = perfmodel.find_plans(**job, rules=["megatron", rules], cp=2, recompute="none", only_runnable=True, top=50)
    assert {candidate.plan.rule_set for candidate in search.plans} == {"megatron", "heads-by-context"}
    best = next(
        candidate.plan for candidate in search.plans if candidate.plan.rule_set == "heads-by-context" and candidate.plan.micro_batch == 2
    )
    perfmodel.write_plan(best, saved)
    rules.unlink()
    plan = perfmodel.read_plan(saved)
    assert plan.rules == best.rules
    assert perfmodel.audit_plan(plan).differences() == []
    measured = run_plan(plan, steps=1, warmup=0, group=groups(2))
    assert measured.gradient_error < 1e-4
    assert ("all_to_all", "cp") in {(record.kind, record.axis) for record in measured.collectives}
    append_measurement(measured, tmp_path / "runs.jsonl")
    assert read_measurements(tmp_path / "runs.jsonl") == (measured,)


def test_rules_that_the_executor_does_not_realise_are_refused(tmp_path):
    rules = tmp_path / "mine.yaml"
    rules.write_text(MINE, encoding="utf-8")
    job = dict(model=tiny(), cluster="dgx-h100", chips=2, global_batch=4, seq_len=32, profile="torch-gloo", rules=rules, tp=2)
    plan = perfmodel.predict(**job, precision="fp16-mixed").plan
    for verb in (perfmodel.run_plan, perfmodel.audit_plan):
        with pytest.raises(InputError, match="rules=heads-by-context: the executor cuts operators as one of megatron"):
            verb(plan)
    with pytest.raises(InputError, match="rules=heads-by-context: torch-gloo cuts operators as one of megatron"):
        perfmodel.find_plans(**job, only_runnable=True)
