"""Plans of real models on 8 to 4,096 ranks audit clean, on the first and on the last stage."""

from __future__ import annotations

import importlib.util

import pytest

from perfmodel.execute.audit.audit import ranks_to_audit
from perfmodel.verbs import api
from tests.execute.real_plans import PLANS, real_plan, shallow_plan
from tests.marks import mostly_nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("audits_share_a_process"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


#: Plans whose step takes longest to count: the last stage alone, because another plan has the program of the other stage.
LAST_ONLY = {
    "DeepSeek-V3, 1F1B, experts over data, further tokens, ZeRO-1",
    "GLM-4.5, 1F1B, experts in turn over TP and data, ZeRO-1",
    "gpt-oss 20B, pipeline, experts over data, ZeRO-3",
    "Mixtral 8x7B, 1F1B, experts over data, ZeRO-1",
    "GPT-3 175B, 1F1B, TP, HSDP",
    "Llama 3 70B, 1F1B, TP, ZeRO-1",
    "Llama 3.1 405B, 1F1B, TP, ZeRO-3, full recomputation",
    "Llama 3.1 405B, 131,072 tokens: pipeline, context, TP, ZeRO-2",
}
FIRST_ONLY = {
    "Qwen3 30B, 1F1B, experts gathered, ZeRO-1",
    "DeepSeek-V2, 1F1B, experts over data, ZeRO-1",
    "GPT-NeoX 20B, 1F1B, TP, data parallel",
    "Llama 2 70B, interleaved, TP, ZeRO-1",
    "Qwen2.5 72B, pipeline, context, TP, ZeRO-2",
    "Qwen3 8B, pipeline, context, TP, ZeRO-3",
    "GLM-5, 1F1B, sparse indexer, experts over data and TP, ZeRO-1",
}


#: In `make test` at a few layers of full width; one plan of the fewest layers is whole there as well.
WHOLE = {"GPT-2, data parallel"}


@pytest.mark.parametrize("name", mostly_nightly(PLANS, WHOLE))
def test_real_plans_audit_clean(name):
    check(name, real_plan(name))


#: In `make test` at a few layers: each kind of layer, with every axis and schedule among them; test_audit.py has the other forms, tiny.
FEW_LAYERS = {
    "Falcon 7B, ZeRO-3, full recomputation",
    "Gemma 2 9B, FSDP and TP, unfused, selective recomputation",
    "Qwen3 8B, pipeline, context, TP, ZeRO-3",
    "Llama 2 70B, interleaved, TP, ZeRO-1",
    "DeepSeek-V2, 1F1B, experts over data, ZeRO-1",
    "GLM-5, 1F1B, sparse indexer, experts over data and TP, ZeRO-1",
    "Qwen3-Next 80B, experts over data, ZeRO-1",
    "Nemotron 3 Nano, experts over data and TP, ZeRO-1",
    "gpt-oss 20B, pipeline, experts over data, ZeRO-3",
}


@pytest.mark.parametrize("name", mostly_nightly((name for name in PLANS if name not in WHOLE), FEW_LAYERS))
def test_real_plans_of_few_layers_audit_clean(name):
    plan = shallow_plan(name)
    assert len(plan.job.transformer.layer_kinds) == len(real_plan(name).job.transformer.layer_kinds)
    check(name, plan)


def check(name, plan):
    first, last = 0, ranks_to_audit(plan)[-1]
    audited = api.audit_plan(plan, rank=last if name in LAST_ONLY else first if name in FIRST_ONLY else None)
    assert len(audited.ranks) == (1 if name in LAST_ONLY | FIRST_ONLY else min(2, plan.layout.pp))
    assert audited.differences() == []
    assert max(rank.memory for rank in audited.ranks) < 2e9
