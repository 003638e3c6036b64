"""Faster hardware never makes a plan slower, nor does computing less: every plan of random jobs, with every framework's behaviour."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from perfmodel.frameworks.profile import list_profiles
from perfmodel.hardware.fabric import Topology
from perfmodel.parallel.choices import Recompute
from perfmodel.planner.uniform.space import Space
from tests.cost.jobs import CHIP, LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all
from tests.cost.machines import make_tier
from tests.marks import mostly_nightly

ROUNDING = 1 + 1e-9


def random_job(rng: random.Random):
    h = rng.choice([256, 512, 1024, 4096, 8192])
    sizes = {
        "num_hidden_layers": rng.choice([4, 8, 12, 16]),
        "hidden_size": h,
        "num_attention_heads": h // 64,
        "num_key_value_heads": h // 64,
        "intermediate_size": 4 * h,
        "vocab_size": rng.choice([1000, 32000, 128000]),
        "max_position_embeddings": 8192,
        "sliding_window": rng.choice([0, 0, 0, 128]),
    }
    model = make_model(**(LLAMA_LIKE if rng.random() < 0.5 else {}) | sizes)
    return make_job(model, batch=rng.choice([8, 16, 32]), seq_len=rng.choice([256, 1024, 4096]))


def machine_of(*, rate=1.0, memory=1.0, bandwidth=1.0, latency=1.0):
    chip = replace(
        CHIP,
        peak_flop_rate={dtype: rate * peak for dtype, peak in CHIP.peak_flop_rate.items()},
        memory=replace(CHIP.memory, bandwidth=memory * CHIP.memory.bandwidth),
    )
    inner = make_tier(size=4, bandwidth=300e9 * bandwidth, latency=2e-6 * latency)
    outer = make_tier(Topology.FAT_TREE, size=4096, bandwidth=25e9 * bandwidth, latency=5e-6 * latency)
    return {"chip": chip, "tiers": (inner, outer)}


@lru_cache(maxsize=1)
def compiled(job, profile):
    """An estimator whose programs those of other machines take over: they are of no machine."""
    return estimator_of(job, profile=profile)


def step_times(job, profile, space=None, *, chips=8, **machine):
    """Return the step time of every plan of a space, in the order of its ids."""
    estimator, twin = estimator_of(job, chips=chips, profile=profile, **machine_of(**machine)), compiled(job, profile)
    estimator.programs = twin.programs
    best = sweep_all(estimator, space).best.time
    return best.values[np.argsort(best.ids)]


FRAMEWORKS = sorted(list_profiles(), key=lambda name: name != "megatron")
#: Each framework with two jobs; in `make test`, every fourth framework and those with unusual communication.
DRAWN = [(profile, seed) for profile in FRAMEWORKS for seed in range(2)]
KEPT = [(profile, 0) for profile in (*FRAMEWORKS[::4], "nanotron", "torch-fsdp2", "deepspeed")]


@pytest.mark.slow
@pytest.mark.parametrize("profile, seed", mostly_nightly(DRAWN, KEPT))
def test_faster_hardware_is_never_slower(profile, seed):
    rng = random.Random(f"{profile} {seed}")
    job, factor = random_job(rng), 10 ** rng.uniform(0, 2)
    base = {"rate": 10 ** rng.uniform(-1, 1), "bandwidth": 10 ** rng.uniform(-1, 1), "latency": 10 ** rng.uniform(-1, 2), "memory": 1.0}
    before = step_times(job, profile, **base)
    for what, change in {"rate": factor, "memory": factor, "bandwidth": factor, "latency": 1 / factor}.items():
        after = step_times(job, profile, **base | {what: base[what] * change})
        assert np.all(after <= before * ROUNDING), (what, factor)


@pytest.mark.parametrize("profile", ["megatron", "nanotron", "torch-fsdp2", "composer-fsdp"])
@pytest.mark.slow
def test_computing_less_is_never_slower(profile):
    rng = random.Random(profile)
    job = random_job(rng)
    none, selective, full = (step_times(job, profile, Space(fixed={"recompute": str(kind)}), rate=8.0) for kind in Recompute)
    assert np.all(none <= selective * ROUNDING)
    assert np.all(selective <= full * ROUNDING)
