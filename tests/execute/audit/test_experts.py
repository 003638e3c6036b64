"""Torch's own counts of programs with experts, chosen in turn, equal the predicted ones."""

from __future__ import annotations

import importlib.util

import pytest

from perfmodel.execute.audit.audit import audit_plan
from perfmodel.foundation.errors import InputError
from tests.execute.audit.test_audit import differing_rows
from tests.execute.jobs import tiny, tiny_plan

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

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
    "further tokens, pp ep ZeRO-1": ("deepseek, further tokens", dict(num_chips=8, pp=2, ep=4, zero=1)),
    "further tokens, interleaved ZeRO-3": (
        "deepseek, further tokens",
        dict(num_chips=8, pp=2, ep=2, zero=3, schedule="interleaved", virtual_stages=2),
    ),
    "further tokens, ep over tp and cp": ("mixtral, further tokens", dict(num_chips=8, ep=4, cp=2, tp=2, etp=1, recompute="full")),
    "ep recomputed": ("shared experts", dict(num_chips=8, ep=4, tp=2, etp=1, recompute="full")),
}
QUICK = ("ep over tp, cp and data", "further tokens, pp ep ZeRO-1")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMS])
def test_plans_with_experts_audit_clean_on_each_stage(name, counting):
    variant, knobs = FORMS[name]
    layers = {} if {"pp", "recompute"} & knobs.keys() else {"num_hidden_layers": 2}
    assert differing_rows(counting, tiny_plan(**{"model": tiny(variant, **layers), **knobs})) == []


def test_rows_that_experts_would_get_unevenly_are_refused():
    with pytest.raises(InputError, match="a rank's 18 rows are not evenly many for 8 experts on ep=4 ranks"):
        audit_plan(None, tiny_plan(8, model=tiny("mixtral"), ep=4, seq_len=9), (0,))
