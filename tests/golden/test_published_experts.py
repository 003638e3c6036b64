"""Models with experts against published figures: what a layer keeps, the memory of DeepSeek-V3, its step on 2,048 H800.

Sources: Megatron-Core's report on mixtures of experts (arXiv 2603.07685: activations, weights and gradients, optimizer of DeepSeek-V3 on
256 GPUs, pp 4, vpp 4, ep 64, bf16); DeepSeek-V3's report (arXiv 2412.19437: 180 K GPU hours per 1e12 tokens on 2,048 H800).
"""

import numpy as np
import pytest

import perfmodel
from perfmodel.cost.estimate import memory_on_rank
from perfmodel.cost.program import SAVED, compile_program
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import build_graph
from tests.cost.jobs import estimator_of

TOKENS = 4096


def kept_bytes(name, region):
    """Return the bytes that one layer keeps of one token on one rank, as Megatron runs it, without the unrotated q and k."""
    graph = build_graph(
        load_model(name), seq_len=TOKENS, attention="flash", dropout=False, activation_bytes=2.0, parameter_bytes=2.0, dispatcher="alltoall"
    )
    profile = load_profile("megatron").having(keeps_unrotated_qk=False)
    derivation = derive(graph, apply_rules(graph, rule_set_of("megatron-sp")))
    program = compile_program(derivation, profile, recompute_operators=(), attention_kernel="flash")
    number = [part.name for part in program.regions].index(region)
    of_layer = program.saved.segments // len(SAVED) == number
    amounts = program.saved.columns["amount"][of_layer]
    return float((program.rows.amounts.base * np.ceil(program.rows.amounts.padded_size))[amounts].sum()) / TOKENS


#: Model -> bytes that a layer keeps of a token, and those of statistics in addition: of norms and of the weights of chosen experts.
KEPT = {"mixtral-8x7b": (258_240, 2 * 4 + 2 * 4), "deepseek-v3": (572_032, 4 * 4 + 8 * 4)}
#: [GB] of activations, of weights and gradients, of the optimizer
BREAKDOWN = (131.0, 36.4, 32.1)
#: [s]
H800_STEP = 19.9


@pytest.mark.parametrize(("name", "published", "statistics"), [(name, *sizes) for name, sizes in KEPT.items()])
def test_bytes_that_a_layer_keeps_of_a_token(name, published, statistics):
    assert kept_bytes(name, "layer") == published + statistics


def memory_of_deepseek_v3_on_256_chips():
    """A middle rank with 15 of the 58 layers with experts (14.5 on average); the report's activations are 56 times those of a layer."""
    job = TrainingJob(model=load_model("deepseek-v3"), global_batch=256, seq_len=TOKENS)
    estimator = estimator_of(job, chips=256, node=8)
    knobs = {"pp": 4, "dp": 64, "ep": 64, "zero": 1, "schedule": "interleaved", "virtual_stages": 4, "profile": "megatron"}
    plan = make_plan(job, cluster="test", num_chips=256, stage_layers=(4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3), **knobs)
    _, _, memory = memory_on_rank(estimator, plan, 1)
    kept = 56 * TOKENS * kept_bytes("deepseek-v3", "layer")
    return tuple(num_bytes / 1e9 for num_bytes in (kept, memory["weights"] + memory["gradients"], memory["optimizer"]))


def test_memory_of_deepseek_v3_on_256_chips():
    assert memory_of_deepseek_v3_on_256_chips() == pytest.approx(BREAKDOWN, rel=0.02)
    assert memory_of_deepseek_v3_on_256_chips()[0] == pytest.approx(BREAKDOWN[0], rel=0.005)


def step_of_deepseek_v3_on_2048_h800():
    """Stages take alike, as DualPipe evens them out (stages r and 15 - r share a rank)."""
    job = TrainingJob(model=load_model("deepseek-v3"), global_batch=15360, seq_len=TOKENS, precision=Precision.FP8_BLOCK)
    plan = make_plan(
        job,
        cluster="h800-sxm-80gb",
        num_chips=2048,
        pp=16,
        dp=128,
        ep=64,
        zero=1,
        dispatcher="flex",
        profile="megatron+fp8_dispatch+moe_overlap+delayed_weight_gradients",
    )
    return perfmodel.predict(plan).step_time


def test_step_of_deepseek_v3_on_2048_h800():
    assert step_of_deepseek_v3_on_2048_h800() == pytest.approx(H800_STEP, rel=0.07)
