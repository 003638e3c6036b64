"""Tables for people: every number with its unit, nothing lost, nothing cut."""

import sys

import pytest

import perfmodel
from perfmodel.cli.output import Output, print_blocks, print_table
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_step
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.training_run import training_time
from perfmodel.report.predictions import basis_lines, headline, memory_table, parts_table, settings_table
from perfmodel.report.search_tables import baselines_table, plans_table, rejected_table
from perfmodel.report.searches import other_lines
from perfmodel.report.table import bar

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)


@pytest.fixture(scope="module")
def prediction():
    return perfmodel.predict(**JOB, tp=2, pp=2)


@pytest.fixture(scope="module")
def result():
    return perfmodel.find_plans(**JOB)


def test_every_part_that_takes_time_has_a_row_and_they_end_in_the_step(prediction):
    table = parts_table(prediction)
    assert len(table.rows) == sum(time > 0 for time in prediction.parts.values()) + 1
    assert table.rows[-1][0] == "step"


def test_every_class_of_memory_has_a_row_and_they_end_in_the_total(prediction):
    table = memory_table(prediction)
    assert len(table.rows) == sum(size > 0 for size in prediction.memory.values())
    assert table.rows[-1][0] == "total"


def test_what_does_not_fit_says_by_how_much():
    table = memory_table(perfmodel.predict(**dict(JOB, chips=8, model="gpt3-175b", seq_len=2048)))
    assert "over by" in table.rows[-1][-1]


def test_the_peak_and_the_convention_are_shown_with_the_utilisation(prediction):
    text = " ".join(value for _, value in headline(prediction, verbose=True))
    assert "PaLM" in text
    assert "attention below the diagonal only" in text
    assert "989 TFLOP/s dense bf16" in text


def test_the_basis_names_no_part_that_takes_no_time(prediction):
    assert basis_lines(prediction)[0] == "calibrated: h100"
    assert not any("recompute" in line or "context parallel" in line for line in basis_lines(prediction))


@pytest.mark.slow
def test_a_knob_that_all_plans_share_leaves_the_table(result):
    table = plans_table(result)
    knobs = [cell for header in table.headers[6:] for cell in {row[table.headers.index(header)] for row in table.rows}]
    assert len(knobs) >= 2
    assert (len(table.rows), len(baselines_table(result).rows)) == (10, 3)
    assert all(len(row) == len(table.headers) for row in table.rows)
    assert table.caption == "in every row: micro 1, recompute none"


def test_the_best_plans_are_no_wider_than_a_screen(capsys):
    result = perfmodel.find_plans(**JOB | {"model": "llama-3-70b", "profile": "megatron"})
    print_blocks([plans_table(result), baselines_table(result)], Output())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    lines = other_lines(result)
    orders = {"-".join(kind.prediction.plan.order) for kind in result.ranking.kinds}
    assert orders == {"-".join(DEFAULT_ORDER)} or all(order in lines[0] for order in orders)
    assert sum(line.startswith("as good as") for line in lines) == sum(bool(kind.alike) for kind in result.ranking.kinds) > 0


@pytest.mark.slow
def test_the_form_of_context_parallelism_has_a_column_where_it_differs(capsys):
    result = perfmodel.find_plans(model="llama-2-7b", cluster="dgx-h100", chips=16, global_batch=16, seq_len=131072, profile="megatron")
    table = plans_table(result)
    assert [row[-4] for row in table.rows] == [
        "ulysses" if "ulysses" in kind.prediction.plan.rule_set else "-" for kind in result.ranking.kinds
    ]
    print_blocks([table], Output())
    printed = capsys.readouterr().out
    assert "cp form" in printed
    assert max(map(len, printed.splitlines())) <= 100
    named = perfmodel.find_plans(model="gpt2", cluster="dgx-h100", chips=8, global_batch=8, seq_len=1024, rules="ddp")
    assert "rules ddp" in plans_table(named).caption


@pytest.mark.slow
def test_rejected_plans_and_layouts_are_counted(result):
    counts = [int(row[0].replace(",", "")) for row in rejected_table(result).rows if row[1] == "plans"]
    assert sum(counts) == result.num_evaluated - result.num_feasible


def test_days_and_chip_hours(prediction):
    days, chip_hours = training_time(prediction, 1e12)
    assert chip_hours == pytest.approx(days * 24 * 64)
    assert len(settings_table([prediction], tokens=1e12).rows[0]) == len(settings_table([prediction], tokens=1e12).headers)


def test_numbers_as_text():
    assert [percent(share) for share in (0.0, 1e-5, 0.431, 0.9999, 1.5)] == ["0.0 %", "<0.1 %", "43.1 %", "100 %", "150 %"]
    assert [bar(share, 10) for share in (0.0, 1e-6, 0.5, 1.0, 3.0)] == ["", "#", "#####", "#" * 10, "#" * 10]
    assert [format_step(time) for time in (0.0123, 7.44, 68.14, 4321.0)] == ["12.3 ms", "7.44 s", "68.1 s", "4,321 s"]


@pytest.mark.parametrize("columns", [20, 80, 400])
def test_no_terminal_cuts_a_cell(columns, monkeypatch, capsys, result):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = plans_table(result)
    print_table(table.headers, table.rows, title=table.title, right=table.right)
    out = capsys.readouterr().out
    for row in table.rows:
        for cell in row:
            assert cell in out
