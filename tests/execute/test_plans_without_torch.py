"""Reasons and shrunk plans that the planner reads from the executor, without importing torch."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.execute import runner
from perfmodel.execute.per_operator import run as network_run
from perfmodel.execute.runner import executable_reason
from perfmodel.execute.shrink import shrink, shrink_degrees, smallest_ranks
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.choices import Dispatcher, PipelineSchedule
from perfmodel.parallel.executable import not_executable_reason, not_modules_reason
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import make_plan
from perfmodel.verbs import api
from perfmodel.verbs import networks as network_verbs
from perfmodel.verbs.networks import shard_network
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.models import load_model
from perfmodel.workload.networks import load_network
from tests.execute.jobs import tiny, tiny_plan


def test_neither_needs_torch():
    modules = "perfmodel.execute.shrink, perfmodel.execute.runner, perfmodel.parallel.results"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("present", "visible", "seen"),
    [(0, "0,1", 0), (4, "0,1", 2), (4, "", 0), (4, "-1", 0), (4, "0,9,1", 1), (4, "GPU-1a2b,3", 2), (1, "0,0,0", 1), (4, None, 4)],
)
def test_gpus_are_those_that_are_there_and_visible(present, visible, seen, monkeypatch):
    monkeypatch.setattr(runner, "gpu_names", lambda: ("GPU",) * present)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runner.num_gpus() == seen
    assert runner.pick_device("auto", 2) == ("cuda" if seen >= 2 else "cpu")


@pytest.mark.parametrize("shrink", [True, False])
def test_gpus_that_are_not_there_are_refused(shrink, monkeypatch):
    monkeypatch.setattr(runner, "gpu_names", lambda: ())
    with pytest.raises(InputError, match="device=cuda: torch would see no GPU on this machine; use --device cpu"):
        api.run_plan(tiny_plan(2), shrink=shrink, device="cuda")


@pytest.mark.parametrize(("device", "cluster"), [("cpu", "localhost"), ("cuda", "dgx-h100")])
def test_a_network_is_predicted_where_it_is_measured(device, cluster, monkeypatch):
    plan = shard_network(load_network("alexnet", batch=8), cluster="dgx-h100", chips=2).best.plan
    places, measured = [], []
    find = network_verbs.setting_of_network_plan
    monkeypatch.setattr(
        network_verbs, "setting_of_network_plan", lambda plan, **given: (places.append(given["cluster"]), find(plan, **given))[1]
    )
    monkeypatch.setattr(runner, "pick_device", lambda *_: device)
    monkeypatch.setattr(network_run, "measure_network_plans", lambda *_, device, **__: measured.append(device))
    network_verbs.run_network_plan(plan, calibration="spec-sheet")
    assert (places, measured) == ([cluster], [device])


_BATCH = {"batch": ("dp_replicate", "dp_shard")}


@pytest.mark.parametrize(
    "plan, says",
    [
        (tiny_plan(4), "chips=4"),
        (tiny_plan(2, precision=Precision.FP16_MIXED), "precision=fp16-mixed"),
        (tiny_plan(2, precision=Precision.FP8_BLOCK), "precision=fp8-block: the executor has no products in fewer bits than bf16"),
        (tiny_plan(2, recompute="selective", recompute_operators=("activation",)), "recompute_operators=activation"),
    ],
)
def test_a_plan_that_cannot_run_has_a_reason(plan, says):
    assert executable_reason(plan, 2).startswith(says)
    assert ";" in executable_reason(plan, 2)


@pytest.mark.parametrize(
    "plan, says",
    [
        (tiny_plan(2, model=tiny(num_key_value_heads=1), tp=2), "tp=2: must divide num_key_value_heads=1"),
        (tiny_plan(2, pp=2, micro_batch=8), "schedule=1f1b"),
        (tiny_plan(2, model=tiny("olmo2"), tp=2), "tp=2: a norm over all heads"),
        (tiny_plan(2, model=tiny(qk_norm=True, qk_norm_scope="own")), "qk_norm_scope=own"),
        (tiny_plan(2, model=tiny("hybrid"), cp=2), "cp=2: torch's own modules have whole sequences where a mixer has a state"),
        (tiny_plan(2, tp=2, rules=RuleSet(name="owt", source="", rules={**_BATCH, "ffn": ("tp_kv", "tp_q")})), "rules=owt"),
    ],
)
def test_what_torchs_modules_do_not_run_has_a_reason_and_is_interpreted(plan, says):
    assert not_modules_reason(plan).startswith(says)
    assert executable_reason(plan, 2) == ""


def test_mixers_with_a_state_and_experts_run_with_unsharded_sequences():
    model = tiny("qwen3-next")
    assert executable_reason(tiny_plan(2, model=model, ep=2, tp=2, etp=1), 2) == ""
    assert executable_reason(tiny_plan(2, model=model, ep=2, cp=2), 2).startswith("cp=2: torch's own modules have whole sequences")


def test_a_sparse_indexer_runs_with_whole_sequences():
    assert executable_reason(tiny_plan(2, model=tiny("glm-5"), ep=2, tp=2, etp=1), 2) == ""
    assert executable_reason(tiny_plan(2, model=tiny("sparse"), cp=2), 2).startswith("cp=2: the executor's sparse indexer")


def test_the_form_of_a_plan_has_the_same_sentence_on_any_machine():
    plan = tiny_plan(2, precision=Precision.FP16_MIXED)
    assert executable_reason(plan, 2) == not_executable_reason(plan) != ""
    assert not_executable_reason(tiny_plan(4)) == ""


def test_an_inner_stage_needs_a_layer():
    assert executable_reason(tiny_plan(4, pp=4, stage_layers=(2, 0, 2, 0)), 4).startswith("stage_layers[1]=0")


@pytest.mark.parametrize("knobs", [dict(), dict(zero=3), dict(tp=2), dict(cp=2), dict(pp=2, schedule="gpipe", micro_batch=8)])
def test_a_plan_that_can_run_has_none(knobs):
    assert executable_reason(tiny_plan(2, **knobs), 2) == ""


def test_axes_in_use_stay_in_use():
    degrees = dict(pp=8, dp_replicate=1, dp_shard=16, cp=1, tp=8)
    assert shrink_degrees(degrees, 8) == dict(pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2)
    assert shrink_degrees(degrees, 1) == dict.fromkeys(degrees, 1)


LLAMA = load_model("llama-3-70b")


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    virtual=st.sampled_from([1, 2, 5]),
    dp=st.sampled_from([(1, 1, 0), (4, 1, 0), (2, 4, 3), (1, 8, 1), (1, 2, 2)]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 8]),
    ranks=st.integers(1, 9),
    recompute=st.sampled_from(["none", "selective", "full"]),
    order=st.permutations(DEFAULT_ORDER),
)
def test_a_shrunk_plan_fits_runs_and_keeps_its_form(pp, virtual, dp, cp, tp, ranks, recompute, order):
    replicate, shard, zero = dp
    interleaved = pp > 1 and virtual > 1
    plan = make_plan(
        TrainingJob(model=LLAMA, global_batch=256, seq_len=8192),
        cluster="dgx-h100",
        num_chips=pp * replicate * shard * cp * tp,
        pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, zero=zero,
        virtual_stages=virtual if interleaved else 1,
        recompute=recompute,
        order=tuple(order),
    )  # fmt: skip
    small = shrink(plan, ranks)
    assert small.num_chips <= ranks
    assert executable_reason(small, ranks) == ""
    assert small.job.model.num_parameters < 60e6
    assert small.recompute == plan.recompute
    assert small.order == plan.order
    used = [axis for axis in DEFAULT_ORDER if plan.layout.degree(axis) > 1]
    kept = [axis for axis in DEFAULT_ORDER if small.layout.degree(axis) > 1]
    assert set(kept) <= set(used)
    if 2 ** len(used) <= ranks:
        assert kept == used
        assert small.sequence_parallel == plan.sequence_parallel
        assert (small.schedule is PipelineSchedule.INTERLEAVED) == interleaved
        assert small.zero == plan.zero


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("mixtral-8x7b", dict(pp=4, ep=8, zero=1)),
        ("mixtral-8x22b", dict(tp=8, ep=8, etp=1)),
        ("qwen2-57b-a14b", dict(tp=4, ep=16, etp=2, zero=3)),
        ("qwen3-235b-a22b", dict(cp=4, ep=32, zero=2)),
    ],
)
def test_a_shrunk_plan_keeps_experts_sharded(model, knobs, ranks):
    job = TrainingJob(model=load_model(model), global_batch=64, seq_len=4096)
    small = shrink(make_plan(job, cluster="dgx-h100", num_chips=64, **knobs), ranks)
    assert small.num_chips <= ranks
    assert executable_reason(small, ranks) == ""
    assert small.ep > 1 or small.num_chips // small.layout.pp // small.etp == 1
    if small.layout.tp > 1:
        assert (small.etp > 1) == (knobs.get("etp", 1) > 1)


def test_plans_of_experts_that_nothing_runs_are_refused_with_the_reason():
    model = tiny("mixtral")
    plan = tiny_plan(4, model=model, ep=2, tp=2, etp=2)
    assert not_executable_reason(plan) == ""
    assert "etp=2: the executor gathers tokens" in not_executable_reason(replace(plan, dispatcher=Dispatcher.ALL_GATHER))
    once = replace(plan, dispatcher=Dispatcher.FLEX)
    assert not_executable_reason(once) == ""
    for cluster, chips, per_node in (("dgx-h100", 16, 8), ("gb200-nvl72", 144, 72)):
        within, across = (
            tiny_plan(
                chips, model=tiny("mixtral", experts=Experts(num_experts=144, top_k=2, width=24)), ep=ep, batch=chips, dispatcher="flex"
            )
            for ep in (per_node, chips)
        )
        assert not_executable_reason(replace(within, cluster=cluster)) == ""
        reason = not_executable_reason(replace(across, cluster=cluster))
        assert reason.startswith(f"dispatcher=flex: ep={chips} lies on 2 nodes, to each of which a token travels once")
    assert not_executable_reason(replace(across, cluster="no/such/cluster.yaml")) == ""
    assert "send tokens of their own" in not_executable_reason(tiny_plan(4, model=model, tp=2, sequence_parallel=False))
    with pytest.raises(InputError, match=r"ep=8: reaches into dp_replicate=4, over which zero=1 shards nothing; use dp_shard=4"):
        tiny_plan(16, model=model, cp=2, tp=2, ep=8, etp=1, dp_shard=1, dp_replicate=4, zero=1)
    biased = model.having(experts=replace(model.parts.experts, bias=True))
    assert not_executable_reason(tiny_plan(2, model=biased)) == ""
    assert "etp=2: the biases of experts" in not_executable_reason(tiny_plan(4, model=biased, ep=2, tp=2, etp=2))
    assert "dispatcher=allgather: rows are weighted before" in not_executable_reason(tiny_plan(2, model=biased, dispatcher="allgather"))
    sinks = tiny("gpt-oss")
    assert "with sinks as one kernel" in not_executable_reason(tiny_plan(2, model=sinks, attention="unfused"))
    assert "do not deal sinks" in not_executable_reason(tiny_plan(2, model=sinks, cp=2, rules="ulysses"))


def test_shrinking_to_nothing_is_refused():
    with pytest.raises(InputError, match="ranks=0"):
        shrink(tiny_plan(2), 0)


def test_the_fewest_ranks_keep_every_axis_in_use():
    plan = tiny_plan(8, pp=2, tp=2, zero=1)
    assert smallest_ranks(plan) == 8
    assert smallest_ranks(on_two_data_ranks(plan)) == 2


def on_two_data_ranks(plan):
    """The same job on two data ranks alone."""
    return make_plan(plan.job, cluster=plan.cluster, num_chips=2)


def test_a_shrunk_plan_keeps_its_rules_and_heads_that_divide():
    job = TrainingJob(model=load_model("llama-3-8b"), global_batch=8, seq_len=8192)
    plan = make_plan(job, cluster="dgx-h100", num_chips=32, cp=4, tp=2, rules="megatron-ulysses")
    for ranks in (2, 4, 8):
        small = shrink(plan, ranks)
        assert small.rules == plan.rules
        assert not_executable_reason(small) == ""


def test_ends_on_one_rank_share_a_matrix_unless_each_stage_is_sharded_by_itself():
    plans = {zero: tiny_plan(4, model=tiny("qwen3"), pp=2, dp_shard=2, zero=zero, schedule="zbv") for zero in (1, 2, 3)}
    assert not_executable_reason(plans[1]) == ""
    for zero in (2, 3):
        assert not_executable_reason(plans[zero]).endswith("use zero=0 or 1, or schedule=1f1b")
