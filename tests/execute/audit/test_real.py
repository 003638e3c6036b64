"""Plans of real models on 8 to 4,096 ranks audit clean, on the first and on the last stage."""

from __future__ import annotations

import importlib.util

import pytest

from perfmodel.verbs import api
from tests.execute.real_plans import PLANS, real_plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("audits_share_a_process"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


@pytest.mark.parametrize("name", PLANS)
def test_real_plans_audit_clean(name):
    plan = real_plan(name)
    audited = api.audit_plan(plan)
    assert len(audited.ranks) == min(2, plan.layout.pp)
    assert audited.differences() == []
    assert max(rank.memory for rank in audited.ranks) < 2e9
