"""One model, one plan, two roads: as a uniform plan of the transformer and as a network whose operators are all cut that way.

The roads share the formulas of operators and collectives, not the graphs: a network is unrolled and priced operator by operator. What a
framework does beyond that (host floors, overlap of tensor-parallel collectives, the last bucket) belongs to the uniform plan alone.
"""

from __future__ import annotations

import numpy as np
import pytest

import perfmodel
from perfmodel.foundation.resources import resource_dir
from perfmodel.verbs.networks import find_network, find_place, make_planner

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
    place = find_place(CLUSTER, chips=CHIPS, precision=None, calibration=None, profile=None)
    network, _ = find_network(model, batch=batch, sizes={"seq_len": seq_len})
    planner = make_planner(network, place, zero=zero, microbatches=microbatches)

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
    ],
)
def test_a_uniform_plan_costs_as_a_network_what_it_costs_as_a_plan(model, batch, microbatches, seq_len, tp, zero):
    uniform, network = _both(model, batch=batch, microbatches=microbatches, seq_len=seq_len, tp=tp, zero=zero)
    assert network.step_time == pytest.approx(uniform.step_time, rel=0.035)
    work = sum(network.parts[part] for part in ("forward", "backward"))
    assert work == pytest.approx(sum(uniform.parts[part] for part in ("forward", "backward")), rel=1e-5 if model == "llama-3-8b" else 0.01)
    assert network.memory["total"] == pytest.approx(uniform.memory["total"], rel=0.012)
    # parameters go one road: events, element sizes, optimizer, adding up
    assert network.parts["optimizer"] == pytest.approx(uniform.parts["optimizer"] + uniform.parts["gradient_accumulation"], rel=1e-3)
    if zero < 3:
        assert network.parts["parameter_collectives"] == pytest.approx(uniform.parts["gradient_reduction"], rel=1e-3)


@pytest.mark.parametrize("rate", ["matmul_rate_fraction_since_2022", "attention_rate_fraction_since_2022"])
def test_a_framework_has_the_same_rates_on_both_roads(rate, tmp_path):
    lines = (resource_dir("strategies") / "profiles" / "megatron.yaml").read_text(encoding="utf-8").splitlines()
    slow = tmp_path / "slow.yaml"
    slow.write_text("\n".join(f"{rate}: 0.5" if line.startswith(f"{rate}:") else line for line in lines) + "\n", encoding="utf-8")
    place, slower = (find_place(CLUSTER, chips=CHIPS, precision=None, calibration=None, profile=name) for name in (None, slow))
    kernel = place.machine.matmul if rate.startswith("matmul") else place.machine.attention["flash"]
    slow_kernel = slower.machine.matmul if rate.startswith("matmul") else slower.machine.attention["flash"]
    assert slow_kernel.flop_rate == pytest.approx(kernel.flop_rate * 0.5 / getattr(place.profile, rate), rel=1e-12)
