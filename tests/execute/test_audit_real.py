"""Plans of real models on hundreds and thousands of ranks audit clean, on the first and on the last stage."""

from __future__ import annotations

import importlib.util

import pytest

from perfmodel import api

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

PLANS = {
    "Llama 3 70B on 512, Megatron's form": (
        dict(model="llama-3-70b", global_batch=512),
        dict(num_chips=512, tp=8, pp=4, zero=1),
    ),
    "Llama 3.1 405B on 4,096, FSDP in a pipeline": (
        dict(model="llama-3.1-405b", global_batch=2048),
        dict(num_chips=4096, tp=8, pp=16, zero=3, recompute="full"),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_real_plans_audit_clean(name):
    job, knobs = PLANS[name]
    plan = api.make_plan(api.make_job(seq_len=8192, **job), cluster="dgx-h100", **knobs)
    audited = api.audit_plan(plan)
    assert len(audited.ranks) == 2
    assert max(audited.counted_microbatches) < plan.num_microbatches
    assert audited.differences() == []
    assert max(rank.memory for rank in audited.ranks) < 2e9
