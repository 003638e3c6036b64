"""Traffic of ZeRO, FSDP and HSDP, from the three layouts and two lifetimes of every parameter."""

import pytest

from tests.laws.volumes import derivation_of, parameter_traffic

N = 16
SHARDED = {"dp_shard": N}
PSI = 8_030_261_248  # Llama-3-8B; its rows divide by 16, so nothing is padded


@pytest.fixture(scope="module")
def llama():
    return derivation_of("llama-3-8b", "ddp")


def sent(llama, zero, sizes=SHARDED, **settings) -> float:
    """Elements that one chip sends in a step."""
    return sum(wire for _, _, wire in parameter_traffic(llama, sizes, zero=zero, **settings).values())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_first_stages_send_twice_the_model(llama, zero):
    """Rajbhandari et al. 2020, section 7: 2 psi (n-1)/n."""
    assert sent(llama, zero) == pytest.approx(2 * PSI * (N - 1) / N, rel=1e-12)


def test_stage_three_sends_it_three_times(llama):
    assert sent(llama, 3) == pytest.approx(3 * PSI * (N - 1) / N, rel=1e-12)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize(
    ("zero", "settings", "per_microbatch", "per_step"),
    [
        (0, {}, 0, 2),
        (0, {"reduces_each_microbatch": True}, 2, 0),
        (1, {}, 0, 2),
        (2, {}, 1, 1),
        (2, {"reduces_each_microbatch": False}, 0, 2),
        (2, {"stores_shards_zero2": True}, 2, 0),
        (3, {}, 3, 0),
        (3, {"reduces_each_microbatch": False}, 2, 1),
        (3, {"reduces_each_microbatch": False, "keeps_gathered": True}, 0, 2),
    ],
    ids=str,
)
def test_what_grows_with_microbatches(llama, m, zero, settings, per_microbatch, per_step):
    expected = (per_microbatch * m + per_step) * PSI * (N - 1) / N
    assert sent(llama, zero, num_microbatches=m, **settings) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hsdp_reduces_a_shard_over_the_replicas(llama, zero):
    """Gathers and scatters stay inside dp_shard; over dp_replicate goes 1/dp_shard of the gradients, once a step."""
    traffic = parameter_traffic(llama, {"dp_shard": 8, "dp_replicate": 4}, zero=zero)
    units, elements, wire = traffic["all_reduce", "finish"]
    assert (units, elements) == (33, PSI / 8)
    assert wire == pytest.approx(2 * PSI / 8 * 3 / 4, rel=1e-12)
    inside = parameter_traffic(llama, {"dp_shard": 8}, zero=zero)
    assert {key: value for key, value in traffic.items() if key[0] != "all_reduce"} == inside


def test_context_parallel_is_a_data_axis_for_weights():
    derivation = derivation_of("llama-3-8b", "megatron")
    assert parameter_traffic(derivation, {"dp_shard": 4, "cp": 4}, zero=3) == parameter_traffic(derivation, SHARDED, zero=3)


def test_tensor_parallelism_leaves_a_share_to_the_data_axes():
    """Matrices are divided by tp first, dp_shard cuts inside; norm weights are not divided."""
    derivation = derivation_of("llama-3-8b", "megatron")
    norms = 65 * 4096
    traffic = parameter_traffic(derivation, {"dp_shard": 4, "tp_kv": 8}, zero=3)
    assert traffic["all_gather", "gather_forward"][:2] == (33, (PSI - norms) / 8 + norms)


def test_worked_example_of_hsdp_with_sequence_parallelism():
    """Llama-3-8B, dp_replicate 2, dp_shard 4, tp 8, bf16: MB of one layer's matrices, and of its two norm weights."""
    derivation = derivation_of("llama-3-8b", "megatron-sp")
    sizes = {"dp_replicate": 2, "dp_shard": 4, "tp_kv": 8}
    layer = [p for p in derivation.parameters if p.regions == ("layer",)]
    matrices = sum(p.num_rows * p.num_columns for p in layer if p.num_columns > 1) / 8 * 2
    norms = sum(p.num_rows for p in layer if p.num_columns == 1) * 2
    assert round(matrices / 1e6, 1) == 54.5
    assert round(matrices / 4 / 1e6, 1) == 13.6
    assert round(norms / 1e6, 3) == 0.016
    assert round(norms / 4 / 1e6, 3) == 0.004
    traffic = parameter_traffic(derivation, sizes, zero=3)
    outside = (2 * 128256 * 4096 / 8 + 4096) * 2
    assert traffic["reduce_scatter", "reduce"][1] * 2 == pytest.approx(32 * (matrices + norms) + outside)
    assert traffic["all_reduce", "finish"][1] * 2 == pytest.approx((32 * (matrices + norms) + outside) / 4)


def test_small_matrices_are_padded_to_whole_shards(llama):
    """4096 chips: keys and values have 1024 rows and are stored as 4096; the whole is 17 % larger."""
    padded = parameter_traffic(llama, {"dp_shard": 4096}, zero=3)["all_gather", "gather_forward"][1]
    assert padded / PSI == pytest.approx(1.17, abs=0.005)


def test_one_chip_sends_nothing(llama):
    for zero in range(4):
        assert parameter_traffic(llama, {}, zero=zero) == {}
