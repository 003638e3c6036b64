"""The regret of a choice of plan, by hand."""

import math
from dataclasses import replace

import pytest
from scipy.stats import spearmanr

from perfmodel.validation.plan_choice import Choice, judge_group, plan_choices, spearman
from perfmodel.validation.run_labels import RunLabels

LABELS = RunLabels(source="paper", model="m", chip="c", num_chips=64.0)


def choices(pairs, group="g", **values):
    return [
        Choice(group=group, plan=f"p{i}", labels=LABELS, predicted=predicted, measured=measured, fits=True, **values)
        for i, (predicted, measured) in enumerate(pairs)
    ]


def test_regret_is_how_much_slower_the_first_is_than_the_best():
    group = judge_group(choices([(1.0, 1.2), (2.0, 1.0), (3.0, 3.0), (4.0, 2.0)]))
    assert group.regret == pytest.approx(0.2)
    assert group.best_of_three == 0.0
    assert group.median_plan == pytest.approx(0.6)
    assert (group.source, group.num_plans, group.num_chips) == ("paper", 4, 64.0)


def test_a_perfect_order_costs_nothing_whatever_the_scale():
    group = judge_group(choices([(10.0 * t, t) for t in (3.0, 1.0, 2.0, 4.0)]))
    assert (group.regret, group.best_of_three, group.rank_correlation) == (0.0, 0.0, 1.0)


def test_a_search_passes_over_what_it_predicts_not_to_fit():
    runs = choices([(1.0, 1.0), (2.0, 1.5), (3.0, 3.0), (4.0, 2.0)])
    assert judge_group([replace(runs[0], fits=False), *runs[1:]]).fitting_regret == pytest.approx(0.5)
    nothing = [replace(run, fits=False) for run in runs]
    assert judge_group(nothing).fitting_regret == judge_group(nothing).regret == 0.0


@pytest.mark.parametrize("second", [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [2, 2, 1, 7, 7], [3.0, 1.0, 4.0, 1.0, 5.0]])
def test_rank_correlation_is_spearmans(second):
    first = [0.1, 0.3, 0.3, 2.0, 9.0]
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)


def test_what_does_not_vary_has_no_rank_correlation():
    assert math.isnan(spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert math.isnan(plan_choices(choices([(1.0, t) for t in (1.0, 2.0, 3.0, 4.0)])).overall.rank_correlation)


def test_groups_of_less_than_four_plans_are_counted_and_not_judged():
    small = choices([(1.0, 2.0), (2.0, 1.0)], group="small")
    single = choices([(1.0, 2.0)], group="single")
    result = plan_choices([*choices([(t, t) for t in (1.0, 2.0, 3.0, 4.0)]), *small, *single])
    assert (len(result.groups), result.num_small_groups) == (1, 1)
    empty = plan_choices(small)
    assert empty.groups == ()
    assert math.isnan(empty.overall.mean_regret)


def test_a_plan_that_ran_twice_counts_once():
    runs = choices([(t, t) for t in (1.0, 2.0, 3.0, 4.0)])
    again = replace(runs[0], measured=3.0)
    (group,) = plan_choices([*runs, again]).groups
    assert group.num_plans == 4
    assert group.regret == 0.0  # (1 + 3) / 2 is as good as the second


def test_broken_nvlink_is_left_out_on_request_and_counted_always():
    runs = choices([(2.0, 1.0), (3.0, 2.0), (4.0, 3.0), (5.0, 4.0)], noted_all_reduce=424e9)
    broken = replace(runs[0], plan="broken", predicted=1.0, measured=2.6, noted_all_reduce=45e9)
    as_it_is, without = plan_choices([*runs, broken]), plan_choices([*runs, broken], skip_broken_nvlink=True)
    assert (as_it_is.num_broken_nvlink, without.num_broken_nvlink) == (1, 1)
    assert as_it_is.overall.mean_regret == pytest.approx(1.6)
    assert without.overall.mean_regret == 0.0
    assert (as_it_is.overall.num_plans, without.overall.num_plans) == (5, 4)


def test_a_summary_averages_over_groups():
    first = choices([(1.0, 1.1), (2.0, 1.0), (3.0, 3.0), (4.0, 4.0)], group="a")
    second = choices([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)], group="b")
    third = choices([(1.0, 1.3), (2.0, 2.0), (3.0, 3.0), (4.0, 1.0)], group="c")
    summary = plan_choices([*first, *second, *third]).overall
    assert summary.mean_regret == pytest.approx(0.4 / 3)
    assert summary.largest_regret == pytest.approx(0.3)
    assert summary.near_best_fraction == pytest.approx(2 / 3)
