"""A program on columns: each column by itself to the bit, and amounts that scale as they should."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.evaluate import amount_values, microbatch_cost, pipeline_crosses_nodes
from perfmodel.cost.program import compile_program
from perfmodel.cost.programs import Compiled
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model

ESTIMATOR = estimator_of(make_job(make_model(**LLAMA_LIKE)), chips=64)
SEQ_LEN = float(ESTIMATOR.job.seq_len)
FIELDS = ("matmul", "attention", "streaming", "communication", "saved", "boundary", "logits", "peaks", "crosses_nodes")


def program_of(rule_set="megatron-sp", attention=AttentionKernel.FLASH):
    return ESTIMATOR.programs.program(rule_set, attention, DEFAULT_RECOMPUTE_OPERATORS)


def grid_of(*rows, order=DEFAULT_ORDER, kv_heads=2):
    """Rows of degrees; an axis that is left out is 1."""
    return make_grid(
        {axis: [row.get(axis, 1) for row in rows] for axis in DEFAULT_ORDER}, [order], tier_sizes=(4, 4096), num_key_value_heads=kv_heads
    )


rows = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "cp": st.sampled_from([1, 2, 4]),
        "dp_shard": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 4]),
    }
)


@given(st.lists(st.tuples(rows, st.sampled_from([1, 2, 3, 8])), min_size=1, max_size=9), st.sampled_from(AttentionKernel))
@settings(max_examples=30)
def test_a_column_alone_and_among_others(columns, attention):
    program = program_of(attention=attention)
    batches = np.array([float(b) for _, b in columns])
    together = microbatch_cost(program, ESTIMATOR.machine, grid_of(*(row for row, _ in columns)), batches, SEQ_LEN)
    for i, (row, b) in enumerate(columns):
        alone = microbatch_cost(program, ESTIMATOR.machine, grid_of(row), np.array([float(b)]), SEQ_LEN)
        for field in FIELDS:
            assert np.array_equal(getattr(together, field)[..., i], getattr(alone, field)[..., 0]), field


def test_bytes_grow_with_the_microbatch_and_shrink_with_the_axes():
    program = program_of()
    cost = microbatch_cost(
        program, ESTIMATOR.machine, grid_of({}, {}, {"tp": 4}, {"cp": 4}, {"tp": 2, "cp": 2}), np.array([1.0, 3.0, 1.0, 1.0, 1.0]), SEQ_LEN
    )
    assert np.array_equal(cost.saved[:, 1], 3 * cost.saved[:, 0])
    assert cost.boundary.tolist() == [cost.boundary[0] * x for x in (1, 3, 1 / 4, 1 / 4, 1 / 4)]
    assert (cost.saved[:, 2:] <= cost.saved[:, :1]).all()


def test_amounts_of_padded_vocabulary():
    """1000 rows of the vocabulary over 3 x 2 ranks are 167 each: padded, not cut."""
    model = make_model(num_attention_heads=6, num_key_value_heads=6, hidden_size=384, intermediate_size=1536, vocab_size=1000)
    estimator = estimator_of(make_job(model))
    program = estimator.programs.program("megatron", AttentionKernel.FLASH, DEFAULT_RECOMPUTE_OPERATORS)
    grid = make_grid(
        {axis: [6 if axis == "tp" else 1] for axis in DEFAULT_ORDER}, [DEFAULT_ORDER], tier_sizes=(4, 4096), num_key_value_heads=6
    )
    amount, _ = amount_values(program.rows.amounts, grid, np.array([2.0]), 256.0)
    assert amount[program.logits, 0] == 2 * 256 * 167


@pytest.mark.parametrize("rule_set", ["megatron", "megatron-sp"])
def test_one_rank_sends_nothing(rule_set):
    cost = microbatch_cost(program_of(rule_set), ESTIMATOR.machine, grid_of({}, {"dp_shard": 8}, {"pp": 4}), np.ones(3), SEQ_LEN)
    assert not cost.communication.any()


@pytest.mark.parametrize(
    "rule_set, changes, slowest",
    [
        ("megatron", {}, 1.0),
        ("megatron", {"context_chunks": "contiguous"}, 1.75),
        ("ulysses", {"context_chunks": "contiguous"}, 1.0),
        ("megatron", {"context_attention_rate_fraction": 0.5}, 2.0),
        ("ulysses", {"context_attention_rate_fraction": 0.5}, 1.0),
    ],
)
def test_what_the_slowest_of_four_context_ranks_computes(rule_set, changes, slowest):
    """Over a quarter of the causal half. Ulysses cuts heads, so all its ranks have all queries, in kernels that nothing divides."""
    model = make_model(**LLAMA_LIKE | {"num_key_value_heads": 8})
    job, profile = make_job(model, seq_len=2**17), ESTIMATOR.profile.having(**changes)
    estimator = replace(ESTIMATOR, programs=replace(ESTIMATOR.programs, job=job, profile=profile, compiled=Compiled()))
    program = estimator.programs.program(rule_set, AttentionKernel.FLASH, DEFAULT_RECOMPUTE_OPERATORS)
    cost = microbatch_cost(program, ESTIMATOR.machine, grid_of({}, {"cp": 4}, kv_heads=8), np.array([4.0, 4.0]), 2.0**17)
    one, four = cost.attention.sum(axis=0)
    assert four / one * 4 == pytest.approx(slowest, rel=0.01)


def test_where_a_pipeline_leaves_the_node():
    assert pipeline_crosses_nodes(grid_of({}, {"pp": 4}, {"pp": 8}, {"tp": 2, "pp": 4}, {"tp": 2, "pp": 2})).tolist() == [0, 0, 1, 1, 0]


def test_each_attention_has_a_mask_and_a_head_of_its_own():
    """A causal attention and one over all keys, with heads half as deep."""
    kept = program_of().derivation
    (causal,) = (op for op in kept.graph.operators if op.name == "attention")
    uncausal = replace(causal.forward[0], mask=None, head_dim=causal.forward[0].head_dim // 2)
    both = replace(causal, forward=(*causal.forward, uncausal), backward=(*causal.backward, uncausal))
    operators = tuple(both if op is causal else op for op in kept.graph.operators)
    changed = replace(kept, graph=replace(kept.graph, operators=operators))
    program = compile_program(
        changed, ESTIMATOR.profile, recompute_operators=DEFAULT_RECOMPUTE_OPERATORS, attention_kernel=AttentionKernel.FLASH
    )
    assert program.rows.attention.columns["behaviour"].tolist() == [0, 1, 0, 1]
    grid = grid_of({"cp": 2})
    costs = [microbatch_cost(compiled, ESTIMATOR.machine, grid, np.array([1.0]), SEQ_LEN) for compiled in (program_of(), program)]
    before, after = (cost.flops.sum() for cost in costs)
    columns, sizes = program_of().rows.attention.columns, amount_values(program_of().rows.amounts, grid, np.array([1.0]), SEQ_LEN)[0]
    square = np.prod([sizes[columns[name][0], 0] for name in ("batch", "heads", "queries", "keys")])
    assert after - before == 14.0 * square * uncausal.head_dim
    times = [cost.attention.sum() for cost in costs]
    assert 1.5 * times[0] < times[1] < 2.5 * times[0]
