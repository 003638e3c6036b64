"""`perfmodel sweep` from outside."""

import json

import pandas
import pytest

STUDY = """
version: 1
verb: predict
fixed: {model: gpt2, cluster: dgx-h100, global_batch: 16, seq_len: 1k}
axes:
  chips: [1, 8]
  tp: [1, 2]
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY, encoding="utf-8")
    return path


def test_a_study_becomes_a_table(call, study, tmp_path):
    code, out, err = call("sweep", study, "--jobs", 1)
    assert (code, err) == (0, "")
    assert out.startswith("4 points of predict, 1 without a result\naxes      chips 2, tp 2\ncomputed  4 now, 0 kept from before\n")
    assert "note: tp=2: must divide chips=1" in out
    assert "pandas.read_parquet('results.parquet')" in out
    assert len(pandas.read_parquet(tmp_path / "results.parquet")) == 4
    assert "computed  0 now, 4 kept from before" in call("sweep", study, "--jobs", 1)[1]


def test_the_object_counts_points(call_json, study):
    result = call_json("sweep", study, "--jobs", 1, "--out", "a.csv")
    assert [result[name] for name in ("num_points", "num_computed", "num_failed", "num_rows", "out")] == [4, 4, 1, 4, "a.csv"]
    assert (result["verb"], result["varied"]) == ("predict", ["chips", "tp"])
    assert [reason["num_points"] for reason in result["reasons"]] == [1]


def test_the_csv_form_is_the_table(call, study, tmp_path):
    out = call("sweep", study, "--jobs", 1, "--out", "a.csv", "--format", "csv")[1]
    assert out == (tmp_path / "a.csv").read_text()


def test_a_study_without_any_result_is_written_and_ends_with_2(call, study, tmp_path):
    study.write_text(STUDY.replace("gpt2", "gpt9"))
    code, _, err = call("sweep", study, "--jobs", 1, "--out", "a.csv")
    assert code == 2
    assert err.startswith("perfmodel: no point has a result: 4 points: model=gpt9: ")
    assert len(pandas.read_csv(tmp_path / "a.csv")) == 4


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (("chips:", "chps:"), [], "study.yaml: axes.chps: predict has no such argument; did you mean 'chips'"),
        (("version: 1", "version: one"), [], "study.yaml: version='one': must be a whole number"),
        (("", ""), ["--jobs", "many"], "jobs=many: must be a whole number"),
        (("", ""), ["--engine", "ray"], "engine=ray: must be local, dask"),
        (("", ""), ["--out", "a.txt"], "out=a.txt: must end in .parquet or .csv"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(call, study, tmp_path, change, arguments, message):
    study.write_text(STUDY.replace(*change))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call("sweep", study, *(arguments if "--jobs" in arguments else ["--jobs", 1, *arguments]))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_says_what_is_kept(call, study, monkeypatch):
    from perfmodel.verbs import sweep as sweeps

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "_compute", interrupted)
    code, out, err = call("sweep", study, "--jobs", 1)
    assert (code, out) == (130, "")
    assert "computed points are kept in results.parquet.parts" in err
    code, _, err = call("sweep", study, "--jobs", 1, "--json")
    assert (code, json.loads(err)["code"]) == (130, "interrupted")


@pytest.mark.parametrize(("kind", "field"), [("study", "axes"), ("sweep", "num_points")])
def test_there_is_a_schema(call_json, kind, field):
    assert f'"{field}"' in json.dumps(call_json("schema", kind))
