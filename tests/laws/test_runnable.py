"""Whatever is recommended for a framework is a plan that it can run, of random jobs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import GENERIC, list_profiles, load_profile
from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.parallel.prediction import Prediction
from tests.marks import mostly_nightly

MODELS = ("gpt2", "llama-3.1-8b", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b", "megatron-22b")
CLUSTERS = ("dgx-h100", "dgx-a100", "hgx-h200")
SETTINGS = ("tp", "pp", "cp", "zero", "micro_batch", "recompute")
VALUES: dict[str, tuple[int | str, ...]] = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4),
    "cp": (1, 2),
    "zero": (0, 1, 2, 3),
    "micro_batch": (1, 2),
    "recompute": ("none", "full"),
}


def random_job(random: random.Random) -> dict[str, Any]:
    chips = random.choice((1, 2, 4, 8, 8, 16, 24, 64))
    job: dict[str, Any] = {
        "model": random.choice(MODELS),
        "cluster": random.choice(CLUSTERS),
        "chips": chips,
        "global_batch": chips * random.choice((1, 2, 8)),
        "seq_len": 1024 if chips == 1 else random.choice((1000, 1024, 2048, 8192, 32768)),
        "profile": random.choice([name for name in list_profiles() if name != GENERIC]),
    }
    if random.random() < 0.2:
        job["train"] = random.choice(("lora:16", "qlora:16"))
    knob = random.choice(SETTINGS)
    return job | ({knob: random.choice(VALUES[knob])} if random.random() < 0.3 else {})


def recommended(job: dict[str, Any], random: random.Random) -> Iterator[tuple[str, Prediction]]:
    try:
        search = perfmodel.find_plans(**job, top=5)
    except InputError:  # no such plan
        return
    for prediction in (*search.plans, *search.pareto, *(kind.prediction for kind in search.ranking.kinds), *search.least_memory):
        yield "search", prediction
    yield from (("remedy of search", remedy.prediction) for remedy in search.remedies)
    for baseline in search.baselines:
        yield from ((f"baseline {baseline.name}", variant) for variant in baseline.plans)
    start = [*search.plans, *search.least_memory][0].plan
    knob = random.choice(SETTINGS)
    explained = perfmodel.explain_plan(start, why_not={knob: random.choice(VALUES[knob])})
    for answer in (*explained.neighbours, *explained.why_not):
        yield from (("explain", variant) for variant in answer.prediction)
    yield from (("remedy of explain", remedy.prediction) for remedy in explained.remedies)


def check(seed: int) -> None:
    drawn = random.Random(seed)
    job = random_job(drawn)
    profile = load_profile(job["profile"])
    for verb, prediction in recommended(job, drawn):
        assert prediction.not_runnable == "", (verb, job)
        assert not_runnable_reason(prediction.plan, profile) == "", (verb, job)


@pytest.mark.parametrize("seed", mostly_nightly(range(200), range(6)))
@pytest.mark.slow
def test_what_is_recommended_for_a_framework_can_be_run_by_it(seed):
    check(seed)
