"""Explorations of training and of services: points equal single predictions, elasticities, and factors that multiply to the total."""

import math
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError

TRAINING = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 8, "global_batch": 64, "seq_len": 4096, "profile": "megatron"}
SERVICE = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 1, "tp": 1, "input_len": 512, "output_len": 128, "concurrency": 4}


def test_points_are_the_predictions_of_their_systems():
    exploration = perfmodel.explore(**TRAINING, tp=2, zero=1, vary=["job.seq_len=2k,4k", "plan.micro_batch=1,2"])
    assert [tuple(point.values.values()) for point in exploration.points] == [(2048, 1), (2048, 2), (4096, 1), (4096, 2)]
    for point in exploration.points:
        seq_len, micro_batch = point.values.values()
        single = perfmodel.predict(**{**TRAINING, "seq_len": seq_len}, tp=2, zero=1, micro_batch=micro_batch)
        assert point.time == single.step_time
    assert [len(line) for line in exploration.lines()] == [2, 2]


def test_a_faster_memory_is_a_faster_chip():
    cluster = perfmodel.load_cluster("dgx-h100", num_chips=8)
    memory = replace(cluster.chip.memory, bandwidth=6.7e12)
    single = perfmodel.predict(**{**TRAINING, "cluster": replace(cluster, chip=replace(cluster.chip, memory=memory))}, tp=2)
    exploration = perfmodel.explore(**TRAINING, tp=2, vary="chip.memory.bandwidth=x1,x2", shares=True)
    assert exploration.points[1].time == single.step_time < exploration.points[0].time
    for point in exploration.points:
        assert sum(point.shares.values()) == pytest.approx(1.0, abs=0.02)
    assert exploration.points[1].shares["memory"] < exploration.points[0].shares["memory"]


def test_what_cannot_be_predicted_is_a_point_with_its_reason():
    exploration = perfmodel.explore(**TRAINING, vary="plan.tp=2,3")
    assert math.isfinite(exploration.points[0].time)
    assert exploration.points[1].prediction is None
    assert "tp" in exploration.points[1].reason
    with pytest.raises(InputError, match="tp"):
        perfmodel.explore(**TRAINING, vary="plan.tp=3,5")


def test_a_search_at_each_point_is_no_slower_than_a_given_plan():
    job = {**TRAINING, "pp": 1, "cp": 1, "recompute": "none", "zero": 1}
    held = perfmodel.explore(**job, tp=2, vary="chip.memory.capacity=80GiB,160GiB")
    best = perfmodel.explore(**job, search=True, vary="chip.memory.capacity=80GiB,160GiB")
    assert all(one.time <= two.time * (1 + 1e-12) for one, two in zip(best.points, held.points, strict=True))


def test_nodes_of_technology_need_no_measured_chip():
    exploration = perfmodel.explore(**{**TRAINING, "cluster": "a100-spec"}, tp=2, vary="technology.logic=n12,n7,n5,n3,n2,n1")
    times = [point.time for point in exploration.points]
    assert times == sorted(times, reverse=True)
    assert exploration.notes[0].startswith("calibration=spec-sheet")


@pytest.mark.parametrize("words", [{**TRAINING, "tp": 2, "zero": 1}, SERVICE], ids=["training", "service"])
@pytest.mark.slow
def test_elasticities_are_ranked_and_faster_hardware_is_never_slower(words):
    exploration = perfmodel.explore_sensitivity(**words)
    sizes = [abs(row.elasticity) for row in exploration.elasticities]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {row.name: row for row in exploration.elasticities}
    for name, row in by_name.items():
        if name.endswith(("bandwidth", "rate", "link")):
            assert row.larger <= 1.0 + 1e-9 <= row.smaller + 2e-9, name
    assert by_name["chip.peak_flop_rate"].elasticity < 0.0
    assert exploration.elasticities[0].name == ("chip.memory.bandwidth" if "input_len" in words else "chip.peak_flop_rate")


@pytest.mark.parametrize(
    ("words", "precision"),
    [({**TRAINING, "pp": 1, "cp": 1, "recompute": "none"}, "fp8-current"), (SERVICE, "fp8")],
    ids=["training", "service"],
)
@pytest.mark.slow
def test_the_factors_of_a_waterfall_multiply_to_the_total(words, precision):
    waterfall = perfmodel.explore_waterfall(**{**words, "cluster": "dgx-a100"}, to="dgx-b200", to_precision=precision)
    names = ["peak rate", "number format", "memory bandwidth", "memory capacity", "scale-up", "scale-out", "rest"]
    assert [rung.change for rung in waterfall.rungs] == names
    assert math.prod(rung.factor for rung in waterfall.rungs) == pytest.approx(waterfall.total, rel=1e-12)
    assert waterfall.total > 1.5
    last = waterfall.rungs[-1].prediction
    assert (last.plan.cluster if "seq_len" in words else last.cluster) == "dgx-b200"


def test_a_waterfall_to_the_same_system_has_factors_of_one():
    waterfall = perfmodel.explore_waterfall(**TRAINING, tp=2, pp=1, cp=1, recompute="none", micro_batch=1, to="dgx-h100")
    assert [rung.factor for rung in waterfall.rungs] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"vary": []}, "^vary: names no axis"),
        ({"vary": ["plan.tp=1,2", "plan.tp=4"]}, "^plan.tp: is varied twice"),
        ({"vary": "plan.tp=1", "rate": 2}, "^rate=2: is of a service"),
    ],
)
def test_bad_explorations_are_refused(words, sentence):
    with pytest.raises(InputError, match=sentence):
        perfmodel.explore(**TRAINING, **words)
    with pytest.raises(InputError, match=r"^metric='speed': is not known; use tpot, ttft, latency, throughput"):
        perfmodel.explore_sensitivity(**SERVICE, metric="speed")
