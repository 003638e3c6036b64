"""The driver of a search, on a space of three plans."""

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.planner.result import Baseline, PlanRanking, SearchResult
from perfmodel.planner.search import search


class Least:
    """The objective of plans that are numbers."""

    def cost(self, plan):
        return plan


class Numbers:
    """Plans 3, 1 and 2, of which those above `most` are rejected."""

    def __init__(self, *, most=9, also=("front", "baselines")):
        self.most, self.also = most, also

    def evaluate(self, top):
        return [3, 1, 2]

    def ranked(self, rows, top):
        fitting = sorted(plan for plan in rows if plan <= self.most)
        return SearchResult(
            objective=Least(),
            conditions=self.most,
            num_evaluated=len(rows),
            num_feasible=len(fitting),
            rejected={"too large": len(rows) - len(fitting), "too small": 0},
            left_out={},
            plans=tuple(fitting[:top]),
            ranking=PlanRanking(places=tuple(range(1, len(fitting[:top]) + 1))),
            least_memory=(min(rows),),
        )

    def front(self, rows):
        return (min(rows),)

    def baselines(self, result):
        return (Baseline(name="usual", meaning="the third plan", plans=(3,), reason=f"{3 - result.plans[0]} more than the best"),)


def test_a_search_ranks_counts_and_compares():
    result = search(Numbers(most=2), top=1)
    assert (result.plans, result.best, result.pareto, result.conditions) == ((1,), 1, (1,), 2)
    assert (result.num_evaluated, result.num_feasible) == (3, 2)
    assert result.rejected == {"too large": 1}  # a reason without a plan is left out
    assert result.baselines[0].reason == "2 more than the best"
    assert result.search_time >= 0.0


def test_parts_that_are_not_asked_for_are_left_out():
    result = search(Numbers(also=()))
    assert result.plans == (1, 2, 3)
    assert (result.pareto, result.baselines) == ((), ())


def test_a_result_without_plans_has_the_least_memory_and_no_best():
    result = search(Numbers(most=0, also=()))
    assert (result.plans, result.least_memory) == ((), (1,))
    assert str(result) == "3 plans evaluated, 0 fit"
    with pytest.raises(InputError, match="no plan fits"):
        _ = result.best


def test_a_search_for_no_plans_is_refused():
    with pytest.raises(InputError, match="top=0: must be at least 1"):
        search(Numbers(), top=0)
