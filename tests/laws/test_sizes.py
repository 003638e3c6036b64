"""A list of numbers of chips, batches and lengths is the prediction of each of them alone, to the bit."""

import random
from itertools import product

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import load_model
from tests.marks import covering, mostly_nightly

MODELS = ("llama-3-8b", "gpt2", "gemma-2-9b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "nemotron-h-8b", "qwen3-next-80b-a3b")
FRAMEWORKS = ("generic", "megatron", "nemo", "torchtitan", "torch-fsdp2", "deepspeed", "hf-trainer", "torch-fsdp2+loss=chunked")
CLUSTERS = ("dgx-h100", "dgx-b200", "gb200-nvl72", "tpu-v5p", "mi300x", "h20-96gb")
PLANS = (
    {},
    {"tp": 2, "zero": 1},
    {"tp": 2, "cp": 2, "zero": 1},
    {"zero": 3, "recompute": "full"},
    {"dp_shard": 8},
    {"zero": 2, "micro_batch": 3},
    {"pp": 2, "tp": 2, "recompute": "selective", "attention": "unfused"},
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 4, "virtual_stages": 2, "zero": 1},
    {"pp": 2, "micro_batch": 2, "recompute": "full", "zero": 2},
    {"pp": 8, "zero": 3},
)
#: Parts of a node, nodes, numbers that are no whole domains, and more than a fabric's 16,384 chips.
CHIPS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 72, 96, 144, 256, 1024, 4096, 17280, 20000, 32768, 40000)
BATCHES = (16, 48, 96, 960, 4096, 61440)
SEEDS = range(40)


def drawn_lists(seed):
    rng = random.Random(seed)
    call = {"model": rng.choice(MODELS), "cluster": rng.choice(CLUSTERS), "seq_len": 2048} | rng.choice(PLANS)
    if rng.random() < 0.8:
        call["profile"] = rng.choice(FRAMEWORKS)
    if load_model(call["model"]).parts.experts is not None and rng.random() < 0.5:
        call["ep"] = rng.choice((2, 4))
    if rng.random() < 0.2:
        call["train"] = rng.choice(("lora:16", "qlora:8"))
    if rng.random() < 0.3:
        call["risk"] = 0.01
    lists = {"chips": rng.sample(CHIPS, 6), "global_batch": rng.sample(BATCHES, 2)}
    return call, lists | ({"seq_len": [1000, 2048]} if rng.random() < 0.3 else {})


def alone(call):
    perfmodel.Session.current().clear()
    try:
        return perfmodel.predict(**call)
    except InputError as error:
        return str(error)


#: Draws that show each model, framework, cluster and knob.
KEPT = covering({seed: drawn_lists(seed)[0] for seed in SEEDS}, together=1)


@pytest.mark.parametrize("seed", mostly_nightly(SEEDS, KEPT))
def test_lists_are_the_predictions_of_each(seed):
    call, lists = drawn_lists(seed)
    singles = [alone(call | dict(zip(lists, values, strict=True))) for values in product(*lists.values())]
    predicted = [single for single in singles if not isinstance(single, str)]
    if not predicted:
        pytest.skip("no plan of this draw can be")
    listed = perfmodel.predict(**call | lists)
    assert [entry.reason for entry in listed.not_predicted] == [single for single in singles if isinstance(single, str)]
    assert len(listed) == len(predicted)
    for one, other in zip(listed, predicted, strict=True):
        assert one == other, (call, one.plan.num_chips, one.plan.job.global_batch)


def test_points_of_an_exploration_are_predictions():
    """Points of numbers of chips without a plan have the reason."""
    call = {"model": "llama-3-8b", "cluster": "dgx-h100", "global_batch": 96, "seq_len": 4096, "zero": 3}
    exploration = perfmodel.explore(**call, chips=8, vary=["job.chips=32,8,40,16", "job.global_batch=96,192"])
    assert [point.prediction is None for point in exploration.points] == [False, False, False, False, True, True, False, False]
    for point in exploration.points:
        single = alone(call | {name.removeprefix("job."): value for name, value in point.values.items()})
        assert single == (point.reason or point.prediction)
