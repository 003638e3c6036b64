"""Points that are evaluated together equal the predictions of their systems, one by one."""

from dataclasses import fields, replace

import pytest

import perfmodel
from perfmodel.foundation.columns import as_columns
from perfmodel.hardware.fabric import Link
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request, Service
from perfmodel.verbs import system_times as verb
from perfmodel.verbs.axes import changed, hardware_axes, read_axis

DENSE = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 16, "global_batch": 64, "seq_len": 4096}
EXPERTS = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "chips": 32, "global_batch": 64, "seq_len": 4096}
CASES = {
    "dense": (DENSE, {"tp": 2, "zero": 1}),
    "pipeline of nanotron, whose memory depends on the host": ({**DENSE, "profile": "nanotron"}, {"tp": 2, "pp": 4}),
    "uneven stages": ({**DENSE, "chips": 24}, {"pp": 3, "zero": 1}),
    "interleaved": ({**DENSE, "profile": "megatron"}, {"tp": 2, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}),
    "shards": ({**DENSE, "profile": "torchtitan"}, {"zero": 3, "cp": 2, "recompute": "full"}),
    "8 bits": ({**DENSE, "profile": "megatron", "precision": "fp8-current"}, {"tp": 2, "zero": 1}),
    "experts": ({**EXPERTS, "profile": "megatron"}, {"tp": 2, "ep": 4, "zero": 1}),
    "a mesh": ({**DENSE, "cluster": "mi300x", "chips": 8}, {"tp": 4}),
    "a torus": ({**DENSE, "cluster": "tpu-v5p", "chips": 64}, {"zero": 3}),
    "a data sheet": ({**DENSE, "calibration": "spec-sheet"}, {"tp": 2, "pp": 2}),
    "a prior, which follows from the rates": ({**DENSE, "calibration": "prior"}, {"tp": 2}),
    "offloaded states": ({**DENSE, "profile": "deepspeed", "settings": "optimizer_offload=true"}, {"zero": 2}),
}


def system_for(asked, knobs):
    return verb.system_of(Request(**asked), Knobs(**knobs), Service())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_points_of_every_quantity_of_hardware_equal_single_predictions(case):
    asked, knobs = CASES[case]
    system = system_for(asked, knobs)
    predictor = verb.SystemPredictor(metric=verb.STEP_TIME, is_searched=False)
    names = [name for name, field in hardware_axes(system).items() if field.kind]
    assert len(names) >= 6
    for vary in [(name,) for name in names] + [("chip.memory.bandwidth", names[-1]), ("chip.peak_flop_rate", "chip.memory.capacity")]:
        axes = [read_axis(f"{name}=x0.3..x3", system, points=3) for name in vary]
        block = [{axis.name: axis.values[i] for axis in axes} for i in range(3)]
        together = predictor.predict_columns([changed(system, values) for values in block])
        for values, prediction in zip(block, together, strict=True):
            single = predictor.predict(changed(system, values))
            for field in fields(single):
                assert getattr(prediction, field.name) == getattr(single, field.name), (values, field.name)
            assert all(type(value) is float for value in (prediction.step_time, prediction.memory_usable, *prediction.parts.values()))


def test_shares_of_points_together_are_those_of_each_alone():
    words = {**DENSE, "tp": 2, "shares": True}
    together = perfmodel.explore(**words, vary="network.scale_out.bandwidth=25,50,100GB/s")
    for point in together.points:
        alone = perfmodel.explore(**words, vary=f"network.scale_out.bandwidth={point.values['network.scale_out.bandwidth']:.0f}B/s")
        assert alone.points[0].shares == point.shares


def test_a_value_that_is_refused_is_a_point_with_its_reason_among_others():
    points = perfmodel.explore(**DENSE, tp=2, vary="chip.memory.bandwidth=0.5B/s,1TB/s,2TB/s").points
    assert [point.prediction is None for point in points] == [True, False, False]
    assert points[0].reason.startswith("memory.bandwidth=0.5")
    assert points[1].time > points[2].time


def test_records_become_columns_where_their_floats_differ():
    links = [Link(bandwidth=bandwidth, pair_bandwidth=1e9, latency=1e-6) for bandwidth in (1e9, 2e9)]
    columns = as_columns(links)
    assert columns.bandwidth.tolist() == [1e9, 2e9]
    assert (columns.pair_bandwidth, columns.latency) == (1e9, 1e-6)
    cluster = system_for(DENSE, {}).cluster
    with pytest.raises(ValueError, match="differ in more than floats"):
        as_columns([cluster, replace(cluster, name="other")])
