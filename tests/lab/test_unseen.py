"""Runs predicted as of an unseen framework."""

import math
from dataclasses import replace

import pytest

from lab.cases import PublishedRun
from lab.unseen import GROUPS, UnseenFrameworks, UnseenRun, figures_of, fits_of, main, over_groups
from perfmodel.frameworks.profile import GENERIC
from perfmodel.validation.assumed_framework import hidden
from perfmodel.validation.cases import read_cases
from tests.validation.published_cases import changed, sweep, write


@pytest.fixture
def cases(tmp_path):
    ran_out = changed(id="nanotron-oom", measured=None, outcome="out_of_memory", micro_batch=16)
    return write(tmp_path / "cases.jsonl", [*sweep(), ran_out, changed(id="nanotron-broken", notes="AR 1 (intra 45.2/1/1)")])


def test_neither_the_name_nor_the_framework_itself_is_seen(cases):
    frameworks = UnseenFrameworks()
    for case in read_cases(cases):
        run = hidden(case)
        planned = frameworks.planned(run)
        assert run.profile == "nanotron"
        assert planned.profile.name == GENERIC
        assert "nanotron" not in planned.profile.source
        assert planned.framework.borrows
    assert "torch" not in frameworks.profile_without("torchtitan").source
    kin = UnseenFrameworks(leaves_family=True).profile_without("deepspeed").source
    assert "megatron" not in kin
    assert "megatron" in frameworks.profile_without("deepspeed").source


def test_runs_on_broken_links_do_not_count_and_all_others_do(cases):
    times = list(UnseenFrameworks().times(read_cases(cases)))
    assert {time.run.id for time in times} == {f"nanotron-{i}" for i in range(5)}
    assert all(time.predicted > 0 for time in times)


def run(group, ratio, profile):
    published = PublishedRun(case=None, planned=None, profile=profile, settings={}, measured=1.0, choice=None)
    return UnseenRun(run=published, group=group, predicted=ratio)


def test_a_group_is_judged_by_the_groups_of_others():
    (first, _), (second, _), (third, _) = GROUPS[:3]
    runs = [run(first, 1.4, "a")] * 30 + [run(second, 0.9, "b"), run(third, 1.1, "c")]
    figures = figures_of(runs)
    assert (figures[first].errors.bias, figures[first].errors.mean) == pytest.approx((0.4, 0.4))
    assert figures[first].errors.coverage == 0.0
    assert 1 / 1.4 < figures[first].low < figures[first].high
    hanging = [replace(run, open=(0.3**2, 0.0)) for run in runs[:30]]
    assert figures_of([*hanging, *runs[30:]])[first].errors.coverage == 1.0
    assert over_groups(figures).scatter == pytest.approx(math.sqrt(sum(math.log(x) ** 2 for x in (1.4, 0.9, 1.1)) / 3))


def test_runs_out_of_memory_that_are_predicted_to_fit_are_counted(cases):
    fits = fits_of(UnseenFrameworks().outcomes(read_cases(cases)))
    assert (fits.num_out, fits.num_ran) == (1, 6)
    assert (fits.out_but_predicted_fits, fits.ran_but_predicted_out) in ((0, 0), (0, 1))


def test_it_prints_both_tables_or_one_sentence(cases, tmp_path, capsys):
    assert main([str(cases)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Each framework left out with its family" in printed
    assert "of 1 nanotron runs that ran out of memory are predicted to fit" in printed
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
