"""The residuals' file from runs: what is kept, what is left out."""

import math
from pathlib import Path

import pytest

from lab.residuals import (
    by_other_calibrations,
    kept_residuals,
    main,
    memory_uncertainties,
    residual_of,
    residuals_of,
    scatter_of_medians,
    with_left_out,
)
from perfmodel.frameworks.profile import KNOWN, UNKNOWN, read_memory_uncertainties, shipped_memory_uncertainties
from perfmodel.uncertainty.residuals import load_residuals
from perfmodel.validation.cases import read_cases
from perfmodel.validation.validate import CasePredictor
from tests.validation.published_cases import MODEL, changed, sweep, write

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {**MODEL, "name": "half", "num_hidden_layers": 16}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    other = [{**case, "id": f"nanotron-half-{i}", "model": SMALL} for i, case in enumerate(sweep())]
    return write(
        tmp_path_factory.mktemp("residuals") / "cases.jsonl",
        [
            *sweep(),
            *other,
            changed(id="nanotron-broken", notes="AR 1 (intra 45.2/1/1)"),
            changed(id="nanotron-secondary", tier="secondary"),
            changed(id="mcore-1", framework="Megatron-LM dev"),
            changed(id="megascale-1", framework="MegaScale", tier="secondary"),
            changed(id="nemo-1", framework="NeMo 24.07", tier="secondary"),
            changed(id="x", measured=None),
        ],
    )


@pytest.fixture(scope="module")
def rows(cases):
    predictor = CasePredictor(has_intervals=False)
    return {case.id: predictor.row(case) for case in read_cases(cases)}


@pytest.fixture(scope="module")
def folder(cases):
    """The folder of the files that the command writes with runs that failed."""
    failed = write(cases.parent / "failed.jsonl", [changed(id="oom", measured=None, outcome="out_of_memory", micro_batch=16)])
    assert main([str(cases), "--out-of-memory", str(failed), "--out", str(cases.parent / "residuals.yaml")]) == 0
    return cases.parent


@pytest.mark.slow
def test_a_family_keeps_its_primary_runs_by_model(folder, rows):
    residuals = load_residuals(folder / "residuals.yaml")
    assert {(model.family, model.num_runs) for model in residuals.models} == {("nanotron", 5), ("nemo", 1)}
    assert residuals.num_runs == 11
    assert residuals.source == "published runs (nanotron 10, nemo 1); none of them predicted by fits that did not see their model"
    values = sorted(-math.log1p(row.time_error) for row in list(rows.values())[:5])
    (model,) = [
        residual
        for residual in residuals.models
        if residual.family == "nanotron" and " 16/" not in residual.model and "32x" in residual.model
    ]
    assert model.quantiles == pytest.approx(values, abs=1e-4)
    assert residuals.between_models > 0
    assert [(framework.family, framework.num_runs) for framework in residuals.unseen_frameworks] == [("nanotron", 10)]


def test_times_that_mean_nothing_are_no_residuals(rows):
    assert residual_of(rows["nanotron-0"]) is not None
    for name in ("nanotron-broken", "mcore-1", "x"):
        assert residual_of(rows[name]) is None
    assert residual_of(rows["megascale-1"]).family == ""


def test_left_out_predictions_take_the_place_of_the_others(rows):
    left_out = {f"nanotron-{i}": 1.0 for i in range(5)}
    kept = kept_residuals(with_left_out(rows.values(), left_out))
    times = [math.log(time) for time in (2.0, 2.5, 3.0, 4.0, 5.0)]
    assert [residual.value for residual in kept if residual.id in left_out] == pytest.approx(times)
    residuals = residuals_of(kept, source="s", date="2026-01-01", between_calibrations=0.0)
    assert any(residual.quantiles == pytest.approx(times, abs=1e-4) for residual in residuals.models)


@pytest.mark.slow
def test_the_command_reads_left_out_predictions(cases, tmp_path, capsys):
    table, out = tmp_path / "left.csv", tmp_path / "residuals.yaml"
    table.write_text("id,predicted_step_time\n" + "".join(f"nanotron-{i},1.0\n" for i in range(5)), encoding="utf-8")
    assert main([str(cases), "--left-out", str(table), "--out", str(out)]) == 0
    assert "5 of them predicted by fits that did not see their model" in load_residuals(out).source
    assert "unseen framework: " in capsys.readouterr().out


def test_other_calibrations_predict_what_they_have_not_seen(cases):
    primary = [case for case in read_cases(cases) if case.group == "nanotron"]
    assert set(by_other_calibrations(primary)) == {"h100"}


def test_the_scatter_of_medians_is_about_nothing():
    assert scatter_of_medians({"a": [0.1] * 3, "b": [-0.1] * 5, "few": [9.0]}) == pytest.approx(0.1)
    assert scatter_of_medians({}) == 0.0


@pytest.mark.slow
def test_with_runs_that_failed_the_uncertainties_of_memory_are_written_too(folder):
    uncertainties = read_memory_uncertainties(folder / "memory_uncertainty.yaml")
    assert uncertainties[KNOWN].scale <= uncertainties[UNKNOWN].scale
    assert "and 1 that ran out of memory" in uncertainties[UNKNOWN].rests_on


@pytest.mark.slow
def test_the_shipped_uncertainties_of_memory_follow_from_published_runs():
    cases = [case for path in sorted(GOLDEN.glob("published_*.jsonl.gz")) for case in read_cases(path)]
    for kind, uncertainty in memory_uncertainties(cases).items():
        shipped = shipped_memory_uncertainties()[kind]
        assert (shipped.centre, shipped.scale) == (
            pytest.approx(uncertainty.centre, abs=0.01),
            pytest.approx(uncertainty.scale, abs=0.01),
        ), "`make accuracy` writes strategies/memory_uncertainty.yaml"


@pytest.mark.parametrize("arguments", [["none.jsonl"], ["cases.jsonl", "--out", "no/where.yaml"], ["empty.jsonl"]])
def test_bad_input_writes_nothing(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "cases.jsonl", sweep()[:1])
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    assert main(arguments if "--out" in arguments else [*arguments, "--out", "r.yaml"]) == 2
    assert capsys.readouterr().err
    assert not (tmp_path / "r.yaml").exists()
