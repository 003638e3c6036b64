"""A step of many microbatches, counted from two short ones, has the counts of the whole step."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields, replace

import pytest

from perfmodel.cli import app as cli
from perfmodel.cost.counts import RankCounts
from perfmodel.execute.audit.audit import ranks_to_audit
from perfmodel.execute.audit.repeat import counted_microbatches, extrapolate, with_microbatches
from perfmodel.parallel.plan import place_of
from perfmodel.parallel.plan_file import write_plan
from perfmodel.workload.job import Precision
from tests.execute.jobs import tiny, tiny_plan
from tests.marks import NIGHTLY, mostly_nightly

SCHEDULES = {
    "no pipeline": dict(num_chips=2),
    "gpipe": dict(num_chips=4, pp=2, schedule="gpipe"),
    "1f1b": dict(num_chips=4, pp=2),
    "1f1b of four": dict(num_chips=8, pp=4),
    "interleaved": dict(num_chips=4, pp=2, schedule="interleaved", virtual_stages=2),
}
#: ZeRO stages that each is counted with: all under 1F1B, elsewhere those whose programs differ most.
STAGES = {"no pipeline": (0, 3), "gpipe": (0, 3), "1f1b": (0, 1, 2, 3), "1f1b of four": (1, 3), "interleaved": (2,)}
#: In `make test` one ZeRO stage of each schedule; GPipe is counted below.
KEPT_STAGES = [("no pipeline", 0), ("1f1b", 3), ("interleaved", 2)]
#: Any further microbatches will do: more than those that are counted.
FURTHER = 2

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def a_plan(schedule: str, zero: int, **changes):
    sharding = dict(zero=zero) if zero else {}
    virtual_stages = SCHEDULES[schedule].get("pp", 1) * SCHEDULES[schedule].get("virtual_stages", 1)
    return tiny_plan(batch=256, **{"model": tiny(num_hidden_layers=max(2, virtual_stages)), **SCHEDULES[schedule], **sharding, **changes})


def unequal(counting, plan) -> list[object]:
    """Return the differences between the complete and the extrapolated count, on the first and on the last stage."""
    ranks = ranks_to_audit(plan, every_stage=False)
    differences: list[object] = []
    for rank in ranks:
        numbers = counted_microbatches(plan, place_of(plan, rank)["pp"])
        assert len(numbers) == 2
        num_microbatches = max(numbers) + FURTHER
        step = with_microbatches(plan, num_microbatches)
        exact = counting.count(step, rank).counts
        short = counting.count(step, rank, numbers).counts
        differences += [
            (rank, field.name, getattr(short, field.name), getattr(exact, field.name))
            for field in fields(RankCounts)
            if getattr(short, field.name) != getattr(exact, field.name)
        ]
    return differences


@pytest.mark.slow
@needs_torch
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("schedule", "zero"), mostly_nightly([(name, zero) for name, stages in STAGES.items() for zero in stages], KEPT_STAGES)
)
def test_further_microbatches_repeat_the_last(counting, schedule, zero):
    assert unequal(counting, a_plan(schedule, zero)) == []


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param(dict(schedule="1f1b", zero=3, num_chips=16, dp_shard=2, tp=2, precision=Precision.BF16_MIXED), marks=NIGHTLY),
        pytest.param(dict(schedule="interleaved", zero=2, num_chips=8, cp=2, recompute="full"), marks=NIGHTLY),
        dict(schedule="gpipe", zero=1, num_chips=8, tp=2, recompute="selective", model=tiny("gpt2", num_hidden_layers=2)),
    ],
    ids=["mixed precision, dp_replicate, tp", "cp, full recomputation", "selective recomputation"],
)
def test_so_they_do_with_every_axis(counting, knobs):
    knobs = dict(knobs)
    assert unequal(counting, a_plan(knobs.pop("schedule"), knobs.pop("zero"), **knobs)) == []


def test_few_microbatches_are_counted_whole():
    plan = a_plan("no pipeline", 0)
    assert counted_microbatches(with_microbatches(plan, 5)) == (5,)
    assert counted_microbatches(with_microbatches(plan, 6)) == (2, 3)


def test_numbers_of_microbatches_obey_the_schedule():
    assert [counted_microbatches(a_plan("1f1b of four", 0), stage) for stage in (0, 3)] == [(5, 6), (2, 3)]
    assert counted_microbatches(a_plan("gpipe", 0)) == (2, 3)
    assert counted_microbatches(a_plan("interleaved", 0)) == (6, 8)


def test_only_the_number_of_microbatches_changes():
    plan = a_plan("gpipe", 1)
    fewer = with_microbatches(plan, 3)
    assert fewer.num_microbatches == 3
    assert replace(fewer, job=plan.job) == plan


def test_a_line_is_drawn_through_every_count():
    def counts(m):
        return RankCounts(
            flops={(1, 2): 10.0 * m},
            collectives={("all_reduce", "tp"): (2 * m + 1, 8.0 * m + 4.0), ("all_gather", "tp"): (1, 16.0)},
            parameters=5.0,
            gradients=6.0,
            optimizer=7.0,
            peak=100.0 + m,
        )

    assert extrapolate({2: counts(2), 4: counts(4)}, 100) == counts(100)
    assert extrapolate({7: counts(7)}, 7) == counts(7)


@needs_torch
@pytest.mark.slow
@pytest.mark.usefixtures("audits_share_a_process")
def test_an_audit_says_how_many_it_counted(tmp_path, capfd):
    path = tmp_path / "plan.yaml"
    write_plan(replace(tiny_plan(8, zero=3, batch=64, model=tiny(num_hidden_layers=2)), cluster="dgx-h100"), path)
    assert cli.run(["audit", str(path)]) == 0
    assert "counted with 2 and 3 of 8, which is exact as every further one repeats the last" in " ".join(capfd.readouterr().out.split())
    assert cli.run(["audit", str(path), "--every-microbatch", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["counted_microbatches"] == [8]
