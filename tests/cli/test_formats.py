"""`--format`: one result as text, JSON, CSV or Markdown."""

import csv
import io
import json

import pytest

from perfmodel.report.document import Command, Facts, Notes, Text, flat_rows
from perfmodel.report.markdown import markdown
from perfmodel.report.table import Table
from tests.cli.conftest import JOB

SERVED = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", "1", "--input-len", "1k", "--output-len", "256"]
REPORTS = {
    "predict": ["predict", *JOB, "--tp", "2"],
    "predict, several": ["predict", *JOB, "--tp", "1,2"],
    "search": ["search", *JOB, "--tp", "2", "--profile", "megatron"],
    "explain": ["explain", "fsdp"],
    "compare": ["compare", "ddp", "fsdp"],
    "serve": ["serve", *SERVED, "--concurrency", "8"],
    "serve, operators": ["serve", *SERVED, "--concurrency", "8", "--operators"],
    "serve, search": ["serve", "--search", *SERVED],
    "chips": ["chips"],
    "chips, one": ["chips", "h100-sxm-80gb"],
    "engines": ["engines"],
    "models": ["models", "gpt2"],
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_form_holds_the_result(name, call):
    reports = {form: call(*REPORTS[name], "--format", form) for form in ("table", "json", "csv", "markdown")}
    assert {code for code, _, _ in reports.values()} == {0}
    out = {form: text for form, (_, text, _) in reports.items()}
    content = json.loads(out["json"])
    assert content["schema_version"] == 1
    rows = list(csv.DictReader(io.StringIO(out["csv"])))
    assert rows
    assert None not in rows[0]
    assert all(None not in row.values() for row in rows)
    lines = out["markdown"].splitlines()
    assert any(line.startswith(("| ---", "- ")) for line in lines)
    tables = sum(line.startswith(("| ---", "| :--")) for line in lines)
    assert tables == sum(line.startswith("──") for line in out["table"].splitlines())


def test_table_is_the_default(call):
    assert call("predict", *JOB, "--format", "table")[1] == call("predict", *JOB)[1]


def test_format_json_is_the_flag_json(call):
    assert call("predict", *JOB, "--format", "json")[1] == call("predict", *JOB, "--json")[1]
    assert call("predict", *JOB, "--format", "csv")[1] == call("predict", *JOB, "--csv", "-")[1]


def test_errors_are_objects_where_the_result_would_be(call):
    code, out, err = call("chips", "no-such-chip", "--format", "json")
    assert (code, out) == (2, "")
    assert json.loads(err)["code"] == "unknown_name"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chips", "--format", "xml"], "format=xml: is not known; use table, json, csv, markdown"),
        (["chips", "--format", "csv", "--json"], "--format csv: does not go with --json; give one of the two"),
        (["predict", *JOB, "--csv", "-", "--format", "markdown"], "--csv -: both it and --format markdown want standard output"),
    ],
)
def test_a_form_that_cannot_be_is_refused(arguments, sentence, call):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err


def test_markdown_of_each_block():
    table = Table(title="Times", headers=("part", "time"), rows=(("a|b", "1 s"),), right=("time",), caption="of a step")
    blocks = [Facts("fits", [("job", "a model"), ("", "and more")]), table, Text("a sentence", apart=True), Command("perfmodel models")]
    text = markdown([*blocks, Notes(["one"], ["a detail"]), Notes([])])
    assert text == (
        "**fits**\n\n- job: a model\n  and more\n\nof a step\n\n**Times**\n\n| part | time |\n| --- | ---: |\n| a\\|b | 1 s |\n\n"
        "a sentence\n\n```sh\nperfmodel models\n```\n\n- note: one\n- 1 more note: --verbose\n"
    )


def test_rows_of_an_object_without_rows():
    assert flat_rows({"name": "x", "memory": {"size": 1}, "axes": [1, 2], "parts": []}) == [
        {"name": "x", "memory.size": 1, "axes": "1 2", "parts": ""}
    ]
    assert flat_rows({"chips": [{"name": "a"}, {"name": "b", "peak": {"bf16": 2}}]}) == [{"name": "a"}, {"name": "b", "peak.bf16": 2}]
