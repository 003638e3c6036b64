"""Schedules from files in torch's notation: what is read, what is refused, and plans with them."""

from dataclasses import replace

import pytest

from perfmodel import predict
from perfmodel.cost.schedules import SCHEDULES, schedule_of
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.layout import Placement, stages_of_ranks
from perfmodel.parallel.pass_orders import PAIRED_BACKWARD
from perfmodel.parallel.plan_file import read_plan, write_plan
from perfmodel.parallel.schedule_table import ScheduleTable, read_schedule, table_of

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=16, global_batch=64, seq_len=2048, pp=4, zero=2, profile="torch-fsdp2")
LOOP = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
SPLIT = ["0F0,0F1,0I0,0I1,0W0,0W1", "1F0,1I0,1F1,1I1,1W0,1W1"]
V = ["0F0,0F1,3F0,3I0,3W0,3F1,0I0,0W0,3B1,0B1", "1F0,2F0,1F1,2F1,2B0,1B0,2I1,2W1,1B1"]


def lines_of(schedule, p, m, v):
    """The orders of a schedule by name in torch's notation."""
    lines = []
    for rank, stages in enumerate(stages_of_ranks(p, p * v, schedule.placement)):
        cells: list[str] = []
        for kind, chunk, index in SCHEDULES[schedule].order(rank, p, m, v):
            text = f"{stages[chunk]}{kind}{index}"
            paired = f"{stages[chunk]}B{index}"
            cells = [*cells[:-1], f"({cells[-1]};{paired})OVERLAP_F_B"] if kind == PAIRED_BACKWARD else [*cells, text]
        lines.append(",".join(cells))
    return lines


@pytest.mark.parametrize("lines, placement, chunks, splits", [(LOOP, "loop", 1, False), (SPLIT, "loop", 1, True), (V, "v", 2, True)])
def test_orders_and_what_follows_from_them(lines, placement, chunks, splits):
    table = table_of("mine", lines, where="mine.csv")
    assert (table.placement, table.num_chunks, table.splits_backward) == (placement, chunks, splits)
    assert (table.num_ranks, table.num_microbatches, str(table)) == (2, 2, "mine")
    assert table_of("mine", table.lines, where="") == table


@pytest.mark.parametrize("schedule, v", [(PipelineSchedule.ZBV, 2), (PipelineSchedule.DUALPIPEV, 2), (PipelineSchedule.INTERLEAVED, 3)])
def test_orders_of_known_schedules_come_back(schedule, v):
    table = table_of("mine", lines_of(schedule, 4, 8, v), where="mine.csv")
    for rank in range(4):
        assert list(table.orders[rank]) == SCHEDULES[schedule].order(rank, 4, 8, v)
    assert table.placement is schedule.placement


@pytest.mark.parametrize(
    "lines, sentence",
    [
        ([], "has 0 lines: a schedule has one for each of at least two ranks"),
        (LOOP[:1], "has 1 lines"),
        (["0F0,0X0", LOOP[1]], "line 1, action 2: '0X0' is no pass; write 0F0"),
        (["0F0,0SEND_F0", LOOP[1]], "'0SEND_F0' is no pass"),
        (["0F0,0B0,1F0,1B0", LOOP[1]], "stage 1 is on the ranks 0 and 1"),
        (["0F0,0B0", "2F0,2B0"], "no rank runs stage 1 of 3"),
        (["1F0,1B0", "0F0,0B0"], "rank 0 has the stages 1 of 2: stages must go over the 2 ranks in turn (k % p) or in a V"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1"], "1I1 is missing on rank 1; run it once, or 1B1 in place of both parts"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0"], "1F1 is missing on rank 1"),
        (["0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1B1"], "1W0 is missing on rank 1"),
        (["0F0,0F0,0F1,0B0,0B1", LOOP[1]], "0F0 occurs more than once on rank 0"),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1I0,1W0,1F1,1B1"], "the backward pass 1B0 runs twice on rank 1"),
        (["0F0,0F1,0B0,0B1", "1B0,1F0,1F1,1B1"], "1B0 comes before 1F0 on rank 1; change their order"),
        (["0F0,0F1,0I0,0W0,0B1", "1F0,1W0,1I0,1F1,1B1"], "1W0 comes before 1I0 on rank 1"),
        (["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "the ranks wait for each other: rank 0 waits at 0B0, rank 1 waits at 1F1"),
    ],
)
def test_one_sentence_for_each_fault(lines, sentence):
    with pytest.raises(InputError) as error:
        table_of("mine", lines, where="mine.csv")
    assert str(error.value).startswith("mine.csv: ")
    assert sentence in str(error.value)


def test_pairs_idle_cells_and_spaces_as_torch_writes_them(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("0F0,,0F1,0B0,0B1\n\n,1F0,(1F1; 1B0)OVERLAP_F_B, 1B1\n")
    table = read_schedule(path, "schedule")
    assert isinstance(table, ScheduleTable)
    assert table.orders[1] == (("F", 0, 0), ("F", 0, 1), ("&", 0, 0), ("B", 0, 1))
    assert table.lines[1] == "1F0,(1F1; 1B0)OVERLAP_F_B,1B1"


@pytest.fixture
def file(tmp_path):
    def write(schedule, p=4, m=16, v=2):
        path = tmp_path / f"my {schedule}.csv"
        path.write_text("\n".join(lines_of(schedule, p, m, v)))
        return path

    return write


@pytest.mark.parametrize("schedule, v", [(PipelineSchedule.ZBV, 2), (PipelineSchedule.DUALPIPEV, 2)])
def test_a_file_with_a_known_order_is_predicted_as_that_schedule(schedule, v, file):
    """The time and the memory to the bit: both are simulated."""
    known, same = predict(**JOB, schedule=str(schedule)), predict(**JOB, schedule=str(file(schedule)))
    assert same.step_time == known.step_time
    assert same.parts == known.parts
    assert same.memory == known.memory
    assert same.plan.virtual_stages == v


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_a_file_with_an_order_of_a_closed_form_is_predicted_nearly_as_it(schedule, file):
    schedule = PipelineSchedule(schedule)
    v = 2 if schedule.needs_chunks else 1
    known, same = predict(**JOB, schedule=str(schedule), virtual_stages=v), predict(**JOB, schedule=file(schedule, v=v))
    assert same.step_time == pytest.approx(known.step_time, rel=0.01)
    assert same.memory["total"] == pytest.approx(known.memory["total"], rel=0.02)
    assert same.memory["activations"] == pytest.approx(known.memory["activations"], rel=0.02)


def test_a_plan_file_has_the_orders(tmp_path, file):
    plan = predict(**JOB, schedule=file(PipelineSchedule.DUALPIPEV)).plan
    write_plan(plan, tmp_path / "plan.yaml")
    (tmp_path / "my dualpipev.csv").unlink()
    again = read_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert again.hash() == plan.hash() != replace(plan, schedule=PipelineSchedule.DUALPIPEV).hash()
    assert predict(tmp_path / "plan.yaml").step_time == predict(**JOB, schedule="dualpipev").step_time


@pytest.mark.parametrize(
    "knobs, sentence",
    [
        ({"global_batch": 128}, "with micro_batch=1 it is 32 microbatches, and schedule=my zbv has the orders of 16; use global_batch=64"),
        ({"pp": 2}, "pp=2: schedule=my zbv has the orders of 4 ranks; use pp=4"),
        ({"virtual_stages": 1}, "schedule=my zbv has 2 stages on a rank"),
        ({"recompute": "full"}, "with schedule=my zbv torch recomputes a layer for each of its weights"),
    ],
)
def test_plans_that_do_not_match_the_file(knobs, sentence, file):
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        predict(**{**JOB, "schedule": file(PipelineSchedule.ZBV), **knobs})


def test_the_order_of_a_file_is_the_one_that_is_simulated():
    table = table_of("mine", V, where="mine.csv")
    assert [schedule_of(table).order(rank, 2, 2, 2) for rank in range(2)] == list(map(list, table.orders))
    assert schedule_of(table).placement is Placement.V
