"""The mesh of experts and the one of attention are two ways to count the same ranks."""

import itertools

import pytest

from perfmodel.parallel.algebra.folding import expert_parts, folding_fault, foldings
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER, divisors

SHAPES = [(tp_kv, tp_q, cp, data) for tp_kv, tp_q, cp, data in itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 4, 6))]


def members(strides_and_sizes):
    """Ranks of the group of rank 0 over axes of these strides and sizes."""
    ranks = {0}
    for stride, size in strides_and_sizes:
        ranks = {rank + stride * i for rank in ranks for i in range(int(size))}
    return ranks


@pytest.mark.parametrize("tp_kv, tp_q, cp, data", SHAPES)
def test_experts_lie_on_consecutive_ranks_outside_their_tensor_parallelism(tp_kv, tp_q, cp, data):
    """Megatron's expert mesh: etp fastest, then ep, then edp."""
    tp = tp_kv * tp_q
    folded = foldings(num_experts=48, width=96, tp_kv=tp_kv, tp_q=tp_q, cp=cp, data=data)
    assert (1, tp) in folded
    for ep, etp in folded:
        degrees = {"pp": [1], "dp_replicate": [1], "dp_shard": [data], "cp": [cp], "tp": [tp]}
        for tier in (2, 8, 1024):
            grid = make_grid(degrees, [DEFAULT_ORDER], tier_sizes=[tier], num_key_value_heads=tp_kv, folding=[(ep, etp)])
            if 3 not in (cp, data // 2):  # what lies across a tier's edge is a mean
                assert members_inside(grid) == min(ep, max(1, tier // etp))
        assert grid.size(("dp_ep", "cp_ep", "tp_kv_ep", "tp_q_ep"))[0] == ep
        assert grid.size(("tp_kv", "tp_q"))[0] == etp
        assert grid.size(("dp_shard", "cp"))[0] == tp * cp * data // (ep * etp)
        assert grid.size(grid.fine)[0] == tp * cp * data


def members_inside(grid):
    return grid.group_inside(("dp_ep", "cp_ep", "tp_kv_ep", "tp_q_ep"))[0][0]


def test_all_that_folds_is_listed():
    for tp_kv, tp_q, cp, data in SHAPES:
        tp = tp_kv * tp_q
        listed = foldings(num_experts=24, width=64, tp_kv=tp_kv, tp_q=tp_q, cp=cp, data=data)
        sizes = {"tp_kv": tp_kv, "tp_q": tp_q, "cp": cp, "data": data}
        tried = [(ep, etp) for etp in {tp, 1} for ep in divisors(24) if 64 % etp == 0 and not folding_fault(**sizes, ep=ep, etp=etp)]
        assert sorted(listed) == sorted(tried)


@pytest.mark.parametrize(
    "sizes, fault",
    [
        ({"ep": 2, "etp": 3}, "etp=3: must divide tp=4"),
        ({"ep": 2, "etp": 1}, "ep=2: must be a multiple of tp/etp=4"),
        ({"ep": 12, "etp": 1, "data": 8}, "neither divides cp=2 nor is a multiple"),
        ({"ep": 64, "etp": 1, "data": 4}, "takes 8 ways of the data axis, which has 4"),
    ],
)
def test_what_does_not_fold_is_reported(sizes, fault):
    assert fault in folding_fault(**({"tp_kv": 2, "tp_q": 2, "cp": 2, "data": 8} | sizes))


def test_parts_multiply_to_the_whole():
    parts = expert_parts(tp_kv=4, tp_q=2, cp=2, ep=32, etp=2)
    assert {name: float(size) for name, size in parts.items()} == {"dp_ep": 4.0, "cp_ep": 2.0, "tp_kv_ep": 4.0, "tp_q_ep": 1.0}
