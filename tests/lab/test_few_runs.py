"""Given a few runs of a framework whose name is hidden, the rest of them is predicted better."""

import json

import numpy as np
import pytest

from lab.few_runs import ANY, FASTEST, OF_JOB, components_of, few_runs_sections, figures_of, groups_of, main
from perfmodel.frameworks.profile import load_profile
from perfmodel.validation.cases import parse_case
from tests.lab.published_steps import published
from tests.validation.published_cases import sweep


@pytest.mark.slow
def test_three_runs_of_another_framework_take_a_third_of_the_error():
    groups = groups_of([parse_case(json.dumps(case), 1) for case in published("korthikanti")])
    ((name, group),) = groups.items()
    figures = figures_of(name, group, load_profile("torch-fsdp2"), draws=2, seed=1)
    assert figures.errors[3] < 0.67 * figures.errors[0]
    assert 10 not in figures.errors
    assert figures.common_known < 0.67 * figures.errors[0]
    sections = dict(few_runs_sections([figures]))
    assert name in str(sections["few_runs"]["table"])
    assert "few_runs_without_choice" in sections


def test_squared_errors_are_split_into_what_runs_have_in_common_and_what_differs():
    errors = np.array([0.1, 0.3, -0.1, -0.1, 0.2, 0.2])
    jobs, layouts = ("a", "a", "a", "a", "b", "b"), ("x", "x", "y", "y", "x", "x")
    common, of_jobs, of_layouts, of_runs = components_of(errors, jobs, layouts)
    assert common + of_jobs + of_layouts + of_runs == pytest.approx(float((errors**2).mean()))
    assert common == pytest.approx(0.01)
    assert of_jobs == pytest.approx((4 * 0.05**2 + 2 * 0.1**2) / 6)
    assert of_layouts == pytest.approx(4 * 0.15**2 / 6)
    assert of_runs == pytest.approx(2 * 0.1**2 / 6)


def test_an_error_that_all_runs_share_is_common():
    assert components_of(np.full(3, -0.2), "aab", "xyx") == pytest.approx((0.04, 0.0, 0.0, 0.0))


@pytest.mark.slow
def test_choices_are_judged_by_few_draws_however_many_the_errors_have(monkeypatch):
    monkeypatch.setattr("lab.few_runs.GIVEN", (3,))
    monkeypatch.setattr("lab.few_runs._CHOICE_DRAWS", 1)
    ((name, group),) = groups_of([parse_case(json.dumps(case), 1) for case in sweep()]).items()
    figures = figures_of(name, group, load_profile("megatron"), draws=2, seed=1)
    assert len(figures.regrets[ANY][3]) == len(figures.regrets[OF_JOB][3]) == 1


def test_a_choice_of_plan_is_judged_with_none_and_with_some_runs_given(monkeypatch):
    monkeypatch.setattr("lab.few_runs.GIVEN", (3,))
    groups = groups_of([parse_case(json.dumps(case), 1) for case in sweep()])
    ((name, group),) = groups.items()
    figures = figures_of(name, group, load_profile("megatron"), draws=1, seed=1)
    assert len(figures.regrets[ANY][0]) == len(figures.first_three) == 1
    assert {len(figures.regrets[way][3]) for way in (ANY, OF_JOB, FASTEST)} == {1}
    assert figures.first_three[0] <= figures.regrets[ANY][0][0]
    assert OF_JOB in str(dict(few_runs_sections([figures]))["few_runs_choice"]["table"])


def test_a_measured_plan_of_the_job_has_its_measured_time():
    ((_, group),) = groups_of([parse_case(json.dumps(case), 1) for case in sweep()]).items()
    (job,) = group.jobs
    measured = np.log([group.runs[index].measured for index in job])
    wrong = measured - 2.0 * (measured == measured.max())  # the slowest is taken for the fastest
    slowest = job[int(np.argmax(measured))]
    assert group.judged(job, wrong).regret > 0.0
    assert group.judged(job, wrong, [slowest]).regret == 0.0


def test_a_file_without_such_runs_is_refused(tmp_path, capsys):
    path = tmp_path / "cases.jsonl"
    path.write_text('{"id": "x"}\n')
    assert main([str(path)]) == 2
    assert "hold no primary training run" in capsys.readouterr().err
