"""The number of serving plans, counted by validating every combination of degrees one by one."""

import itertools

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import load_engine
from perfmodel.frameworks.engine_layouts import cache_copies, check_layout
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.planner.serving.space import ServingSpace, layouts
from perfmodel.workload.models import load_model
from tests.planner.serving.serving_searches import searched, serving_job


def is_a_degree(number, chips):
    return chips % number == 0 or number.bit_count() == 1


def copies(size, chips, node):
    """Replicas laid one after another on free nodes."""
    free = [node] * (chips // node) + ([chips % node] if chips % node else [])
    placed = 0
    while True:
        if size <= node:
            at = next((slot for slot, left in enumerate(free) if left >= size), None)
            if at is None:
                return placed
            free[at] -= size
        else:
            empty = [slot for slot, left in enumerate(free) if left == node]
            needed = -(-size // node)
            if len(empty) < needed:
                return placed
            for index in empty[:needed]:
                free[index] = 0
        placed += 1


def by_hand(model, chips, engine, node=8):
    valid = set()
    for tp, pp, dp in itertools.product(range(1, chips + 1), repeat=3):
        size = tp * pp * dp
        if size > chips or not all(is_a_degree(degree, chips) for degree in (tp, pp, dp)) or (dp > 1 and model.parts.experts is None):
            continue
        for ep in range(1, tp * dp + 1):
            try:
                plan = ServingLayout(tp=tp, pp=pp, attention_dp=dp, ep=ep, replicas=max(copies(size, chips, node), 1))
                check_layout(model, engine, **plan.degrees)
            except InputError:
                continue
            kv = model.num_key_value_heads
            if model.parts.latent is None and kv % tp and tp % kv:
                continue
            allowed = {
                "vllm": ep in (1, tp * dp),
                "sglang": True,
                "tensorrt-llm": dp == 1 or tp == 1,
                "vllm-2024": dp == 1 and ep == 1,
            }
            if allowed[engine.name] and copies(size, chips, node):
                valid.add((tp, pp, dp, ep, copies(size, chips, node)))
    return valid


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "vllm-2024"])
@pytest.mark.parametrize(("model", "chips"), [("llama-3-8b", 8), ("llama-3-8b", 6), ("mixtral-8x7b", 16), ("deepseek-v3", 8)])
def test_every_layout_is_there_once(model, chips, engine):
    config, profile = load_model(model), load_engine(engine)
    columns = layouts(config, load_cluster("dgx-h100", num_chips=chips), profile, ServingSpace()).columns
    rows = list(zip(columns.tp, columns.pp, columns.attention_dp, columns.ep, columns.replicas, columns.dcp, strict=True))
    assert len(rows) == len(set(rows))
    assert {row[:-1] for row in rows} == by_hand(config, chips, profile)
    cuts = {row for row in rows if row[-1] > 1}
    assert bool(cuts) == (profile.runs.has_decode_context and any(cache_copies(config, tp) > 1 for tp in columns.tp.tolist()))
    assert all(cache_copies(config, tp) % dcp == 0 for tp, *_, dcp in cuts)


def test_plans_are_layouts_times_tokens_times_loads():
    space = ServingSpace(batches=(1, 4, 16, 64), max_tokens=(2048,), fixed={"pp": 1})
    result = searched(serving_job(concurrency=1000), space=space)
    assert result.num_evaluated == 4 * 2 * len((0, 1, 4, 16, 64))
