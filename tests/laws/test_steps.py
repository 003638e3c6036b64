"""Laws of every step: parts sum to the total, degree 1 communicates nothing, faster is never slower, utilisation as defined."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.memory.chip import MEMORY
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.chip import MemoryTier
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import parse_cluster
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.planner.uniform.space import SEARCHED_ORDERS
from perfmodel.uncertainty.sensitivity import sensitivities
from perfmodel.verbs.setting import make_setting, plan_in, predict_in
from perfmodel.workload.job import Precision
from tests.cost.jobs import CHIP, LLAMA_LIKE, PROFILES, estimator_of, make_job, make_model, predict
from tests.cost.machines import make_tier
from tests.fuzz.topologies import FILE_NOTES, random_cluster
from tests.hardware.domains import scale_up_size
from tests.marks import mostly_nightly, one_in

COMMUNICATION = (
    "tensor_parallel_communication",
    "context_parallel_communication",
    "pipeline_communication",
    "parameter_gather",
    "gradient_reduction",
)

#: Plans of 16 chips that use every axis and knob.
PLANS = {
    "data": {"dp_replicate": 16},
    "fsdp": {"dp_shard": 16, "zero": 3},
    "zero-1": {"dp_shard": 16, "zero": 1},
    "zero-2": {"dp_shard": 16, "zero": 2},
    "hsdp": {"dp_replicate": 4, "dp_shard": 4, "zero": 3},
    "tensor": {"tp": 8, "sequence_parallel": False},
    "sequence": {"tp": 8, "recompute": "selective"},
    "context": {"cp": 4, "zero": 3},
    "full": {"tp": 2, "recompute": "full", "micro_batch": 2},
    "pipeline": {"pp": 4, "tp": 2},
    "gpipe": {"pp": 8, "schedule": "gpipe"},
    "interleaved": {"pp": 4, "virtual_stages": 2, "tp": 4},
    "everything": {"pp": 2, "tp": 2, "cp": 2, "dp_shard": 2, "zero": 2, "virtual_stages": 4, "recompute": "selective"},
    "uneven": {"pp": 4, "stage_layers": (1, 3, 3, 1)},
}
plans = pytest.mark.parametrize("knobs", PLANS.values(), ids=PLANS)
JOBS = {
    "gpt2": make_job(),
    "llama": make_job(make_model(**LLAMA_LIKE), precision=Precision.FP16_MIXED),
    "llama-tied-fp32": make_job(make_model(**LLAMA_LIKE | {"tie_word_embeddings": True}), precision=Precision.FP32),
}


def test_sums_of_norm_gradients_over_tp_come_with_every_microbatch():
    """torch reduces them one by one as they are computed, which nothing hides; in a pipeline only once a step."""
    profile = load_profile("torch-fsdp2")

    def reduction(first, batch, **knobs):
        estimator = estimator_of(make_job(batch=batch), profile=profile.having(reduces_tp_gradients_first=first))
        return predict(estimator, tp=4, zero=3, **knobs).parts["gradient_reduction"]

    def more(batch, **knobs):
        return reduction(True, batch, **knobs) - reduction(False, batch, **knobs)

    assert more(16) > 0.0
    assert more(32) == pytest.approx(2 * more(16), rel=0.05)
    assert more(32, pp=2) == pytest.approx(more(16, pp=2), rel=0.05)
    assert more(16, sequence_parallel=False) == 0.0


#: Each profile with one job.
SHOWN = list(zip(itertools.cycle(JOBS), PROFILES, strict=False))


@plans
@pytest.mark.parametrize("job, profile", mostly_nightly([(job, profile) for job in JOBS for profile in PROFILES], SHOWN))
def test_parts_add_up_exactly(job, profile, knobs):
    prediction = predict(estimator_of(JOBS[job], profile=profile), **knobs)
    assert sum(prediction.parts.values()) == prediction.step_time
    assert all(part >= 0.0 for part in prediction.parts.values()), prediction.parts
    classes = {name: value for name, value in prediction.memory.items() if name != "total"}
    assert tuple(classes) == MEMORY
    assert sum(classes.values()) == prediction.memory["total"]
    assert all(value >= 0.0 for value in classes.values())
    assert set(prediction.rests_on) >= set(prediction.parts)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_chip_communicates_nothing(profile, recompute):
    parts = predict(estimator_of(chips=1, profile=profile), recompute=recompute).parts
    assert [parts[name] for name in COMMUNICATION] == [0.0] * len(COMMUNICATION)
    assert parts["pipeline_bubble"] == 0.0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "knobs, silent",
    [
        (
            {"dp_replicate": 16},
            ("tensor_parallel_communication", "context_parallel_communication", "pipeline_communication", "parameter_gather"),
        ),
        ({"tp": 8, "pp": 2}, ("context_parallel_communication", "parameter_gather")),
        ({"dp_shard": 16, "zero": 3}, ("tensor_parallel_communication", "context_parallel_communication", "pipeline_communication")),
    ],
)
def test_an_axis_of_degree_1_communicates_nothing(profile, knobs, silent):
    parts = predict(estimator_of(make_job(make_model(tie_word_embeddings=False)), profile=profile), **knobs).parts
    assert [parts[name] for name in silent] == [0.0] * len(silent)


def test_full_recomputation_is_the_forward_pass_again():
    estimator = estimator_of(chips=1)
    none, full = (predict(estimator, recompute=r) for r in ("none", "full"))
    assert none.parts["recompute"] == 0.0
    assert 0.0 < full.parts["recompute"] < full.parts["forward"]
    assert full.step_time > none.step_time
    assert full.memory["activations"] < none.memory["activations"]


# --- faster is never slower ---------------------------------------------------------------------------------------


def _tiers(bandwidth=1.0, latency=1.0):
    return (
        make_tier(size=4, bandwidth=300e9 * bandwidth, latency=2e-6 * latency),
        make_tier(Topology.FAT_TREE, size=4096, bandwidth=25e9 * bandwidth, latency=5e-6 * latency),
    )


@pytest.mark.slow
@plans
@pytest.mark.parametrize("profile", one_in(4, PROFILES))
def test_a_faster_link_or_chip_is_never_slower(profile, knobs):
    base = predict(estimator_of(tiers=_tiers(), profile=profile), **knobs).step_time
    memory = CHIP.memory
    faster = {
        "bandwidth of links": {"tiers": _tiers(bandwidth=3.0)},
        "latency of links": {"tiers": _tiers(latency=0.1)},
        "peak": {"tiers": _tiers(), "chip": replace(CHIP, peak_flop_rate={d: 3 * rate for d, rate in CHIP.peak_flop_rate.items()})},
        "memory bandwidth": {"tiers": _tiers(), "chip": replace(CHIP, memory=replace(memory, bandwidth=3 * memory.bandwidth))},
    }
    for what, changes in faster.items():
        assert predict(estimator_of(profile=profile, **changes), **knobs).step_time <= base * (1 + 1e-12), what


@pytest.mark.slow
@given(
    knobs=st.sampled_from(list(PLANS.values())),
    profile=st.sampled_from(PROFILES),
    faster=st.floats(1.0, 100.0),
    which=st.sampled_from(["links", "latency", "peak", "memory"]),
)
@settings(max_examples=40)
def test_faster_by_any_factor_is_never_slower(knobs, profile, faster, which):
    chip = CHIP
    if which == "peak":
        chip = replace(CHIP, peak_flop_rate={d: faster * rate for d, rate in CHIP.peak_flop_rate.items()})
    if which == "memory":
        chip = replace(CHIP, memory=replace(CHIP.memory, bandwidth=faster * CHIP.memory.bandwidth))
    tiers = _tiers(bandwidth=faster if which == "links" else 1.0, latency=1 / faster if which == "latency" else 1.0)
    before = predict(estimator_of(tiers=_tiers(), profile=profile), **knobs).step_time
    assert predict(estimator_of(tiers=tiers, chip=chip, profile=profile), **knobs).step_time <= before * (1 + 1e-12)


@plans
@pytest.mark.slow
def test_more_memory_never_makes_a_plan_unfit(knobs):
    small = predict(estimator_of(), **knobs)
    needed = small.memory["total"]
    for capacity, fits in ((needed * 0.999, False), (needed, True), (needed * 1.001, True), (needed * 100, True)):
        chip = replace(CHIP, memory=MemoryTier(name="HBM", capacity=capacity, bandwidth=CHIP.memory.bandwidth))
        prediction = predict(estimator_of(chip=chip), **knobs)
        assert prediction.fits is fits
        assert prediction.memory == small.memory
        assert prediction.step_time == small.step_time


def test_headroom_is_kept_free():
    needed = predict(estimator_of(), tp=2).memory["total"]
    chip = replace(CHIP, memory=replace(CHIP.memory, capacity=needed * 1.25))
    assert predict(estimator_of(chip=chip), tp=2, headroom=0.19).fits
    assert not predict(estimator_of(chip=chip), tp=2, headroom=0.21).fits


# --- order of the axes --------------------------------------------------------------------------------------------


@plans
def test_axes_of_size_one_may_stand_anywhere(knobs):
    estimator = estimator_of()
    base = predict(estimator, **knobs)
    present = [axis for axis in DEFAULT_ORDER if base.plan.layout.degree(axis) > 1]
    absent = [axis for axis in DEFAULT_ORDER if axis not in present]
    for order in ((*absent, *present), (*present[:1], *absent, *present[1:]), (*present, *reversed(absent))):
        moved = predict(estimator, **knobs, order=order)
        assert (moved.step_time, moved.parts, moved.memory) == (base.step_time, base.parts, base.memory)


def test_the_order_matters_where_two_axes_are_there():
    estimator = estimator_of(profile=load_profile("megatron-2020").having(host_launch_time=0.0))  # a host evens small plans out
    times = {predict(estimator, tp=4, dp_shard=4, zero=3, order=order).step_time for order in SEARCHED_ORDERS}
    assert len(times) == 1  # all searched orders keep tp inside
    outside = predict(estimator, tp=4, dp_shard=4, zero=3, order=("dp_shard", "tp", "cp", "dp_replicate", "pp"))
    assert outside.step_time > max(times)


# --- utilisation --------------------------------------------------------------------------------------------------


def palm_flops(model, seq_len):
    """FLOP of one token, PaLM (arXiv 2204.02311), appendix B: 6 N + 12 L H Q T, N without the tables that are only looked up."""
    L, H, Q, T = model.num_hidden_layers, model.num_attention_heads, model.head_dim, seq_len
    N = model.num_parameters - model.vocab_size * model.hidden_size * (0 if model.tie_word_embeddings else 1)
    N -= model.num_position_rows * model.hidden_size
    return 6 * N, 12 * L * H * Q * T


@plans
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_utilisation_by_its_definitions(job, knobs):
    p = predict(estimator_of(job), **knobs)
    peak = CHIP.flop_rate(job.policy.compute)
    assert (p.peak_flop_rate, p.conditions.peak_dtype) == (peak, job.policy.compute)
    assert p.tokens_per_second == pytest.approx(job.global_batch * job.seq_len / p.step_time, rel=1e-14)
    assert p.tokens_per_second_per_chip == pytest.approx(p.tokens_per_second / 16, rel=1e-14)
    dense, attention = palm_flops(job.model, job.seq_len)
    assert p.mfu_palm == pytest.approx(p.tokens_per_second_per_chip * (dense + attention) / peak, rel=1e-12)
    assert p.mfu_causal == pytest.approx(p.tokens_per_second_per_chip * (dense + attention / 2) / peak, rel=1e-12)


def test_mfu_counts_no_keys_beyond_the_window():
    """Attention on w keys a query (PaLM), w - w^2 / (2 s) below the diagonal; a query of 131,072 tokens was counted with all of them."""
    model = make_model(**LLAMA_LIKE | {"sliding_window": 256})
    p = predict(estimator_of(make_job(model, seq_len=65536)), cp=4)
    dense, attention = palm_flops(model, 65536)
    share = 256 / 65536
    rate = p.tokens_per_second_per_chip / p.peak_flop_rate
    assert p.mfu_palm == pytest.approx(rate * (dense + attention * share), rel=1e-12)
    assert p.mfu_causal == pytest.approx(rate * (dense + attention * (share - share**2 / 2)), rel=1e-12)


def test_mfu_by_hand():
    """Llama-3-8B, 8192 tokens a sequence: 6 x 7,504,924,672 + 12 x 32 x 32 x 128 x 8192 FLOP a token."""
    from perfmodel.workload.models import load_model

    dense, attention = palm_flops(load_model("llama-3-8b"), 8192)
    assert dense == 6 * (8_030_261_248 - 128_256 * 4096) == 6 * 7_504_924_672
    assert attention == 12_884_901_888
    # GPT-3 175B: the output matrix is the embedding, positions are looked up
    dense, _ = palm_flops(load_model("gpt3-175b"), 2048)
    model = load_model("gpt3-175b")
    assert dense == 6 * (96 * model.num_layer_parameters + 2 * 12288 + model.vocab_size * 12288)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_hfu_counts_what_is_executed(job):
    """Matrix products forward and twice that backward; full recomputation runs the layers' forward again, selective the core's.

    The fused kernel's backward recomputes the scores: five products, not four. Norms' and biases' parameters multiply nothing.
    """
    model, s = job.model, job.seq_len
    per_layer = sum(shape.num_elements for shape in model.layer_shapes() if len(shape.shape) == 2)
    tokens, layers = job.tokens_per_step, model.num_hidden_layers
    dense = 2 * tokens * (layers * per_layer + model.vocab_size * model.hidden_size)
    products = 2 * tokens * s * model.num_attention_heads * model.head_dim / 2 * layers  # one product of the causal half
    estimator = estimator_of(job)
    expected = {
        "none": 3 * dense + 7 * products,
        "selective": 3 * dense + 9 * products,
        "full": 3 * dense + 7 * products + 2 * tokens * layers * per_layer + 2 * products,
    }
    for recompute, flops in expected.items():
        p = predict(estimator, recompute=recompute, dp_replicate=16)
        assert p.hfu == pytest.approx(flops / (p.step_time * 16 * p.peak_flop_rate), rel=1e-12), recompute
        sharded = predict(estimator, recompute=recompute, tp=2, pp=2, cp=2, dp_shard=2)
        assert sharded.hfu * sharded.step_time == pytest.approx(p.hfu * p.step_time, rel=1e-12)


def test_numbers_are_plain_and_finite():
    p = predict(estimator_of(), tp=2, pp=2)
    for value in (p.step_time, *p.parts.values(), *p.memory.values(), p.mfu_palm, p.hfu):
        assert type(value) is float
        assert math.isfinite(value)
    assert type(p.fits) is bool


# --- any network that a file may describe ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", one_in(2, range(16)))
def test_every_valid_topology_has_a_prediction(seed):
    """Tiers of any kinds inside each other: clusters without a fat tree, and those of fat trees alone, too."""
    rng = random.Random(seed)
    chip = ("h100-sxm-80gb", "a100-pcie-80gb", "mi300x-192gb")[seed % 3]
    try:
        cluster = parse_cluster(json.dumps(random_cluster(rng, chip)))
    except InputError:  # a torus slice that no box fits
        return
    n = cluster.num_chips
    setting = make_setting(make_job(batch=4 * n), cluster)
    for knobs in (Knobs(), Knobs(tp=math.gcd(n, 2)), Knobs(pp=math.gcd(n, 2)), Knobs(cp=math.gcd(n, 2)), Knobs(zero=3)):
        prediction = predict_in(setting, plan_in(setting, knobs))
        assert sum(prediction.parts.values()) == prediction.step_time > 0.0
        assert set(prediction.rests_on) == {*prediction.parts, "memory"}
        sensitivities(setting.estimator, prediction.plan)


def test_a_switch_between_nodes_is_scale_out_and_one_around_several_hosts_is_not():
    """InfiniBand described as a switch is based on measurements of InfiniBand, not of NVLink."""

    def domains(*tiers):
        nodes = [dict(name=f"t{size}", topology=kind, size=size, bandwidth="50 GB/s", latency="5 us", **FILE_NOTES) for kind, size in tiers]
        data = dict(name="c", chip="h100-sxm-80gb", num_chips=16, chips_per_node=8, tiers=nodes, **FILE_NOTES)
        cluster = parse_cluster(json.dumps(data))
        return scale_up_size(cluster), [cluster.is_scale_out(tier) for tier in cluster.tiers]

    assert domains(("switch", 8), ("switch", 1024)) == domains(("switch", 8), ("fat_tree", 1024)) == (8, [False, True])
    assert domains(("switch", 64)) == (64, [False])
    assert domains(("pcie_tree", 4), ("switch", 8), ("fat_tree", 64)) == (8, [False, False, True])
    assert domains(("fat_tree", 64)) == (1, [True])
