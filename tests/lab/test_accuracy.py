"""The accuracy document: its figures are those of `validate`, its marks are true."""

import csv
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lab.accuracy import document, main, read_left_out, write_report
from lab.accuracy_lines import LINES, cause_of
from lab.few_runs import few_runs_figures
from perfmodel.report.markdown import markdown_table
from perfmodel.report.table import Table
from tests.validation.published_cases import CASE, changed, sweep, write

DOCUMENT = Path(__file__).parents[2] / "docs" / "accuracy.md"


ONE_CHIP = dict(num_chips=1, tp=1, pp=1, dp=1, zero_stage=0, global_batch=1, model={**CASE["model"], "num_hidden_layers": 2})


def write_cases(folder):
    return write(
        folder / "cases.jsonl",
        [
            *sweep(),
            changed(id="slow", **ONE_CHIP, measured={"step_time_s": 1.0}),
            changed(id="llmc-quick", **ONE_CHIP, framework="llm.c", measured={"step_time_s": 1e-3}),
            changed(id="mcore-1", framework="Megatron-LM dev (CI)"),
            changed(id="dgxc-1", tier="secondary", recompute=None),
            changed(id="nanotron-oom", measured=None, outcome="out_of_memory", micro_batch=16),
            changed(id="moe-1", model={**CASE["model"], "num_experts": 8}),
        ],
    )


@pytest.fixture
def cases(tmp_path):
    return write_cases(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of the cases, and the document, with two draws of given runs (test_few_runs.py has their figures)."""
    folder = tmp_path_factory.mktemp("accuracy")
    out = folder / "accuracy.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.accuracy.few_runs_figures", partial(few_runs_figures, draws=2))
        return write_report([write_cases(folder)], out), out


@pytest.mark.slow
def test_the_document_is_written_with_its_figures(written):
    report, out = written
    text = out.read_text(encoding="utf-8")
    assert [row.id for row in report.scored] == [*(f"nanotron-{i}" for i in range(5)), "slow", "llmc-quick"]
    assert "7 runs of 3 sources are scored" in text
    assert "**These figures are in-sample**" in text
    assert "left out |" not in text
    for heading in ("Step time", "Method", "Choice of plan", "Memory", "Fitted parameters", "Not scored"):
        assert f"## {heading}\n" in text
    for name in ("predicted_against_measured", "error_by_chips", "error_distribution"):
        assert f"(figures/{name}.png)" in text
        assert (out.parent / "figures" / f"{name}.png").stat().st_size > 1000
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "-", "#", "!"))) <= 140


@pytest.mark.slow
def test_small_jobs_are_lines_of_their_own_and_what_no_chip_can_do_is_left_out(written):
    section = written[1].read_text(encoding="utf-8").split("## Small jobs\n")[1].split("\n## ")[0]
    assert "Left out: llmc-quick, which" in " ".join(section.split())
    assert "| one chip | 1 |" in section


@pytest.mark.slow
def test_lines_hold_each_scored_run_once(written):
    for row in written[0].scored[:5]:
        assert sum(line.holds(row.labels) for line in LINES) == 1


@pytest.mark.slow
def test_left_out_predictions_stand_next_to_the_others(written, tmp_path):
    left_out = tmp_path / "left.csv"
    with left_out.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("id", "predicted_step_time", "fold"), *((f"nanotron-{i}", 2.2, "x") for i in range(5)), ("other", 1.0, "y")])
    report = replace(written[0], left_out=read_left_out(left_out))
    text = document(report)
    assert "mean, left out" in text
    assert "Left out:" in text
    errors = [2.2 / time - 1 for time in (2.0, 2.5, 3.0, 4.0, 5.0)]
    mean = sum(map(abs, errors)) / 5
    assert f"{100 * mean:.1f}" in text
    assert [row.predicted_step_time for row in report.scored_left_out] == [2.2] * 5
    assert len(report.left_out) == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.jsonl"], "cannot be read"),
        (["cases.jsonl", "--left-out", "none.csv"], "left_out="),
        (["cases.jsonl", "--out", "no/where.md"], "its folder does not exist"),
        (["empty.jsonl"], "holds no case"),
    ],
)
def test_bad_input_is_one_sentence(cases, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "a.md"]
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "a.md").exists()


@pytest.mark.slow
def test_a_cause_is_named_where_a_source_states_it(written):
    report, _ = written
    assert {cause_of(row) for row in report.scored[:5]} == {"not known"}
    assert not next(row for row in report.result.rows if row.id == "mcore-1").is_scored


@pytest.mark.slow
def test_a_cause_does_not_depend_on_the_error(written):
    rows = written[0].result.rows
    cases = [replace(rows[0].case, id=name, group=name.partition("-")[0]) for name in ("nanotron-14102875", "llmc-125M")]
    rows += tuple(replace(rows[0], case=case) for case in cases)
    for row in rows:
        far_off = [replace(row, predicted={"step_time": factor * row.predicted_step_time}) for factor in (0.1, 3.0)]
        assert {cause_of(error) for error in far_off} == {cause_of(row)}
    assert "better fabric" in cause_of(rows[-2])


def test_what_counts_is_decided_by_the_line_and_not_by_its_position():
    assert [line.title.startswith("(") for line in LINES] == [not line.counts for line in LINES]


def test_a_pipe_in_a_cell_is_escaped():
    assert markdown_table(Table(title="t", headers=("a", "b"), rows=(("x|y", ""),), right=("b",))).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x\\|y |   |",
    ]


@pytest.mark.slow
def test_groups_that_cost_most_are_named(written):
    report, out = written
    text = out.read_text(encoding="utf-8")
    (group,) = report.result.choices.groups
    if group.regret > 0.03:
        assert f"nanotron Llama-3-8B on 64 chips (5 plans): {100 * group.regret:.1f} %" in text
        assert "every other group: at most 3 %" in text
    else:
        assert "No group has a regret over 3 %." in text


def test_the_committed_document_has_its_figures():
    text = DOCUMENT.read_text(encoding="utf-8")
    figures = re.findall(r"\]\((figures/[a-z_]+\.png)\)", text)
    assert len(figures) == 3
    assert all((DOCUMENT.parent / name).is_file() for name in figures)
