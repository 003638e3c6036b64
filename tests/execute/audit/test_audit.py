"""Torch's own counts of the executor's program, under fake tensors at full size, equal the predicted ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from perfmodel.cli import app as cli
from perfmodel.cost.audit import audit_rows
from perfmodel.cost.counts import RankCounts, executor_profile, predicted_counts
from perfmodel.cost.resolve import choose_calibration, resolve_estimator
from perfmodel.execute.audit import audit
from perfmodel.execute.audit.audit import ranks_to_audit
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.executable import counted_routing, not_modules_reason
from perfmodel.parallel.plan import Plan, make_plan, place_of, rank_at
from perfmodel.parallel.plan_file import write_plan
from perfmodel.verbs import api
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.models import load_model
from tests.execute.jobs import tiny, tiny_plan
from tests.marks import covering, mostly_nightly

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

SP_OFF = {"sequence_parallel": False}
#: Microbatches cost as much as they are many, and further ones repeat these (test_repeat.py): two, or more than a pipeline has ranks.
FORMS = {
    "data parallel": dict(num_chips=8),
    "gradient accumulation": dict(num_chips=2),
    "ZeRO-1": dict(num_chips=8, zero=1),
    "ZeRO-2": dict(num_chips=8, zero=2),
    "ZeRO-3": dict(num_chips=8, zero=3),
    "ZeRO-3 on more ranks than rows": dict(num_chips=128, zero=3, batch=128),
    "ZeRO-1 replicated": dict(num_chips=8, zero=1, dp_shard=4),
    "hybrid sharding": dict(num_chips=8, zero=3, dp_shard=4, batch=16),
    "tp": dict(num_chips=8, tp=4, batch=4, **SP_OFF),
    "tp sp": dict(num_chips=8, tp=4, batch=4),
    "cp": dict(num_chips=8, cp=4, batch=4),
    "cp unfused": dict(num_chips=8, cp=4, batch=4, attention="unfused"),
    "ulysses": dict(num_chips=8, cp=4, batch=4, rules="ulysses", model=tiny(num_key_value_heads=8)),
    "ulysses unfused, recomputed": dict(num_chips=4, cp=2, batch=4, rules="ulysses", attention="unfused", recompute="selective"),
    "ulysses inside tp": dict(num_chips=16, cp=2, tp=2, pp=2, batch=4, rules="megatron-ulysses", zero=3),
    "cp in the order of ranks": dict(num_chips=8, cp=2, tp=2, batch=4, order=("cp", "dp_shard", "tp", "dp_replicate", "pp")),
    "full recomputation": dict(num_chips=8, tp=2, zero=3, recompute="full"),
    "selective recomputation": dict(num_chips=8, tp=2, recompute="selective"),
    "selective recomputation, unfused": dict(num_chips=8, cp=2, recompute="selective", attention="unfused"),
    "pp gpipe": dict(num_chips=8, pp=2, schedule="gpipe"),
    "pp 1f1b": dict(num_chips=8, pp=4),
    "pp interleaved": dict(num_chips=8, pp=2, schedule="interleaved", virtual_stages=2),
    "pp interleaved ZeRO-3": dict(num_chips=8, pp=2, schedule="interleaved", virtual_stages=2, zero=3),
    "pp interleaved ZeRO-3, gathered again": dict(
        num_chips=4, pp=2, schedule="interleaved", virtual_stages=5, zero=3, model=tiny(num_hidden_layers=10)
    ),
    "pp ZeRO-1": dict(num_chips=8, pp=2, zero=1),
    "pp gpipe ZeRO-2": dict(num_chips=8, pp=2, zero=2, schedule="gpipe"),
    "pp dp_shard tp": dict(num_chips=64, pp=4, tp=4, zero=3, batch=20),
    "pp dp_replicate tp": dict(num_chips=16, pp=2, tp=2, **SP_OFF),
    "pp dp_shard tp interleaved": dict(num_chips=8, pp=2, tp=2, schedule="interleaved", virtual_stages=2, zero=3),
    "pp tp ZeRO-1": dict(num_chips=16, pp=2, tp=2, zero=1),
    "dp_replicate dp_shard tp": dict(num_chips=16, tp=2, zero=3, dp_shard=4),
    "cp tp ZeRO-3": dict(num_chips=16, cp=2, tp=2, zero=3),
    "cp tp ZeRO-1": dict(num_chips=16, cp=2, tp=2, zero=1),
    "pp cp tp": dict(num_chips=16, pp=2, cp=2, tp=2, batch=6),
    "pp cp tp dp_shard": dict(num_chips=32, pp=2, cp=2, tp=2, zero=3),
    "pp cp tp dp_shard dp_replicate": dict(num_chips=64, pp=2, cp=2, tp=2, zero=3, dp_shard=4, batch=24),
    "pp cp tp ZeRO-1": dict(num_chips=32, pp=2, cp=2, tp=2, zero=1),
    "pp cp tp gpipe recomputed": dict(num_chips=16, pp=2, cp=2, tp=2, schedule="gpipe", recompute="full"),
    "uneven stages": dict(num_chips=4, pp=2, batch=6, stage_layers=(3, 1)),
    "bf16-mixed": dict(num_chips=8, precision=Precision.BF16_MIXED),
    "bf16-mixed ZeRO-1": dict(num_chips=8, zero=1, tp=2, precision=Precision.BF16_MIXED),
    "bf16-mixed ZeRO-3": dict(num_chips=8, zero=3, tp=2, precision=Precision.BF16_MIXED),
    "bf16-mixed pp ZeRO-3": dict(num_chips=16, pp=2, zero=3, tp=2, precision=Precision.BF16_MIXED),
    "bf16 ZeRO-3": dict(num_chips=8, zero=3, tp=2, precision=Precision.BF16),
    "sgd": dict(num_chips=8, zero=3, optimizer=Optimizer.SGD),
    "momentum": dict(num_chips=8, zero=1, optimizer=Optimizer.MOMENTUM),
}  # fmt: skip
VARIANTS = ("gpt2", "qwen3", "falcon", "neox", "gemma2", "bloom")
#: Of each other shape of model.
VARIANT_FORMS = ("ZeRO-1", "tp sp", "tp", "cp", "pp cp tp dp_shard")


def layers_of(knobs: Mapping[str, Any]) -> dict[str, int]:
    """Return two layers, unless a pipeline needs more or a recomputed layer must be small compared with the rest."""
    needs_more = "recompute" in knobs or "stage_layers" in knobs or knobs.get("pp", 1) * knobs.get("virtual_stages", 1) > 2
    return {} if needs_more else {"num_hidden_layers": 2}


def num_counted_layers(form: Any) -> float:
    """Layers of all ranks that an audit of each stage runs, again where they are recomputed: what it takes goes with them."""
    knobs = form[-1] if isinstance(form, tuple) else form
    return layers_of(knobs).get("num_hidden_layers", 4) * (2 if "recompute" in knobs else 1) + 2 * knobs.get("pp", 1)


def shallow(form: str, variant: str = "llama", **changes: object) -> Plan:
    layers = layers_of(FORMS[form])
    return tiny_plan(**{"model": tiny(variant, **layers, **changes), **FORMS[form]})


PLANS = {name: shallow(name) for name in FORMS} | {
    f"{variant}, {form}": shallow(form, variant) for variant in VARIANTS for form in VARIANT_FORMS
}
PLANS |= {
    "norms after branches and over all heads": shallow("ZeRO-3", "olmo2"),
    "norms after branches, tp": shallow("tp sp", "olmo2", qk_norm=False),
    "gated attention, cp": shallow("cp", "gated"),
    "gated attention, ulysses unfused, recomputed": shallow("ulysses unfused, recomputed", "gated"),
    "layers without positions": shallow("tp sp", "smollm3"),
}


def predicted(plan, rank, profile=None, routing=None) -> RankCounts:
    cluster = load_cluster("dgx-h100", num_chips=plan.num_chips)
    profile = profile or executor_profile(plan.job.policy, plan.compression)
    estimator = resolve_estimator(plan.job, cluster, calibration=choose_calibration(cluster.chip, ""), profile=profile)
    return predicted_counts(estimator, plan, place_of(plan, rank), routing)


#: Memory of models this small depends on single tensors, such as DTensor's sum of an accumulated gradient. Real models have their own
#: tolerance, in test_real.py.
TINY = 0.06


def differing_rows(counting, plan):
    """Rows of every stage whose counts are not equal."""
    assert not_modules_reason(plan) == ""
    routing = counted_routing(plan)
    return [
        (rank, row)
        for rank in ranks_to_audit(plan)
        for row in audit_rows(predicted(plan, rank, routing=routing), counting.count(plan, rank, routing=routing).counts)
        if not row.passes(TINY if row.tolerance else 0.0)
    ]


QUICK = ("cp",)
#: In `make test`: each value of each knob, each schedule, and each other shape of model in a form of its own.
SHAPES = {"gpt2, tp", "qwen3, cp", "falcon, tp sp", "neox, pp cp tp dp_shard", "gemma2, ZeRO-1", "bloom, cp"}
SHAPES |= {"norms after branches, tp", "gated attention, cp", "layers without positions"}
KEPT = SHAPES | {"pp interleaved"}
SHOWN = {form for form in FORMS for name in (*KEPT, *QUICK) if name == form or name.endswith(f", {form}")}
KEPT |= set(covering(FORMS, together=1, cost=num_counted_layers, kept=SHOWN))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly((name for name in PLANS if name not in QUICK), KEPT.difference(QUICK)))
def test_each_form_of_plan_audits_clean_on_each_stage(name, counting):
    assert differing_rows(counting, PLANS[name]) == []


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_every_form_of_plan_audits_clean_on_each_stage(name, counting):
    assert differing_rows(counting, PLANS[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("attention, recompute", [("flash", "none"), ("unfused", "selective")])
def test_dropout_keeps_its_masks(attention, recompute, counting):
    plan = make_plan(
        TrainingJob(model=load_model("gpt2").with_layers(4), global_batch=2, seq_len=512),
        cluster="dgx-h100",
        num_chips=2,
        attention=attention,
        recompute=recompute,
    )
    with_masks = executor_profile(plan.job.policy).having(dropout=True)
    counted = counting.count(plan, 0, dropout=True).counts
    assert [row for row in audit_rows(predicted(plan, 0, with_masks), counted) if not row.passes()] == []
    assert counted.saved > 1.02 * counting.count(plan, 0).counts.saved


def test_a_wrong_count_is_a_difference():
    plan = PLANS["tp sp"]
    right = predicted(plan, 0)
    missing, *others = right.collectives.items()
    wrong = replace(right, parameters=right.parameters + 4, collectives=dict(others))
    name = " ".join(missing[0])
    assert [row.name for row in audit_rows(wrong, right) if row.difference] == [name, name, "parameters"]


def test_ranks_are_one_of_each_stage_with_the_last_chunk_of_the_sequence():
    plan = PLANS["pp cp tp dp_shard"]
    ranks = ranks_to_audit(plan)
    assert [place_of(plan, rank) for rank in ranks] == [dict(tp=0, cp=1, dp_shard=0, dp_replicate=0, pp=pp) for pp in (0, 1)]
    assert [rank_at(plan, place_of(plan, rank)) for rank in range(plan.num_chips)] == list(range(plan.num_chips))
    assert ranks_to_audit(plan, rank=5) == (5,)
    with pytest.raises(InputError, match="rank=99: must be from 0 to 31"):
        ranks_to_audit(plan, rank=99)


def test_scores_of_a_later_chunk_of_a_sequence_have_more_columns():
    """A float32 softmax and a bf16 cast of it for 8 heads, 8 queries and 8 further keys, in each of 4 layers."""
    plan = tiny_plan(4, cp=4, attention="unfused", batch=4, model=tiny("gpt2"), precision=Precision.BF16_MIXED)
    saved = [predicted(plan, rank).saved for rank in range(4)]
    assert [after - before for before, after in pairwise(saved)] == [4 * (4 + 2) * 8 * 8 * 8] * 3


@pytest.mark.slow
def test_the_verb_prints_both_counts_and_leaves_with_0(tmp_path, capfd, counting, monkeypatch):
    """The first audit counts in a process of its own."""
    path = tmp_path / "plan.yaml"
    write_plan(replace(PLANS["ZeRO-3"], cluster="dgx-h100"), path)
    assert cli.run(["audit", str(path), "--json"]) == 0
    monkeypatch.setattr(audit, "CountingProcess", lambda: nullcontext(counting))
    result = json.loads(capfd.readouterr().out)
    assert result["is_clean"]
    rows = {(row["group"], row["name"], row["unit"]): row for row in result["ranks"][0]["rows"]}
    assert rows["collectives", "all_gather dp_shard", ""]["counted"] == 7
    assert cli.run(["audit", str(path), "--rank", "3"]) == 0
    out = capfd.readouterr().out
    assert "Every count is equal" in out
    assert "all-gather over dp_shard" in out
    assert "the plan's own is megatron" in out
    assert "does not fit" not in out


@pytest.mark.usefixtures("audits_share_a_process")
@pytest.mark.slow
def test_a_program_that_exceeds_its_chip_is_reported(tmp_path, capfd, monkeypatch):
    """Counted at a tiny size: what is predicted has another chip."""
    path = tmp_path / "plan.yaml"
    write_plan(replace(PLANS["ZeRO-3"], cluster="dgx-h100"), path)
    predict = api.predict_plan
    monkeypatch.setattr(api, "predict_plan", lambda plan: replace(predict(plan), memory_usable=1000.0))
    assert cli.run(["audit", str(path), "--rank", "0"]) == 0
    out = capfd.readouterr().out
    assert "This program does not fit: the tensors of rank 0 alone take" in out
    assert "1000 B" in out


@pytest.mark.slow
@pytest.mark.usefixtures("audits_share_a_process")
def test_a_difference_leaves_with_1(tmp_path, capfd, monkeypatch):
    path = tmp_path / "plan.yaml"
    write_plan(replace(PLANS["ZeRO-3"], cluster="dgx-h100"), path)
    right = api.audit_plan

    def doctored(*arguments, **keywords):
        result = right(*arguments, **keywords)
        rows = tuple(replace(row, predicted=row.predicted + 8) if row.name == "gradients" else row for row in result.ranks[0].rows)
        return replace(result, ranks=(replace(result.ranks[0], rows=rows),))

    monkeypatch.setattr(api, "audit_plan", doctored)
    assert cli.run(["audit", str(path)]) == 1
    assert "1 of torch's counts differ" in capfd.readouterr().out
    assert cli.run(["audit", str(path), "--tolerance", "0.5"]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("audits_share_a_process")
@pytest.mark.parametrize("precision", ["fp8-block", "fp16-mixed"])
def test_a_plan_in_another_precision_is_counted_in_that_of_the_executor(tmp_path, capfd, precision):
    path = tmp_path / "plan.yaml"
    plan = PLANS["ZeRO-3"]
    write_plan(replace(plan, cluster="dgx-h100", job=replace(plan.job, precision=Precision(precision))), path)
    assert cli.run(["audit", str(path), "--rank", "0"]) == 0
    assert f"bf16-mixed, as the executor computes; the plan's own is {precision}" in capfd.readouterr().out


def test_what_the_executor_cannot_run_is_refused(tmp_path, capfd):
    path = tmp_path / "plan.yaml"
    write_plan(replace(tiny_plan(8, tp=8, batch=8), cluster="dgx-h100"), path)
    assert cli.run(["audit", str(path)]) == 2
    assert "must divide num_key_value_heads=4" in capfd.readouterr().err


@pytest.mark.slow
def test_what_a_collective_makes_is_counted_once():
    """A fake tensor that is waited for comes back with a storage of its own."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import perfmodel.execute.audit.program  # noqa: F401 - torch's functional collectives
    from perfmodel.execute.measure.instrument import StorageTracker

    with FakeTensorMode(), StorageTracker() as tracker:
        before = tracker.current
        tensor = torch.ops._c10d_functional.wait_tensor(torch.empty(1000))
        assert tracker.current == tracker.peak == before + tensor.nbytes
