"""Torch's own counts of programs with experts, chosen in turn, equal the predicted ones."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.cost.audit import audit_rows
from perfmodel.execute.audit.audit import audit_plan
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.executable import counted_routing, not_modules_reason
from perfmodel.workload.routing import routing_counts, routing_of
from tests.execute.audit.test_audit import TINY, differing_rows, layers_of, num_counted_layers, predicted
from tests.execute.jobs import BIASED, EXPERT_VARIANTS, LATENT_VARIANTS, SPARSE_VARIANTS, STATE_VARIANTS, tiny, tiny_plan
from tests.marks import covering, mostly_nightly

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

GATHERED, ONCE = {"dispatcher": "allgather"}, {"dispatcher": "flex"}
ODD_ORDER = ("cp", "dp_shard", "tp", "dp_replicate", "pp")
FORMS = {
    "every expert everywhere, ZeRO-3": ("mixtral", dict(num_chips=4, zero=3)),
    "ep, ZeRO-2": ("mixtral", dict(num_chips=8, ep=4, zero=2)),
    "ep, ZeRO-3, one copy of each": ("mixtral", dict(num_chips=8, ep=8, zero=3)),
    "ep, hybrid sharding": ("shared experts", dict(num_chips=8, ep=2, zero=3, dp_shard=4, batch=16)),
    "ep tp, etp as tp": ("shared experts", dict(num_chips=8, ep=2, tp=2, etp=2, zero=1)),
    "ep over tp, ZeRO-3": ("shared experts", dict(num_chips=8, ep=4, tp=2, etp=1, zero=3)),
    "ep over tp, cp and data": ("shared experts", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1)),
    "etp a part of tp": ("mixtral", dict(num_chips=8, ep=4, tp=4, etp=2, batch=4)),
    "pp ep ZeRO-3": ("mixtral", dict(num_chips=8, pp=2, ep=2, zero=3)),
    "pp ep interleaved": ("mixtral", dict(num_chips=8, pp=2, ep=4, schedule="interleaved", virtual_stages=2)),
    "latent attention, dense layers first": ("deepseek", dict(num_chips=8, pp=2, ep=2, zero=3)),
    "biases and sinks, ZeRO-3": ("gpt-oss", dict(num_chips=8, ep=2, zero=3)),
    "biases and sinks, ep over tp and cp": ("gpt-oss", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1)),
    "biases and sinks, pp, recomputed": ("gpt-oss", dict(num_chips=8, ep=4, pp=2, recompute="full")),
    "gathered, ZeRO-3": ("mixtral", dict(num_chips=8, ep=4, zero=3, **GATHERED)),
    "gathered, ep over tp, cp and data": ("shared experts", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1, **GATHERED)),
    "once to each rank, ZeRO-3": ("mixtral", dict(num_chips=8, ep=4, zero=3, **ONCE)),
    "once, ep over tp, cp and data": ("shared experts", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1, **ONCE)),
    "once, shared by etp": ("shared experts", dict(num_chips=8, ep=2, tp=2, etp=2, **ONCE)),
    "once, recomputed": ("shared experts", dict(num_chips=8, ep=4, recompute="full", **ONCE)),
    "once, pp, recomputed": ("deepseek, further tokens", dict(num_chips=8, ep=4, pp=2, recompute="full", **ONCE)),
    "once, biases": ("gpt-oss", dict(num_chips=8, ep=2, zero=3, **ONCE)),
    "gathered, recomputed": ("mixtral", dict(num_chips=8, ep=4, recompute="full", **GATHERED)),
    "gathered, pp, recomputed": ("deepseek", dict(num_chips=8, ep=4, pp=2, recompute="full", **GATHERED)),
    "latent attention, tp": ("latent", dict(num_chips=8, tp=4, sequence_parallel=False, batch=4)),
    "latent attention, ulysses": ("deepseek", dict(num_chips=8, cp=2, ep=2, rules="ulysses")),
    "latent attention, ep over tp and cp": ("deepseek", dict(num_chips=16, cp=2, tp=2, ep=4, etp=1, zero=1)),
    "latent attention, tp ZeRO-3, recomputed": ("deepseek", dict(num_chips=8, tp=2, ep=4, etp=1, zero=3, recompute="full")),
    "latent attention, pp tp": ("deepseek, further tokens", dict(num_chips=16, tp=2, pp=2, ep=2, etp=1)),
    "further tokens, pp ep ZeRO-1": ("deepseek, further tokens", dict(num_chips=8, pp=2, ep=4, zero=1)),
    "further tokens, interleaved ZeRO-3": (
        "deepseek, further tokens",
        dict(num_chips=8, pp=2, ep=2, zero=3, schedule="interleaved", virtual_stages=2),
    ),
    "further tokens, ep over tp and cp": ("mixtral, further tokens", dict(num_chips=8, ep=4, cp=2, tp=2, etp=1, recompute="full")),
    "sparse indexer, tp": ("sparse", dict(num_chips=8, tp=4, batch=4)),
    "sparse indexer, tp without sequence": ("sparse", dict(num_chips=8, tp=4, sequence_parallel=False, batch=4)),
    "sparse indexer, further tokens, ZeRO-3": ("glm-5", dict(num_chips=8, ep=4, zero=3)),
    "sparse indexer, ep over tp": ("glm-5", dict(num_chips=8, ep=4, tp=2, etp=1, zero=1)),
    "sparse indexer, pp, recomputed": ("glm-5", dict(num_chips=8, ep=2, pp=2, recompute="full")),
    "gated delta networks, ZeRO-3": ("qwen3-next", dict(num_chips=8, ep=4, zero=3)),
    "gated delta networks, ep over tp": ("qwen3-next", dict(num_chips=8, ep=4, tp=2, etp=1, zero=1)),
    "gated delta networks, pp, recomputed": ("qwen3-next", dict(num_chips=8, ep=2, pp=2, zero=3, recompute="full")),
    "state-space layers, ep over tp": ("nemotron", dict(num_chips=8, ep=4, tp=2, etp=1, zero=1)),
    "state-space layers, pp": ("nemotron", dict(num_chips=8, ep=2, pp=2)),
    "state-space layers without experts, tp": ("hybrid", dict(num_chips=8, tp=4, sequence_parallel=False, batch=4)),
    "ep recomputed": ("shared experts", dict(num_chips=8, ep=4, tp=2, etp=1, recompute="full")),
}
QUICK = (
    "ep over tp, cp and data",
    "further tokens, pp ep ZeRO-1",
    "gated delta networks, ep over tp",
    "sparse indexer, ep over tp",
    "state-space layers, pp",
)
#: In `make test`: each value of each knob, each shape of model, and what was most often wrong.
KEPT = {*covering(FORMS, together=1, cost=num_counted_layers, kept=(*QUICK, "once, recomputed")), "once, recomputed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly((name for name in FORMS if name not in QUICK), KEPT.difference(QUICK)))
def test_each_plan_with_experts_audits_clean_on_each_stage(name, counting):
    check_audit(name, counting)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_plans_with_experts_audit_clean_on_each_stage(name, counting):
    check_audit(name, counting)


def check_audit(name, counting):
    variant, knobs = FORMS[name]
    has_kinds = "kinds" in (EXPERT_VARIANTS | LATENT_VARIANTS | STATE_VARIANTS | SPARSE_VARIANTS | BIASED)[variant]
    layers = {} if has_kinds else layers_of(knobs)
    assert differing_rows(counting, tiny_plan(**{"model": tiny(variant, **layers), **knobs})) == []


def skewed(plan):
    """A rank's tokens all choose the second expert, none the last, and the others in turn."""
    experts, layout = plan.job.transformer.parts.experts, plan.layout
    tokens = plan.micro_batch * plan.job.seq_len // (layout.cp * layout.tp)
    rows = [[tokens if expert == 1 else 0 for expert in range(experts.num_experts)] for _ in range(plan.ep)]
    for rank, row in enumerate(rows):
        for i in range(tokens * (experts.top_k - 1)):
            others = [0, *range(2, experts.num_experts - 1)]
            row[others[(rank + i) % len(others)]] += 1
    return routing_counts(rows)


COUNTED = {
    "ep, ZeRO-3": ("mixtral", dict(num_chips=4, ep=4, zero=3)),
    "ep over tp, cp and data": ("shared experts", dict(num_chips=16, ep=8, cp=2, tp=2, etp=1, zero=1, order=ODD_ORDER)),
    "pp, recomputed": ("deepseek, further tokens", dict(num_chips=8, ep=4, pp=2, recompute="full")),
    "shared by etp": ("mixtral", dict(num_chips=8, ep=2, tp=2, etp=2)),
    "biases": ("gpt-oss", dict(num_chips=4, ep=4, zero=1)),
    "gathered": ("shared experts", dict(num_chips=8, ep=4, cp=2, **GATHERED)),
    "once": ("shared experts", dict(num_chips=8, ep=4, cp=2, **ONCE)),
    "once, recomputed": ("shared experts", dict(num_chips=8, ep=4, recompute="full", **ONCE)),
}
#: In `make test`: tokens sent alike with ranks of tp and cp, and sent once with recomputation.
KEPT_COUNTED = {"ep over tp, cp and data", "once, recomputed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly(COUNTED, KEPT_COUNTED))
def test_tokens_sent_as_counts_say_audit_clean(name, counting):
    variant, knobs = COUNTED[name]
    plan = tiny_plan(model=tiny(variant, **({} if "pp" in knobs else {"num_hidden_layers": 2})), **knobs)
    counts = skewed(plan)
    ranks = (plan.num_chips - 1, plan.num_chips // 2 - 2)
    counted = [counting.count(plan, rank, routing=counts).counts for rank in ranks]
    rows = [audit_rows(predicted(plan, rank, routing=counts), rank_counts) for rank, rank_counts in zip(ranks, counted, strict=True)]
    assert [
        (rank, row) for rank, rank_rows in zip(ranks, rows, strict=True) for row in rank_rows if not row.passes(TINY * bool(row.tolerance))
    ] == []
    assert counts.skew >= 1.5
    assert len({sum(rank_counts.flops.values()) for rank_counts in counted}) > 1


@pytest.mark.slow
def test_rows_that_experts_get_unevenly_audit_clean(counting):
    """In turn, as evenly as they go."""
    plan = tiny_plan(8, model=tiny("mixtral", num_hidden_layers=2), ep=4, seq_len=9)
    counts = counted_routing(plan)
    assert counts.rows[:2] == ((3, 3, 2, 2, 2, 2, 2, 2), (2, 2, 3, 3, 2, 2, 2, 2))
    assert audit_rows(predicted(plan, 3, routing=counts), counting.count(plan, 3, routing=counts).counts)[0].passes()


def test_counts_that_are_not_of_the_plan_are_refused():
    plan = tiny_plan(8, model=tiny("mixtral"), ep=4, seq_len=8)
    with pytest.raises(InputError, match="routing=2 rows: must have one for each of the ep=4 ranks"):
        audit_plan(None, plan, (0,), routing=routing_counts([[2] * 8] * 2))
    with pytest.raises(InputError, match="tiny-llama has no experts to send tokens to"):
        audit_plan(None, tiny_plan(8), (0,), routing=routing_counts([[2] * 8] * 2))


@pytest.mark.usefixtures("audits_share_a_process")
@pytest.mark.slow
def test_the_audit_of_a_plan_that_holds_counts_sends_tokens_as_they_say():
    even = tiny_plan(4, model=tiny("mixtral", num_hidden_layers=2), ep=4, zero=1)
    counts = skewed(even)
    plan = replace(even, job=replace(even.job, routing=routing_of(counts)))
    assert "a run takes tokens as they come; audit the plan" in not_modules_reason(plan)
    audited = perfmodel.audit_plan(plan, rank=0)
    assert audited.skew == counts.skew
    assert [row for row in audited.ranks[0].rows if not row.passes(TINY * bool(row.tolerance))] == []
    stated = perfmodel.audit_plan(even, rank=0, routing=counts)
    assert [row.counted for row in audited.ranks[0].rows] == [row.counted for row in stated.ranks[0].rows]
    assert [row.counted for row in audited.ranks[0].rows] != [row.counted for row in perfmodel.audit_plan(even, rank=0).ranks[0].rows]
