"""Chains split into pipeline stages within limits. `make bench` shows the times; the tests assert the proof of optimality."""

import numpy as np
import pytest

from perfmodel.search import partition_chain


def chain(num_blocks, num_kinds, num_layouts):
    """Fast layouts hold more; layouts that change between blocks cost more."""
    rng = np.random.default_rng(3)
    change = 0.5 * (1 - np.eye(num_layouts))
    times = [change + rng.random((num_layouts, num_layouts)) + np.geomspace(1, 4, num_layouts) for _ in range(num_kinds)]
    held = [2.0 / time for time in times]
    kinds = [k % num_kinds for k in range(num_blocks)]
    return {"times": [times[k] for k in kinds], "held": [held[k] for k in kinds], "kept": [held[k] for k in kinds]}


CASES = {
    "80 equal blocks, 8 stages": (80, 1, 10, 8),
    "160 blocks in pairs, 4 stages": (160, 2, 6, 4),
    "40 blocks, 4 stages": (40, 40, 8, 4),
}


@pytest.mark.parametrize(("num_blocks", "num_kinds", "num_layouts", "num_stages"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("share", [0.8, 4.0])
def test_partition(benchmark, num_blocks, num_kinds, num_layouts, num_stages, share):
    given = chain(num_blocks, num_kinds, num_layouts)
    given |= {"num_stages": num_stages, "num_microbatches": 32, "in_flight": [float(num_stages - i) for i in range(num_stages)]}
    free = partition_chain(**given)
    limits = [share * max(free.stage_weights)] * num_stages
    partition = benchmark.pedantic(lambda: partition_chain(**given, limits=limits), rounds=1, iterations=1)
    benchmark.extra_info |= {"programs": partition.num_programs, "searches": partition.num_searches}
    assert partition.is_proved
    assert partition.cost >= free.cost * (1 - 1e-12)
