"""Mixed clusters: limits of equal pools are those of one cluster, and a point of an axis is the prediction of a cluster file."""

import pytest
import yaml

import perfmodel
from perfmodel.foundation.resources import resource_dir
from tests.cost.jobs import make_model
from tests.marks import mostly_slow

MIX = "8@dgx-h100+8@dgx-a100"
JOB = {"model": "llama-3-8b", "global_batch": 64, "seq_len": 4096, "profile": "megatron"}
MODEL = make_model(num_hidden_layers=4, max_position_embeddings=1 << 22, position="rotary")


def pools_file(folder, group, number, value):
    """Return the path of `MIX` as a file, with a number of its second chip or its links changed."""
    shipped = resource_dir("hardware_specs")
    chip, node = (yaml.safe_load((shipped / path).read_text()) for path in ("chips/a100-sxm-80gb.yaml", "clusters/dgx-a100.yaml"))
    {"fabric": node["tiers"][-1], **chip}[group][number] = value
    (folder / "a100.yaml").write_text(yaml.safe_dump(chip))
    described = {"chips": 8, "name": "dgx-a100", "chip": "./a100.yaml", "chips_per_node": 8, "tiers": node["tiers"]}
    (folder / "pools.yaml").write_text(yaml.safe_dump({"name": "ours", "pools": [{"chips": 8, "cluster": "dgx-h100"}, described]}))
    return folder / "pools.yaml"


@pytest.mark.parametrize(
    ("axis", "group", "number", "value"),
    [
        ("chip.a100.memory.bandwidth", "memory", "bandwidth", "3 TB/s"),
        ("chip.a100.peak_flop_rate.bf16", "peak_flop_rate", "bf16", "600 TFLOP/s"),
        ("network.a100.scale_out.bandwidth", "fabric", "bandwidth", "10 GB/s"),
    ],
)
@pytest.mark.parametrize("knobs", [{"pp": 2, "tp": 2}, {"tp": 4, "dp_shard": 4, "zero": 1}, {}], ids=["stages", "replicas", "searched"])
@pytest.mark.slow
def test_a_point_of_an_axis_is_the_prediction_of_a_cluster_file(tmp_path, axis, group, number, value, knobs):
    path = pools_file(tmp_path, group, number, value)
    (point,) = perfmodel.explore(**JOB, **knobs, cluster=MIX, vary=f"{axis}={value}", search=not knobs).points
    if knobs:
        single = perfmodel.predict(**JOB, **knobs, cluster=path)
    else:
        single = perfmodel.find_plans(**JOB, cluster=path, top=1, ties=0.0).best
    assert (point.time, point.prediction.memory) == (single.step_time, single.memory)
    assert point.prediction.parts == single.parts


def test_numbers_of_every_kind_of_chips_are_ranked():
    """Together the kinds have the elasticities of a cluster whose chips all change."""
    job = {**JOB, "pp": 2, "tp": 2}
    mixed = perfmodel.explore_sensitivity(**job, cluster="8@dgx-h100+8@dgx-h100*99.99%").elasticities
    alone = perfmodel.explore_sensitivity(**job, cluster="dgx-h100", chips=16).elasticities
    assert {row.name.split(".")[1] for row in mixed} == {"pool1", "pool2"}
    for row in alone:
        group, _, number = row.name.partition(".")
        parts = [part.elasticity for part in mixed if part.name.startswith(group) and part.name.endswith(f".{number}")]
        assert len(parts) == 2
        assert sum(parts) == pytest.approx(row.elasticity, abs=0.02)


@pytest.mark.parametrize("shape", mostly_slow([{"pp": 1, "cp": 1, "tp": 1}, {"pp": 1, "cp": 1}, {"pp": 1, "cp": 2, "tp": 4}], quick=1))
@pytest.mark.slow
def test_limits_of_equal_pools_are_those_of_one_cluster(shape):
    """Without a pipeline: the search over pools also tries stages with unequal layers. Each tp and cp group lies in a pool of eight."""
    words = {"model": MODEL, "seq_len": 1024, "profile": "megatron", **shape}
    alone = perfmodel.find_limits(**words, cluster="dgx-h100", chips=16)
    mixed = perfmodel.find_limits(**words, cluster="8@dgx-h100+8@dgx-h100")
    for name in ("micro_batch", "global_batch", "seq_len"):
        one, two = getattr(alone, name), getattr(mixed, name)
        assert (one.value, one.limited_by, one.reason) == (two.value, two.limited_by, two.reason)
        assert one.value
    assert mixed.memory_usable == alone.memory_usable


@pytest.mark.slow
def test_limits_of_a_mixed_cluster_are_what_its_search_finds():
    words = {"model": MODEL, "seq_len": 1024, "profile": "megatron", "tp": 1, "cp": 1}
    cluster = "2@h100-sxm-80gb+2@a100-sxm-40gb"
    limits = perfmodel.find_limits(**words, cluster=cluster)
    micro = limits.micro_batch.value
    for size, fits in ((micro, True), (micro + 1, False)):
        job = {**words, "micro_batch": size, "global_batch": 4 * size}
        assert bool(perfmodel.find_plans(**job, cluster=cluster).plans) is fits
    assert limits.memory_usable == min(perfmodel.load_chip(name).memory.usable for name in ("h100-sxm-80gb", "a100-sxm-40gb"))


@pytest.mark.slow
def test_fewest_chips_keep_the_proportions_of_the_pools():
    words = {"model": "llama-3-8b", "seq_len": 2048, "profile": "megatron", "pp": 3, "cp": 1, "tp": 1, "recompute": "full"}
    limits = perfmodel.find_limits(**words, cluster="16@dgx-h100+8@dgx-a100", global_batch=48)
    assert limits.chips.value % 3 == 0
    pools = limits.chips.prediction[0].plan.cluster
    assert pools == f"{limits.chips.value // 3 * 2}@dgx-h100+{limits.chips.value // 3}@dgx-a100"
    assert "in the same proportions" in limits.chips.reason or "cannot keep the proportions" in limits.chips.reason
