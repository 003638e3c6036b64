"""`write_report` as a function: the page of a search."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.units import format_step


@pytest.fixture(scope="module")
def search():
    return perfmodel.find_plans(model="llama-3-8b", cluster="dgx-h100", chips=8, global_batch=64, seq_len="8k", profile="megatron", top=5)


def test_a_search_is_a_page_of_its_best_plan_and_the_others(search, tmp_path):
    page = perfmodel.write_report(search, out=tmp_path / "page.html")
    assert (page.kind, (tmp_path / "page.html").read_text(encoding="utf-8")) == ("search", page.html)
    assert "Best plans" in page.sections
    for number, kind in enumerate(search.ranking.kinds, 1):
        assert f"plan {number}: " in page.html
        assert format_step(kind.prediction.step_time) in page.html
    assert page.html.count("<circle") >= len(search.pareto)


def test_a_plan_has_the_parts_of_its_prediction(search, tmp_path):
    page = perfmodel.write_report(search.plans[0].plan, out=tmp_path / "page.html")
    assert page.kind == "plan"
    assert "Best plans" not in page.sections
    for name, time in search.plans[0].parts.items():
        assert (name.replace("_", " ") in page.html) or not time


@pytest.mark.parametrize("plans", [[], ["no-such-plan"]])
def test_what_is_no_plan_is_refused(plans, tmp_path):
    with pytest.raises(InputError):
        perfmodel.write_report(plans, out=tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_page(search, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises((OSError, InputError)):
        perfmodel.write_report(search.plans[0].plan, out=path)
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["old"]
