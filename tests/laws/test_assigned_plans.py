"""A plan that says every operator's sharding takes what the plan with the rule set takes: one road to the number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.cost.estimate import make_estimator
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.resolve import choose_calibration
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.algebra.rules import load_rule_set
from perfmodel.parallel.choices import AttentionKernel, Recompute
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import assigned_plan, make_plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision, TrainingJob
from perfmodel.workload.models import load_model
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.unroll import unrolled
from tests.marks import mostly_slow, pairwise

_MODEL = replace(
    load_model("llama-3-8b"),
    num_hidden_layers=4,
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=8000,
)


def _unrolled(job: TrainingJob, batch: int, *, dropout: bool, attention: str) -> Graph:
    folded = build_graph(
        job.transformer, seq_len=job.seq_len, attention=attention, dropout=dropout, activation_bytes=0.0, parameter_bytes=0.0
    )
    return unrolled(folded, batch=batch, keeps_places=True)


#: ZeRO stage, micro-batches, stages of a pipeline.
_SHAPES = [(0, 1, 1), (1, 2, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (0, 4, 2), (1, 4, 2)]


@pytest.mark.parametrize(
    "profile, rules, shape", pairwise(["megatron", "torchtitan", "nanotron"], ["ddp", "megatron", "megatron-sp", "ulysses"], _SHAPES)
)
def test_an_assignment_by_rules_takes_what_the_rules_take(profile: str, rules: str, shape: tuple[int, int, int]) -> None:
    _check(profile, rules, *shape)


@pytest.mark.parametrize(
    "profile, rules, saved, shape",
    pairwise(
        ["megatron", "torchtitan"],
        ["megatron", "megatron-sp", "ulysses"],
        [("full", "flash"), ("selective", "flash"), ("selective", "unfused")],
        [(3, 2, 1), (1, 4, 2)],
    ),
)
def test_so_does_one_that_recomputes(profile: str, rules: str, saved: tuple[str, str], shape: tuple[int, int, int]) -> None:
    recompute, attention = saved
    _check(profile, rules, *shape, recompute=Recompute(recompute), attention=AttentionKernel(attention))


@pytest.mark.parametrize(
    "profile, rules, shape", pairwise(["megatron", "torchtitan"], ["ddp", "megatron-sp", "ulysses"], [(1, 1, 1), (3, 2, 1)])
)
def test_so_does_one_with_replicas_of_shards(profile: str, rules: str, shape: tuple[int, int, int]) -> None:
    _check(profile, rules, *shape, replicas=2)


@pytest.mark.parametrize("rules", ["ddp", "megatron-sp", "ulysses"])
@pytest.mark.parametrize("zero", [2, 3])
def test_so_does_one_that_keeps_weights_gathered_in_a_pipeline(rules: str, zero: int) -> None:
    _check("torchtitan", rules, zero, 4, 2)


@pytest.mark.parametrize("profile", mostly_slow(["megatron", "torchtitan"]))
@pytest.mark.parametrize("rules", ["ddp", "megatron-sp", "ulysses"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_does_one_with_interleaved_stages(profile: str, rules: str, recompute: str) -> None:
    _check(profile, rules, 1, 4, 2, virtual=2, recompute=Recompute(recompute))


@pytest.mark.parametrize("rules", ["ddp", "megatron-sp"])
@pytest.mark.parametrize(("zero", "pp"), [(0, 1), (3, 1), (0, 2), (1, 2), (3, 2)])
def test_so_does_one_with_tied_embeddings(rules: str, zero: int, pp: int) -> None:
    _check("torchtitan", rules, zero, 4, pp, model=replace(_MODEL, tie_word_embeddings=True))


def _check(
    profile: str,
    rules: str,
    zero: int,
    microbatches: int,
    pp: int,
    *,
    recompute: Recompute = Recompute.NONE,
    attention: AttentionKernel = AttentionKernel.FLASH,
    replicas: int = 1,
    virtual: int = 1,
    model: TransformerConfig = _MODEL,
) -> None:
    tp = 1 if rules in ("ddp", "ulysses") else 2
    cp = 2 if rules == "ulysses" else 1
    dp = 8 // (tp * cp * pp)
    precision = Precision.FP32 if profile == "nanotron" else Precision.BF16_MIXED
    cluster, behaviours = load_cluster("dgx-h100").with_chips(8), load_profile(profile)
    machine = resolve_machine(cluster, choose_calibration(cluster.chip), dtype=PRECISION_POLICIES[precision].compute)
    job = TrainingJob(model=model, global_batch=2 * dp * microbatches, seq_len=2048, precision=precision, optimizer=Optimizer.ADAMW)
    replicas = replicas if zero else dp
    degrees = {"dp_shard": dp // replicas, "dp_replicate": replicas, "zero": zero}
    plan = make_plan(
        job,
        cluster="dgx-h100",
        num_chips=8,
        pp=pp,
        tp=tp,
        cp=cp,
        micro_batch=2,
        rules=load_rule_set(rules),
        profile=profile,
        recompute=recompute,
        attention=attention,
        virtual_stages=virtual,
        **degrees,
    )
    uniform = make_estimator(job, cluster, machine, behaviours).predict(plan)

    graph = _unrolled(job, 2 * dp, dropout=behaviours.kernels.dropout, attention=attention)
    sizes = {"dp_replicate": replicas, "dp_shard": dp // replicas, "cp": cp, "tp_kv": tp, "tp_q": 1}
    assignment = Assignment(
        axes=tuple(MeshAxis(name=name, size=size, tier=0) for name, size in sizes.items()),
        stages=("token_embedding", *(f"layer{i}.block_input" for i in range(1, 4) if i % (4 // (pp * virtual)) == 0)) if pp > 1 else (),
        shardings={operator.name: load_rule_set(rules).sharding(operator) for operator in graph.operators},
    )
    network = TrainingJob(
        model=NetworkModel(name="little-llama"), global_batch=job.global_batch, seq_len=1, precision=precision, optimizer=Optimizer.ADAMW
    )
    estimator = make_estimator(network, cluster, machine, behaviours, lambda batch: graph)
    assigned = estimator.predict(
        assigned_plan(
            network,
            cluster="dgx-h100",
            assignment=assignment,
            micro_batch=2 * dp,
            zero=zero,
            recompute=recompute,
            attention=attention,
            schedule=plan.schedule,
            virtual_stages=virtual,
            profile=profile,
        )
    )
    assert assigned.step_time == pytest.approx(uniform.step_time, rel=1e-12)
    for name, value in uniform.parts.items():
        assert assigned.parts[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name
    for name, value in uniform.memory.items():
        assert assigned.memory[name] == pytest.approx(value, rel=1e-12), name
