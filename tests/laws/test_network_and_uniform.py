"""One model, one plan, two forms: as a uniform plan of the transformer and as a network whose operators are all cut that way.

Both are predicted by one assembly. A network is unrolled, its axes have no names and a tensor with several readers is held once; so a plan
with tensor parallelism takes what a framework without overlap of its own takes (`test_assigned_plans.py` has the same axes).
"""

from __future__ import annotations

import numpy as np
import pytest

import perfmodel
from perfmodel.parallel.request import Request
from perfmodel.verbs.networks import make_planner, network_setting

CHIPS, CLUSTER = 8, "dgx-h100"


def _both(model: str, *, batch: int, microbatches: int, seq_len: int, tp: int, zero: int):  # type: ignore[no-untyped-def]
    ranks = CHIPS // tp
    uniform = perfmodel.predict(
        model=model,
        cluster=CLUSTER,
        chips=CHIPS,
        global_batch=batch * microbatches,
        seq_len=seq_len,
        tp=tp,
        zero=zero,
        micro_batch=batch // ranks,
        sequence_parallel=False,
    )
    asked = Request(cluster=CLUSTER, chips=CHIPS)
    setting, _, _ = network_setting(model, asked, batch=batch, sizes={"seq_len": seq_len}, microbatches=microbatches)
    planner = make_planner(setting, zero=zero, microbatches=microbatches)

    def keep(operator, rows):  # type: ignore[no-untyped-def]
        wanted = {"b": ranks}
        cut = [dim for dim in ("g", "f", "v") if dim in rows.dims]
        if tp > 1 and cut and operator.name != "final_norm":
            wanted[cut[0]] = tp
        return (rows.parts == np.array([wanted.get(dim, 1) for dim in rows.dims])).all(axis=1)

    return uniform, planner.search(keep).best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "microbatches", "seq_len", "tp", "zero"),
    [
        ("llama-3-8b", 8, 4, 8192, 1, 1),
        ("llama-3-8b", 8, 4, 8192, 1, 3),
        ("llama-3-8b", 4, 1, 8192, 2, 1),
        ("llama-3-8b", 1, 1, 8192, 8, 1),
        ("gpt3-175b", 1, 1, 2048, 8, 1),
        ("gpt2", 64, 1, 1024, 1, 1),  # the biases of its output products are added where nothing is summed
    ],
)
def test_a_uniform_plan_costs_as_a_network_what_it_costs_as_a_plan(model, batch, microbatches, seq_len, tp, zero):
    uniform, network = _both(model, batch=batch, microbatches=microbatches, seq_len=seq_len, tp=tp, zero=zero)
    assert network.step_time == pytest.approx(uniform.step_time, rel=1e-3 if tp == 1 else 0.05)
    # the axes of a network have a communicator for each of their factors
    tensors = [prediction.memory["total"] - prediction.memory["framework"] for prediction in (network, uniform)]
    assert tensors[0] == pytest.approx(tensors[1], rel=1e-3 if tp == 1 else 0.012)
    if tp == 1:
        for part in ("forward", "backward", "gradient_reduction", "optimizer", "gradient_accumulation"):
            assert network.parts[part] == pytest.approx(uniform.parts[part], rel=0.01, abs=1e-6), part
