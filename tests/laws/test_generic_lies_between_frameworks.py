"""`generic` takes no more, and no less, than all known frameworks at once: random jobs, clusters and plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.ensemble import known_families
from perfmodel.frameworks.profile import GENERIC
from tests.marks import mostly_nightly

MODELS = (
    "gpt2",
    "gpt2-xl",
    "llama-3.2-1b",
    "llama-2-7b",
    "llama-3-8b",
    "llama-2-13b",
    "llama-3-70b",
    "olmo-2-7b",
    "qwen2.5-7b",
    "falcon-7b",
)
CLUSTERS = ("dgx-h100", "dgx-a100", "hgx-h200", "aws-p4d", "dgx-b200")
FAMILY = {profile.name: family for family, profiles in known_families().items() for profile in profiles}

FEWEST_FAMILIES = 2
"""Families that can run a plan, from which their range means something."""

TOLERANCE = 0.12
"""Of a mean of habits where few frameworks can run a plan: sharded weights beside tensor parallelism, which only eager ones run, take them
longer than a mean over all, and more memory."""


def random_jobs(seed: int) -> Iterator[dict[str, Any]]:
    """Jobs with a plan each, whether or not they fit."""
    draw = random.Random(seed)
    while True:
        one = draw.random() < 0.15
        tp, pp = (1, 1) if one else (draw.choice((1, 1, 2, 4, 8)), draw.choice((1, 1, 1, 2, 4)))
        chips = 1 if one else 8 * draw.choice((1, 1, 2, 4, 8, 32))
        micro_batch, passes = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4, 8, 16))
        if chips % (tp * pp) or passes < pp:
            continue
        dp = chips // (tp * pp)
        yield {
            "model": draw.choice(MODELS),
            "cluster": "rtx4090-24gb" if one else draw.choice(CLUSTERS),
            "chips": chips,
            "global_batch": dp * micro_batch * passes,
            "seq_len": draw.choice((512, 1024, 2048, 4096, 8192)),
            "tp": tp,
            "pp": pp,
            "micro_batch": micro_batch,
            "recompute": draw.choice(("none", "none", "selective", "full")),
        } | ({"zero": draw.choice((0, 1, 2, 3))} if dp > 1 else {})


def compared(seed: int, number: int) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """(job, its prediction under `generic`, those under the known frameworks)."""
    for job in random_jobs(seed):
        try:
            mean = perfmodel.predict(**job, profile=GENERIC)
        except InputError:  # the model has no such cut or length
            continue
        yield job, mean, {name: perfmodel.predict(**job, profile=name) for name in FAMILY}
        number -= 1
        if not number:
            return


def lies_between(value: float, others: list[float], tolerance: float) -> bool:
    return min(others) * (1 - tolerance) <= value <= max(others) * (1 + tolerance)


def check(seed: int, number: int) -> None:
    outside = []
    for job, mean, others in compared(seed, number):
        assert lies_between(mean.memory["total"], [prediction.memory["total"] for prediction in others.values()], 1e-9), job
        assert all(part >= 0.0 for prediction in (mean, *others.values()) for part in prediction.memory.values()), job
        able = {name: prediction for name, prediction in others.items() if not prediction.not_runnable}
        if len({FAMILY[name] for name in able}) < FEWEST_FAMILIES:
            continue
        memory = lies_between(mean.memory["total"], [prediction.memory["total"] for prediction in able.values()], TOLERANCE)
        time = lies_between(mean.step_time, [prediction.step_time for prediction in able.values()], TOLERANCE)
        if not (memory and time):
            outside.append(job)
    assert len(outside) <= number / 20, outside


@pytest.mark.slow
def test_generic_lies_between_the_frameworks_that_can_run_a_plan():
    check(seed=3, number=6)


@pytest.mark.slow
@pytest.mark.parametrize("number", mostly_nightly([10, 200], [10]))
def test_generic_lies_between_the_frameworks_on_many_jobs(number):
    check(seed=4, number=number)
