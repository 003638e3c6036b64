"""Torch's counts of random small plans, of every form and of every shape of model, equal the predicted ones."""

from __future__ import annotations

import importlib.util
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.counts import AuditRow, audit_rows
from perfmodel.execute.audit import ranks_to_audit
from tests.execute.random_plans import plans
from tests.execute.test_audit import predicted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

#: Largest share by which a row of memory may differ, by its name; every other row is a count and must be equal.
TOLERANCES = {"saved activations": math.inf, "peak": math.inf}


def is_equal(row: AuditRow) -> bool:
    return abs(row.difference) <= TOLERANCES.get(row.name, 0.0) * max(abs(row.predicted), abs(row.counted))


def check(counting, plan, stage):
    ranks = ranks_to_audit(plan)
    rank = ranks[stage % len(ranks)]
    rows = audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)
    assert [row for row in rows if not is_equal(row)] == []


@settings(max_examples=15)
@given(plan=plans(), stage=st.sampled_from([0, 1, -1]))
def test_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=100)
@given(stage=st.sampled_from([0, 1, -1]), plan=plans())
def test_many_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)
