"""Studies and sweeps: their points, rows and refusals, and what an interruption leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas
import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.rows import prediction_row
from perfmodel.verbs import study as studies
from perfmodel.verbs import sweep as sweeps
from perfmodel.verbs.study import list_studies, read_study

JOB = {"model": "gpt2", "cluster": "dgx-h100", "global_batch": 16, "seq_len": 1024}
PREDICT = {"version": 1, "verb": "predict", "fixed": JOB, "axes": {"chips": [1, 8], "tp": [1, 2]}}
LOAD = {"model": "llama-3-8b", "cluster": "dgx-h100", "input_len": 512, "output_len": 64, "concurrency": 8}


def with_axes(**axes):
    """The study of predictions with these axes in place of its own."""
    return {**PREDICT, "fixed": {name: value for name, value in JOB.items() if name not in axes}, "axes": axes}


def swept(study, out=None, **more):
    return perfmodel.run_sweep(study, out=out, jobs=1, **more)


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_the_last_axis_varies_fastest_and_zipped_words_advance_together():
    study = read_study(
        {"version": 1, "fixed": {"seq_len": 1}, "zip": [{"model": ["a", "b"], "global_batch": [1, 2]}],
         "axes": {"cluster": ["x", "y"], "chips": [4, 8]}}
    )  # fmt: skip
    points = list(study.points())
    assert len(points) == study.num_points == 8
    assert [(point["model"], point["global_batch"], point["cluster"], point["chips"]) for point in points[:5]] == [
        ("a", 1, "x", 4), ("a", 1, "x", 8), ("a", 1, "y", 4), ("a", 1, "y", 8), ("b", 2, "x", 4),
    ]  # fmt: skip
    assert study.varied == ("model", "global_batch", "cluster", "chips")


def test_rows_are_those_of_predictions():
    sweep = swept(PREDICT)
    assert [(row["point"], row["chips"], row["tp"]) for row in sweep.rows] == [(0, 1, 1), (1, 1, 2), (2, 8, 1), (3, 8, 2)]
    for row in (sweep.rows[0], sweep.rows[3]):
        expected = prediction_row(perfmodel.predict(**JOB, chips=row["chips"], tp=row["tp"]))
        assert expected.items() <= row.items()


def test_a_point_that_cannot_be_predicted_is_a_row_with_its_reason():
    sweep = swept(PREDICT)
    assert sweep.failures == (sweep.rows[1]["reason"],)
    assert "tp=2" in sweep.rows[1]["reason"]
    assert sweep.rows[1]["seq_len"] == 1024
    frame = sweep.to_frame()
    assert frame.step_time.isna().tolist() == [False, True, False, False]


def test_a_fault_of_ours_is_a_row_and_is_computed_again(tmp_path, monkeypatch):
    def broken(*, model, cluster, global_batch, seq_len, chips):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(studies, "_ANSWERS", {**studies._ANSWERS, studies.SweptVerb.PREDICT: (broken, None)})
    first = swept(with_axes(chips=[1, 8]), tmp_path / "a.csv")
    assert len(first.failures) == 2
    assert "ZeroDivisionError" in first.failures[0]
    monkeypatch.undo()
    assert swept(with_axes(chips=[1, 8]), tmp_path / "a.csv").failures == ()


def test_a_search_has_the_best_plans_of_find_plans():
    words = {**JOB, "chips": 8, "profile": "megatron"}
    sweep = swept({"version": 1, "fixed": {name: value for name, value in words.items() if name != "chips"}, "axes": {"chips": [8]}})
    (best,) = perfmodel.find_plans(**words, top=1).plans
    row = sweep.rows[0]
    assert (row["place"], row["num_feasible"] > 0) == (1, True)
    assert prediction_row(best).items() <= row.items()


def test_a_search_without_a_plan_that_fits_keeps_the_least_memory():
    fixed = {"model": "llama-3-70b", "cluster": "dgx-h100", "seq_len": 8192, "global_batch": 8}
    (row,) = swept({"version": 1, "fixed": fixed, "axes": {"chips": [4]}}).rows
    assert row["reason"].startswith("no plan fits")
    assert row["memory_total"] > row["memory_usable"]


@pytest.mark.parametrize(
    ("verb", "fixed", "axes", "column"),
    [
        ("limits", {"model": "gpt2", "cluster": "dgx-h100", "seq_len": 1024, "recompute": "none"}, {"chips": [8]}, "limit"),
        ("serve", LOAD, {"chips": [1, 2]}, "ttft"),
        ("serve-search", LOAD, {"chips": [2]}, "tpot"),
        ("predict", {**JOB, "tokens": "1T"}, {"chips": [8]}, "days"),
        ("predict", {"plan": "ddp"}, {"cluster": ["dgx-h100", "dgx-b200"]}, "step_time"),
        ("predict", {**JOB, "chips": 8, "profile": "torchtitan"}, {"settings": [{"compile": True}, {"compile": False}]}, "step_time"),
    ],
)
@pytest.mark.slow
def test_every_verb_has_rows(verb, fixed, axes, column):
    sweep = swept({"version": 1, "verb": verb, "fixed": fixed, "axes": axes})
    assert sweep.failures == ()
    assert all(row[column] for row in sweep.rows)


@pytest.mark.parametrize(
    ("verb", "fixed", "axis", "value"),
    [
        ("limits", {"model": "gpt2", "cluster": "dgx-h100", "seq_len": 1024, "recompute": "none"}, "chips", 8),
        ("serve-search", {**LOAD, "chips": 1}, "tpot", "50ms"),
    ],
)
@pytest.mark.slow
def test_arguments_and_results_of_one_name_have_two_columns(verb, fixed, axis, value):
    rows = swept({"version": 1, "verb": verb, "fixed": fixed, "axes": {axis: [value]}}).rows
    assert {row[f"given_{axis}"] for row in rows} == {value}
    assert any(row[axis] != value for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": {"chps": [1]}}, "axes.chps: predict has no such argument; did you mean 'chips'"),
        ({"fixed": {**JOB, "objective": "time"}}, "fixed.objective: predict has no such argument"),
        ({"axes": {"chips": []}}, "axes.chips=[]: must have at least 1"),
        ({"axes": {"chips": 8}}, "axes.chips=8: must be a list"),
        ({"axes": {"chips": [8], "model": ["gpt2"]}}, "model: stands in several"),
        ({"axes": {"chips": ["8,16"]}}, "chips='8,16': is several values; write them as a list under axes"),
        ({"axes": {"chips": [[8, 16]]}}, "is several values"),
        ({"axes": {}}, "chips: no point has it"),
        ({"fixed": {}, "axes": {"chips": [8]}}, "model, cluster, global_batch, seq_len: no point has them"),
        ({"zip": [{"chips": [1, 2], "tp": [1]}], "axes": {}}, "zip.0: all its arguments must have the same number of values"),
        ({"zip": [{}]}, "zip.0: all its arguments must have the same number of values"),
        ({"version": 2}, "version=2: is of another release; write version: 1"),
        ({"verb": "serch"}, "did you mean 'search'"),
        ({"points": 3}, "points: unknown field"),
        ({"axes": {"chips": list(range(1, 1002)), "global_batch": list(range(1, 1002))}, "fixed": {}}, "points, and 1,000,000 is the most"),
        ({"fixed": {**JOB, "model": perfmodel.load_model("gpt2")}}, "must be text, a number, a list or a mapping"),
    ],
)
def test_a_study_that_is_wrong_is_refused_before_anything_is_computed(change, message, tmp_path):
    with pytest.raises(InputError) as error:
        swept({**PREDICT, **change}, tmp_path / "a.parquet")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_missing_arguments_may_be_replaced_by_others():
    nodes = {"model": "gpt2", "cluster": "dgx-h100", "seq_len": 1024, "nodes": 1, "batch_tokens": "16k"}
    assert swept({**PREDICT, "fixed": nodes, "axes": {}}).rows[0]["global_batch"] == 16
    read_study({"version": 1, "verb": "serve-search", "fixed": {"model": "a", "cluster": "b", "input_len": 1, "output_len": 1, "rate": 1}})


@pytest.mark.parametrize("study", ["llama", "missing.yaml", "", "a\0b", 3])
def test_a_study_that_is_not_there_is_refused(study):
    with pytest.raises(InputError):
        read_study(study)


@pytest.mark.parametrize("name", list_studies())
def test_shipped_studies_are_read_by_name(name):
    assert read_study(name).num_points > 1


# ---------------------------------------------------------------------------------------------------------------------------------
# The table, and the points that are kept next to it
# ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_the_table_is_read_back_with_pandas(tmp_path, name):
    sweep = swept(PREDICT, tmp_path / name)
    read = (pandas.read_csv if name.endswith("csv") else pandas.read_parquet)(tmp_path / name)
    assert read.step_time.dropna().tolist() == sweep.to_frame().step_time.dropna().tolist()
    assert read.columns.tolist() == sweep.to_frame().columns.tolist()


def test_a_column_of_texts_and_numbers_is_written_as_texts(tmp_path):
    swept(with_axes(chips=[1, "x"]), tmp_path / "a.parquet")
    assert pandas.read_parquet(tmp_path / "a.parquet").chips.tolist() == ["1", "x"]


def test_what_was_computed_is_kept_and_a_changed_study_computes_the_rest(tmp_path):
    out = tmp_path / "a.parquet"
    first = swept(PREDICT, out)
    assert first.num_computed == 4
    again = swept(PREDICT, out)
    assert (again.num_computed, again.rows) == (0, first.rows)
    assert swept(with_axes(chips=[1, 8, 16], tp=[1]), out).num_computed == 1


def test_equal_points_are_computed_once():
    sweep = swept(with_axes(chips=[8, 8]))
    assert (sweep.num_computed, len(sweep.rows)) == (1, 2)


def test_other_data_and_another_file_of_the_same_name_are_computed_again(tmp_path, monkeypatch):
    out, cluster = tmp_path / "a.csv", tmp_path / "mine.yaml"
    text = (perfmodel.foundation.resources.resource_dir("hardware_specs") / "clusters" / "dgx-h100.yaml").read_text()
    cluster.write_text(text)
    study = with_axes(chips=[8], cluster=[str(cluster)])
    assert [swept(study, out).num_computed for _ in range(2)] == [1, 0]
    cluster.write_text(text + "\n# changed\n")
    os.utime(cluster, ns=(1, 1))
    assert swept(study, out).num_computed == 1
    monkeypatch.setattr(sweeps, "data_version", lambda: "other")
    assert swept(study, out).num_computed == 1


def test_points_are_computed_again_after_a_calibration_in_the_same_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    out = tmp_path / "a.csv"
    assert [swept(PREDICT, out).num_computed > 0 for _ in range(2)] == [True, False]
    folder = perfmodel.hardware.reader.user_calibrations_dir()
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: mine\n")
    assert swept(PREDICT, out).num_computed > 0


def test_an_unfinished_line_is_computed_again(tmp_path):
    out = tmp_path / "a.csv"
    swept(PREDICT, out)
    (part,) = (tmp_path / "a.csv.parts").glob("*.jsonl")
    part.write_bytes(part.read_bytes()[:-40])
    assert swept(PREDICT, out).num_computed == 1
    assert swept(PREDICT, out).num_computed == 0


def test_one_sweep_at_a_time_writes_a_table(tmp_path):
    out = tmp_path / "a.csv"
    swept(PREDICT, out)
    program = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); print('locked', flush=True); input()"
    command = [sys.executable, "-c", program, str(tmp_path / "a.csv.parts" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(InputError, match="another sweep is writing it"):
            swept(PREDICT, out)
        other.communicate("\n", timeout=60)
    swept(PREDICT, out)


@pytest.mark.parametrize(
    ("absent", "words", "message"),
    [
        ("pyarrow", {"out": "a.parquet"}, "install perfmodel[sweep], or write results.csv"),
        ("joblib", {"jobs": 2}, "install perfmodel[sweep], or give jobs 1"),
        ("distributed", {"engine": "dask"}, "install perfmodel[dask]"),
        ("", {"engine": "ray"}, "must be local, dask or dask:ADDRESS"),
        ("", {"engine": "dask:"}, "must be local, dask or dask:ADDRESS"),
        ("", {"out": "a.xlsx"}, "must end in .parquet or .csv"),
        ("", {"out": "no/a.csv"}, "its folder does not exist"),
        ("", {"jobs": 0}, "must be a whole number of at least 1"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(absent, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps, "find_spec", lambda name: None if name == absent else True)
    with pytest.raises(InputError) as error:
        perfmodel.run_sweep(PREDICT, **words)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_points(tmp_path):
    reports = []
    swept(PREDICT, progress=lambda share, text: reports.append((share, text)))
    assert [share for share, _ in reports] == [0.25, 0.5, 0.75, 1.0]
    assert reports[-1][1].startswith("4 of 4 points")
    assert reports[-1][1].endswith("1 failed")


def kept_lines(folder):
    return sum(part.read_text().count('"key"') for part in folder.glob("*.jsonl"))


def killed(study, out, jobs, *, after):
    """Start a sweep in a process, kill it with SIGKILL after the given number of kept points, and return the number in the end."""
    program = f"import json, perfmodel\nperfmodel.run_sweep(json.loads({json.dumps(study)!r}), out={str(out)!r}, jobs={jobs})"
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL)
    folder = out.with_name(f"{out.name}.parts")
    while kept_lines(folder) < after and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    return kept_lines(folder)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_killed_sweep_loses_nothing_that_was_computed(tmp_path, jobs):
    if jobs > 1:
        pytest.importorskip("joblib")
    study = with_axes(global_batch=list(range(8, 808, 8)), chips=[8])
    out = tmp_path / "a.parquet"
    kept = killed(study, out, jobs, after=5)
    resumed = perfmodel.run_sweep(study, out=out, jobs=1)
    assert 5 <= kept < 100
    assert resumed.num_computed <= 100 - kept  # an orphan may have kept one more
    assert jobs > 1 or resumed.num_computed == 100 - kept
    assert without_times(resumed.rows) == without_times(swept(study).rows)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "dask"])
def test_other_processes_give_the_same_rows(tmp_path, engine):
    pytest.importorskip("joblib")
    if engine == "dask":
        pytest.importorskip("distributed")
    sweep = perfmodel.run_sweep(PREDICT, out=tmp_path / "a.csv", jobs=2, engine=engine)
    assert without_times(sweep.rows) == without_times(swept(PREDICT).rows)
    assert swept(PREDICT, tmp_path / "a.csv").num_computed == 0


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_named():
    pytest.importorskip("joblib")
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match="no dask scheduler answers"):
        perfmodel.run_sweep(PREDICT, engine="dask:tcp://127.0.0.1:1")


def test_an_objective_of_the_whole_run_takes_its_tokens():
    fixed = {"model": "gpt2", "cluster": "dgx-h100", "chips": 8, "global_batch": 16, "seq_len": 512, "objective": "cost"}
    (without,) = perfmodel.run_sweep({"version": 1, "verb": "search", "fixed": fixed}, jobs=1).rows
    assert "give its tokens" in without["reason"]
    (row,) = perfmodel.run_sweep({"version": 1, "verb": "search", "fixed": fixed | {"tokens": "1B"}}, jobs=1).rows
    search = perfmodel.find_plans(**fixed, tokens="1B", top=1)
    assert row["objective_value"] == pytest.approx(search.ranking.values[0])
