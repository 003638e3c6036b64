"""The demo: its plans, places and ties, and once for real with a tiny model. No time is asserted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perfmodel.cost.resolve import resolve_estimator
from perfmodel.execute.launch.processor_use import ProcessorUse, processor_use
from perfmodel.execute.measure.rounds import steps_of_a_turn
from perfmodel.execute.runner import executable_reason
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.local import local_cluster
from perfmodel.verbs import demo
from perfmodel.verbs.demo import NUM_RANKS, demo_job, demo_plans, ordered_pairs, places, run_demo
from perfmodel.workload.job import Precision, TrainingJob
from tests.execute.jobs import tiny


def test_the_demo_trains_a_gpt2():
    model = demo_job().model
    assert (model.origin.architecture, model.norms.norm, model.positions.position) == ("gpt2", "layernorm", "learned")
    assert model.mlp.activation == "gelu_tanh"
    assert model.tie_word_embeddings
    assert model.biases.mlp_bias
    assert model.biases.qkv_bias
    assert 5e6 < model.num_parameters < 5e7


def test_every_form_is_there_and_can_be_run():
    estimator = resolve_estimator(
        demo_job(), local_cluster(num_chips=NUM_RANKS), calibration=SPEC_SHEET, profile=load_profile("torch-gloo")
    )
    search, plans = demo_plans(estimator)
    names = " = ".join(name for name, _ in plans).split(" = ")
    expected = {"best found", "data parallel", "ZeRO-2", "FSDP", "tensor parallel", "tensor + sequence parallel", "pipeline parallel"}
    assert expected <= set(names)
    assert len({prediction.plan for _, prediction in plans}) == len(plans)
    assert all(executable_reason(prediction.plan, NUM_RANKS) == "" for _, prediction in plans)
    assert plans[0][1].step_time == min(prediction.step_time for _, prediction in plans)
    assert search.num_evaluated > len(plans)
    by_name = {name: prediction.plan for label, prediction in plans for name in label.split(" = ")}
    assert by_name["data parallel"].layout.dp_replicate == 2
    assert (by_name["FSDP"].zero, by_name["ZeRO-2"].zero) == (3, 2)
    assert by_name["tensor parallel"].layout.tp == by_name["pipeline parallel"].layout.pp == 2


@pytest.mark.parametrize(
    "times, expected",
    [
        ([1.0, 2.0, 3.0], [(1, 1), (2, 2), (3, 3)]),
        ([3.0, 1.0, 2.0], [(3, 3), (1, 1), (2, 2)]),
        ([1.0, 1.1, 2.0], [(1, 2), (1, 2), (3, 3)]),
        ([1.0, 1.1, 1.2], [(1, 2), (1, 3), (2, 3)]),
        ([1.0, 1.0], [(1, 2), (1, 2)]),
    ],
)
def test_plans_that_are_close_share_their_places(times: list[float], expected: list[tuple[int, int]]):
    assert places(times) == expected


def test_only_pairs_that_are_apart_count():
    assert ordered_pairs([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (3, 3)
    assert ordered_pairs([1.0, 3.0, 2.0], [1.0, 2.0, 3.0]) == (3, 2)
    assert ordered_pairs([2.0, 1.0], [1.0, 1.1]) == (0, 0)


@pytest.mark.parametrize("expected_time, steps", [(0.8, 6), (5.0, 4), (8.0, 2), (80.0, 2)])
def test_a_slow_machine_times_fewer_steps_a_round(expected_time: float, steps: int):
    assert steps_of_a_turn(43.0, 8, expected_time) == steps


def test_what_other_processes_took_is_what_is_busy_and_not_ours(tmp_path: Path):
    """proc(5): the first line of stat in clock ticks; of a process, utime and stime are the 14th and 15th field."""
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "7").mkdir()

    def at(user: int, idle: int, busy: int) -> ProcessorUse:
        (tmp_path / "stat").write_text(f"cpu  {user * tick} 0 0 {idle * tick} 0 0 0 0 0 0\ncpu0 0\n")
        (tmp_path / "7" / "stat").write_text(f"7 (python (3) x) R {' '.join(['0'] * 10)} {busy * tick} 0 0 0\n")
        return processor_use([7], proc=tmp_path)

    earlier, later = at(100, 100, 10), at(130, 110, 20)
    this_process = later.measured - earlier.measured - 10
    assert later.others_since(earlier) == pytest.approx((20 - this_process) / 40)
    assert earlier.others_since(earlier) == 0
    nowhere = processor_use([7], proc=tmp_path / "none")
    assert nowhere.others_since(nowhere) == 0


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_with_a_tiny_model(brief_machine, monkeypatch, tmp_path: Path):
    def measured_before(ranks, *, brief, group, progress):
        assert (ranks, brief, len(group.pids)) == (NUM_RANKS, True, NUM_RANKS)
        for share, what in brief_machine[1]:
            progress(share, what)
        return brief_machine[0]

    monkeypatch.setattr(demo, "measure_machine", measured_before)
    job = TrainingJob(model=tiny("gpt2"), global_batch=8, seq_len=32, precision=Precision.FP32)
    seen: list[tuple[float, str]] = []
    path = tmp_path / "here.yaml"
    result = run_demo(lambda share, what: seen.append((share, what)), calibration_path=path, job=job, rounds=1)
    assert path.exists()
    assert len(result.rows) >= 6
    times = [row.comparison.prediction.step_time for row in result.rows]
    assert times == sorted(times)
    assert all(row.comparison.measurement.gradient_error < 1e-3 for row in result.rows)
    assert all(row.comparison.measurement.peak_memory > 0 for row in result.rows)
    assert 0 <= result.pairs_right <= result.pairs_apart
    assert result.worst_error == max(abs(row.comparison.time_error) for row in result.rows)
    assert set(result.elapsed) == {"calibrate", "search", "run"}
    assert seen[-1][0] <= 1.0
    assert seen[0][0] < 0.1
