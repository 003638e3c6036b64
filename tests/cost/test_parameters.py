"""Cost of parameter events: one collective over the bytes that ZeRO says, merged by unit, in buckets where the framework does so."""

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.parameters import cell, compile_parameters, parameter_cost
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, profile_of

MODEL = make_model(**LLAMA_LIKE | {"vocab_size": 1024, "num_key_value_heads": 8})
ESTIMATOR = estimator_of(make_job(MODEL))
MACHINE = ESTIMATOR.machine
EMBEDDING, LAYER = range(2)
LAYER_ELEMENTS = MODEL.num_layer_parameters


def costs(*, zero, profile=None, parameter_bytes=2.0, gradient_bytes=4.0, pipelined=False, **degrees):
    program = ESTIMATOR.programs.program("megatron", AttentionKernel.FLASH, DEFAULT_RECOMPUTE_OPERATORS)
    profile = profile or profile_of("megatron")
    compiled = compile_parameters(
        program.parameters,
        program.regions,
        profile,
        zero=zero,
        pipelined=pipelined,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
    )
    grid = make_grid(
        {axis: [degrees.get(axis, 1)] for axis in DEFAULT_ORDER}, [DEFAULT_ORDER], tier_sizes=MACHINE.tier_sizes, num_key_value_heads=8
    )
    return parameter_cost(compiled, profile, MACHINE, grid)


def collective(kind, num_bytes, n, inside):
    return float(collective_time(kind, num_bytes, group_size=float(n), inside=[float(inside), float(n)], machine=MACHINE))


def test_data_parallel_reduces_each_layer_once_a_step():
    cost = costs(zero=0, dp_replicate=16)
    expected = collective(CollectiveKind.ALL_REDUCE, 4.0 * LAYER_ELEMENTS, 16, 4)
    assert cost.of("reduce", "step")[LAYER][0] == pytest.approx(expected, rel=1e-12)
    assert cost.of("reduce", "microbatch")[LAYER][0] == cost.of("publish", "step")[LAYER][0] == 0.0


@pytest.mark.parametrize("zero", [0, 1])
def test_axes_of_data_reduce_gradients_and_others_do_not(zero):
    """Norms whose gradients tensor-parallel ranks add up are not reduced by data."""
    shards = {"dp_shard": 2} if zero else {"dp_replicate": 2}
    for degrees, reduced in (({}, 0.0), ({"tp": 8}, 0.0), (shards, 1.0), ({"cp": 4}, 1.0), ({"tp": 2, **shards}, 1.0)):
        assert costs(zero=zero, **degrees).is_reduced.tolist() == [reduced]


def test_zero_1_scatters_gradients_and_publishes_weights():
    cost = costs(zero=1, dp_shard=16)
    assert cost.of("reduce", "step")[LAYER][0] == pytest.approx(
        collective(CollectiveKind.REDUCE_SCATTER, 4.0 * LAYER_ELEMENTS, 16, 4), rel=1e-12
    )
    assert cost.of("publish", "step")[LAYER][0] == pytest.approx(
        collective(CollectiveKind.ALL_GATHER, 2.0 * LAYER_ELEMENTS, 16, 4), rel=1e-12
    )


def test_zero_3_gathers_twice_each_microbatch():
    cost = costs(zero=3, dp_shard=16, profile=profile_of("torch-fsdp2"))
    gather = collective(CollectiveKind.ALL_GATHER, 2.0 * LAYER_ELEMENTS, 16, 4)
    for what in ("gather_forward", "gather_backward"):
        assert cost.of(what, "microbatch")[LAYER][0] == pytest.approx(gather, rel=1e-12)
    reduce = collective(CollectiveKind.REDUCE_SCATTER, 4.0 * LAYER_ELEMENTS, 16, 4)
    assert cost.of("reduce", "microbatch")[LAYER][0] == pytest.approx(reduce, rel=1e-12)


def test_hsdp_sums_shards_over_the_replicas_once_a_step():
    cost = costs(zero=3, dp_shard=4, dp_replicate=4, profile=profile_of("torch-fsdp2"))
    expected = collective(CollectiveKind.ALL_REDUCE, 4.0 * LAYER_ELEMENTS / 4, 4, 1)
    assert cost.of("reduce", "step")[LAYER][0] == pytest.approx(expected, rel=1e-12)


def test_a_pipeline_that_keeps_parameters_gathers_once_a_step():
    cost = costs(zero=3, dp_shard=4, pp=4, pipelined=True, profile=profile_of("torch-fsdp2"))
    assert cost.of("gather_forward", "microbatch")[LAYER][0] == 0.0
    assert cost.of("gather_forward", "step")[LAYER][0] > 0.0


def test_context_ranks_are_data_ranks_to_a_weight():
    by_cp = costs(zero=1, cp=16)
    by_data = costs(zero=1, dp_shard=16)
    assert by_cp.of("reduce", "step")[LAYER][0] == by_data.of("reduce", "step")[LAYER][0]
    assert np.array_equal(by_cp.shard, by_data.shard)


def test_elements_of_a_chip():
    cost = costs(zero=1, dp_shard=4, tp=4)
    norms = 2 * MODEL.hidden_size
    assert cost.full[1, 0] == (LAYER_ELEMENTS - norms) / 4 + norms
    assert cost.shard[1, 0] == cost.full[1, 0] / 4
    assert cost.tied[0, 0] == cost.tied[1, 0] == 0.0


def test_tensor_by_tensor_pays_more_latency():
    together = costs(zero=1, dp_shard=16).of("publish", "step")[LAYER][0]
    apart = costs(zero=1, dp_shard=16, profile=profile_of("megatron").having(parameter_unit="tensor")).of("publish", "step")[LAYER][0]
    assert apart > together


@pytest.mark.parametrize("bucket", [2e6, 5e6, 1e9])
def test_buckets_move_the_same_bytes(bucket):
    """A bucket smaller than a layer is several collectives; a larger one shares its latency among layers. It counts bytes as produced."""
    profile = profile_of("megatron").having(bucket_bytes=bucket)
    time = costs(zero=0, dp_replicate=16, profile=profile).of("reduce", "step")[LAYER][0]
    num_bytes = 4.0 * LAYER_ELEMENTS
    on_the_wire = bucket * 4.0 / 2.0
    calls, units = max(np.ceil(num_bytes / on_the_wire), 1.0), max(np.floor(on_the_wire / num_bytes), 1.0)
    one = collective(CollectiveKind.ALL_REDUCE, num_bytes * units / calls, 16, 4)
    assert time == pytest.approx(one * calls / units, rel=1e-12)


def test_a_tensor_is_never_split_among_buckets():
    """However small the bucket, a layer takes one collective for each of its tensors; an embedding takes one."""
    profile = profile_of("megatron").having(bucket_bytes=1.0)
    cost = costs(zero=0, dp_replicate=16, profile=profile)
    layer = [
        p
        for p in ESTIMATOR.programs.program("megatron", AttentionKernel.FLASH, DEFAULT_RECOMPUTE_OPERATORS).parameters
        if "layer" in p.regions
    ]
    per_tensor = collective(CollectiveKind.ALL_REDUCE, 4.0 * LAYER_ELEMENTS / len(layer), 16, 4)
    assert cost.of("reduce", "step")[LAYER][0] == pytest.approx(per_tensor * len(layer), rel=1e-12)
    embedding = collective(CollectiveKind.ALL_REDUCE, 4.0 * MODEL.vocab_size * MODEL.hidden_size, 16, 4)
    assert cost.of("reduce", "step")[EMBEDDING][0] == pytest.approx(embedding, rel=1e-12)


def test_cells_are_distinct():
    from perfmodel.cost.parameters import TIMES, WHAT

    cells = {cell(what, times, region, 3) for what in WHAT for times in TIMES for region in range(3)}
    assert cells == set(range(len(WHAT) * len(TIMES) * 3))
