"""The package stays within its budgets: what a reader has to know does not grow unseen.

A budget in `budgets.yaml` is raised in a line of its own, with the reason. `python -m tests.budgets` prints all measures.
"""

import pytest

from tests.budgets import budgets, measures


@pytest.fixture(scope="module")
def measured():
    return measures()


def test_no_budget_is_exceeded(measured):
    over = {name: f"{value:,} of {budgets()[name]:,}" for name, value in measured.items() if value > budgets().get(name, value)}
    assert not over, f"over budget: {over}; write less, or raise the line in tests/contracts/budgets.yaml with the reason"


def test_every_measure_has_a_budget(measured):
    assert set(measured) == set(budgets())


def test_budgets_follow_what_shrinks(measured):
    """Room that was won is kept: a budget is at most a tenth above its measure, or four."""
    loose = {name: f"{value:,} of {budgets()[name]:,}" for name, value in measured.items() if budgets()[name] > max(1.1 * value, value + 4)}
    assert not loose, f"lower these budgets: {loose}"
