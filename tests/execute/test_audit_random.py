"""Torch's counts of random small plans, of every form and of every shape of model, equal the predicted ones."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.counts import AuditRow, audit_rows
from perfmodel.execute.audit import ranks_to_audit
from tests.execute.random_plans import grown, plans
from tests.execute.test_audit import predicted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

#: Largest share by which memory may differ. Peaks of models that mix everything (a gated relu with ALiBi on eight ranks of a
#: sequence) are within three per cent nine times in ten; those of models that exist are held to that in test_audit_real.py.
SAVED, PEAK = 0.01, 0.15


def rows_of(counting, plan, stage) -> tuple[AuditRow, ...]:
    ranks = ranks_to_audit(plan)
    rank = ranks[stage % len(ranks)]
    return audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)


def check(counting, plan, stage):
    """Counts are equal at the smallest size, where shards are uneven or empty; memory is compared at a size where it is memory."""
    assert [row for row in rows_of(counting, plan, stage) if row.difference and not row.tolerance] == []
    memory = {row.name: row for row in rows_of(counting, grown(plan), stage) if row.tolerance}
    for name, share in (("saved activations", SAVED), ("peak", PEAK)):
        assert abs(memory[name].difference) <= share * memory[name].counted, (name, memory[name])


@settings(max_examples=15)
@given(plan=plans(), stage=st.sampled_from([0, 1, -1]))
def test_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=60)
@given(stage=st.sampled_from([0, 1, -1]), plan=plans())
def test_many_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)
