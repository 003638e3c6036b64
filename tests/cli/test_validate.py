"""`perfmodel validate` from outside."""

import csv
import json

import pytest

from perfmodel.validation.case_plan import plan_of_case
from tests.cli.conftest import joined
from tests.validation.published_cases import CASE, changed, sweep, write


@pytest.fixture
def cases(tmp_path):
    broken = changed(id="nanotron-broken", micro_batch=2, notes="AR 18 (intra 45.2/40/40)")
    others = [changed(id="oom-1", measured=None, outcome="out_of_memory", micro_batch=16), {"id": "serve-1", "model": {}, "input_len": 1}]
    return write(tmp_path / "cases.jsonl", [*sweep(), broken, *others])


@pytest.mark.slow
def test_everything_is_printed_and_written(call, cases, tmp_path):
    code, out, err = call("validate", cases, "--by", "source,chips,form", "--out", "r.csv", "--plots", "plots", "--skip-broken-nvlink")
    assert (code, err) == (0, "")
    for text in (
        "7 of 8 cases predicted (6 training, 1 out of memory, 1 inference)",
        "6 of them are scored (primary sources, dense decoders, with a step time): off by ",
        "Errors by source, scored runs",
        "Errors by source, not scored",
        "Errors by chips",
        "Errors by form",
        "Choice of plan, scored runs",
        "Does it fit?",
        "Not predicted",
        "1 run whose notes give an all-reduce in the node of under 100 GB/s (broken NVLink) is left out",
        "table: r.csv",
        "figures: plots",
    ):
        assert text in joined(out)
    with (tmp_path / "r.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 8
    assert {"step_time_low", "step_time_high", "chip", "num_chips", "form"} <= set(rows[0])
    assert len(list((tmp_path / "plots").iterdir())) == 3


def test_an_error_in_perfmodel_is_named_after_the_table_and_ends_with_one(call, cases, tmp_path, monkeypatch):
    def failing(case):
        if case.id in ("nanotron-1", "nanotron-3"):
            raise KeyError("rate")
        return plan_of_case(case.inputs)

    monkeypatch.setattr("perfmodel.validation.assumed_framework.plan_as_stated", failing)
    code, out, err = call("validate", cases, "--out", "r.csv")
    assert code == 1
    assert "5 of 8 cases predicted" in joined(out)
    assert "case=nanotron-1: the prediction failed (KeyError: 'rate'); please report this case (and 1 more such cases)" in joined(err)
    with (tmp_path / "r.csv").open(encoding="utf-8") as stream:
        failed = {row["id"] for row in csv.DictReader(stream) if "KeyError" in row["reason"]}
    assert failed == {"nanotron-1", "nanotron-3"}
    assert call("validate", cases, "--tier", "primary", "--json")[0] == 1


def test_by_source_is_the_default(call, cases):
    code, out, _ = call("validate", cases)
    assert code == 0
    assert "Errors by source" in out
    assert "is in it, scored runs aside (--skip-broken-nvlink leaves it out)" in joined(out)


def test_unknown_settings_are_reported_once(call, call_json, tmp_path):
    cases = write(tmp_path / "odd.jsonl", [changed(settings={"fused_rms": True}), changed(settings={"fused_rms": 3, "compile": "perhaps"})])
    line = "settings that nothing is known of, passed over: fused_rms (2 runs), compile=perhaps (1 runs); did you mean 'fused_rmsnorm' or"
    assert joined(call("validate", cases)[1]).count(line) == 1
    assert call_json("validate", cases)["settings_passed_over"] == {"fused_rms": 2, "compile=perhaps": 1}


def test_undetectable_kinds_of_memory_error_are_reported(call, cases, tmp_path):
    assert "is not known; give a file" not in call("validate", cases)[1]
    ran = write(tmp_path / "ran.jsonl", sweep())
    assert "None of these runs ran out of memory" in call("validate", ran)[1]
    out = write(tmp_path / "out.jsonl", [changed(id="oom-1", measured=None, outcome="out_of_memory", micro_batch=16)])
    text = call("validate", out)[1]
    assert "All of these runs ran out of memory" in text
    assert "scored" not in text


def test_the_object_has_the_same_numbers(call_json, cases):
    result = call_json("validate", cases, "--by", "chip,tier")
    assert set(result["by"]) == {"chip", "tier"}
    assert result["choices"]["overall"]["num_plans"] == 6
    assert result["choices"]["num_broken_nvlink"] == 1
    assert result["scored"]["num_runs"] == result["scored"]["overall"]["num_times"] == 6
    assert result["scored"]["choices"]["overall"]["num_plans"] == 5
    assert [source["name"] for source in result["source_fits"]] == ["nanotron", "oom"]
    assert result["kinds"] == {"training": 6, "out of memory": 1, "inference": 1}


def test_a_tier_alone(call_json, tmp_path):
    path = write(tmp_path / "cases.jsonl", [CASE, changed(id="b", tier="secondary")])
    assert call_json("validate", path, "--tier", "secondary")["num_rows"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--by", "chp"], "by=chp: not known"),
        (["--by", ","], "by: names no field"),
        (["--by", ""], "by: names no field"),
        (["--plots", "no/where/plots"], "its folder does not exist"),
        (["--plots", "cases.jsonl"], "is a file"),
        (["--out", "no/where.csv"], "its folder does not exist"),
        (["--tier", "golden"], "tier=golden: no case is of it"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(call, cases, tmp_path, arguments, sentence):
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = call("validate", cases, *([] if "--out" in arguments else ["--out", "r.csv"]), *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_missing_file_is_one_sentence(call):
    code, _, err = call("validate", "none.jsonl")
    assert code == 2
    assert "cannot be read" in err


def test_lines_of_any_kind_leave_the_exit_code_at_0(call, tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("not json\n\n[]\n{}\n" + json.dumps({"id": 3, "notes": 5, "settings": []}) + "\n", encoding="utf-8")
    code, out, _ = call("validate", path, "--by", "source,size,chips,form,tier,precision,profile,model,framework,chip")
    assert code == 0
    assert "0 of 4 cases predicted" in out


def test_labels_of_lone_surrogates_keep_the_table(call, tmp_path):
    (tmp_path / "odd.jsonl").write_text(r'{"id": "\ud800", "tier": "\ud800", "framework": "\ud800", "model": "\ud800", "chip": "\ud800"}')
    code, _, err = call("validate", "odd.jsonl", "--out", "r.csv", "--by", "tier,framework,model,chip")
    assert (code, err) == (0, "")
    assert (tmp_path / "r.csv").read_text(encoding="utf-8").splitlines()[1].startswith("line-1,")


@pytest.mark.slow
def test_a_framework_may_be_assumed_for_every_case_or_hidden(call, call_json, tmp_path):
    path = write(tmp_path / "runs.jsonl", sweep())
    stated, named, other, hidden = (
        call_json("validate", path, *flags)["overall"]["median"]
        for flags in ([], ["--profile", "nanotron"], ["--profile", "megatron"], ["--hide-framework"])
    )
    assert named == stated
    assert len({stated, other, hidden}) == 3
    own_file = tmp_path / "mine.yaml"
    call("fit", path, "--save", own_file)
    assert call_json("validate", path, "--profile", own_file)["overall"]["median"] <= stated
    code, _, err = call("validate", path, "--profile", "megatron", "--hide-framework")
    assert code == 2
    assert "cannot be given with hide_framework" in err


@pytest.mark.parametrize("content", ["id,step_time\na,1.5\n", ""])
def test_a_file_without_cases_is_refused(content, call, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(content)
    code, out, err = call("validate", path)
    assert (code, out) == (2, "")
    assert "holds no case" in err
    assert "give JSON lines, one run each" in err
