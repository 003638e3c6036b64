"""Small jobs and estimators that the tests of floors 3 and 4 share. Everything is explicit: no file of the user is read."""

from __future__ import annotations

from functools import cache

from perfmodel.cost.estimate import Estimator, make_estimator
from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.profile import ExecutionProfile, load_profile
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Topology
from perfmodel.parallel.plan import make_plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import Sweep, sweep
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from tests.cost.machines import make_chip, make_tier

PROFILES = ("megatron", "torch-fsdp2", "nanotron", "deepspeed", "composer-fsdp", "torch-gloo")


CHIP = make_chip(peak_flop_rate={Dtype.BF16: 400e12, Dtype.FP16: 400e12, Dtype.FP32: 50e12})


def make_model(**changes) -> TransformerConfig:
    """GPT-2 in small; changes may turn it into something else."""
    values = {
        "name": "small",
        "architecture": "gpt2",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
        "gated_mlp": False,
        "activation": "gelu",
        "norm": "layernorm",
        "position": "learned",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
    }
    return TransformerConfig.of(**(values | changes))


LLAMA_LIKE = {
    "architecture": "llama",
    "num_key_value_heads": 2,
    "gated_mlp": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rotary",
    "qkv_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
    "tie_word_embeddings": False,
    "dropout": 0.0,
}


def make_job(model: TransformerConfig | None = None, *, batch=16, seq_len=256, precision=Precision.BF16_MIXED, optimizer=Optimizer.ADAMW):
    return TrainingJob(model=model or make_model(), global_batch=batch, seq_len=seq_len, precision=precision, optimizer=optimizer)


@cache
def profile_of(name: str) -> ExecutionProfile:
    return load_profile(name)


def estimator_of(
    job: TrainingJob | None = None,
    *,
    chips=16,
    node=4,
    profile: str | ExecutionProfile = "megatron",
    chip=None,
    tiers=(),
    calibration=SPEC_SHEET,
) -> Estimator:
    """An estimator of `job` on nodes of `node` chips behind a slower network, by the data sheet."""
    job = job or make_job()
    tiers = tiers or (make_tier(size=node), make_tier(Topology.FAT_TREE, size=4096, bandwidth=25e9, latency=5e-6))
    cluster = Cluster(name="test", chip=chip or CHIP, num_chips=chips, chips_per_node=tiers[0].size, tiers=tiers)
    machine = resolve_machine(cluster, calibration, dtype=job.policy.compute)
    return make_estimator(job, cluster, machine, profile_of(profile) if isinstance(profile, str) else profile)


def predict(estimator: Estimator, *, headroom=0.0, **knobs) -> Prediction:
    plan = make_plan(
        estimator.job, cluster="test", num_chips=estimator.cluster.num_chips, profile=estimator.profile.name, calibration="", **knobs
    )
    return estimator.predict(plan, memory_headroom=headroom)


def sweep_all(estimator: Estimator, space: Space | None = None, **changes) -> Sweep:
    """A sweep that keeps every plan: nothing is too large for a chip whose headroom is far below zero."""
    return sweep(estimator, space or Space(), top=10**9, **({"memory_headroom": -1e12} | changes))
