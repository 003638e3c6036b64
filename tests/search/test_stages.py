"""The contract of `perfmodel.search.stages.partition_chain`, and its agreement with brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.search import Budget, partition_chain


def cost_of(chain, cuts, layouts):
    """Latency of a partition as its definition reads, infinite where it breaks a limit."""
    stage_times, stage_weights = [], []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        entries = [(k, layouts[k], layouts[k + 1]) for k in range(a, b)]
        sent = chain["send_times"][b][layouts[b]] if b < cuts[-1] else 0.0
        stage_times.append(math.fsum([*(chain["times"][k][u, v] for k, u, v in entries), sent]))
        weight = math.fsum(chain["held"][k][u, v] + chain["in_flight"][i] * chain["kept"][k][u, v] for k, u, v in entries)
        stage_weights.append(weight)
    if math.inf in stage_times or any(weight > limit for weight, limit in zip(stage_weights, chain["limits"], strict=True)):
        return math.inf, stage_times, stage_weights
    return math.fsum(stage_times) + (chain["num_microbatches"] - 1) * max(stage_times), stage_times, stage_weights


def brute_force(chain):
    times = chain["times"]
    n, sizes = len(times), [len(times[0]), *(table.shape[1] for table in times)]
    inner = itertools.combinations(range(1, n), chain["num_stages"] - 1)
    every = itertools.product(*(range(size) for size in sizes))
    return min(cost_of(chain, (0, *cuts, n), layouts)[0] for cuts, layouts in itertools.product(inner, every))


def random_chain(seed, *, num_blocks, num_stages, num_kinds=None, share_forbidden=0.0):
    """Integers, so that limits are met exactly; `num_kinds`: blocks repeat, as the same objects."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 4, num_blocks + 1)] if num_kinds is None else [2] * (num_blocks + 1)
    shapes = list(itertools.pairwise(sizes))

    def matrices(most):
        kinds = [rng.integers(0, most, shape).astype(float) for shape in (shapes if num_kinds is None else shapes[:num_kinds])]
        return [kinds[k % len(kinds)] for k in range(num_blocks)]

    times = matrices(30)
    if share_forbidden:
        times = [np.where(rng.random(table.shape) < share_forbidden, np.inf, table) for table in times]
    return {
        "times": times,
        "num_stages": num_stages,
        "num_microbatches": int(rng.choice([1, 2, 4, 32])),
        "send_times": [rng.integers(0, 8, size).astype(float) for size in sizes],
        "held": matrices(10),
        "kept": matrices(5),
        "in_flight": [float(num_stages - i) for i in range(num_stages)],
        "limits": [float(limit) for limit in rng.integers(4, 16 * num_blocks // num_stages, num_stages)],
    }


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    num_blocks=st.integers(1, 6),
    num_stages=st.integers(1, 4),
    num_kinds=st.sampled_from([None, 1, 2]),
    share_forbidden=st.sampled_from([0.0, 0.2]),
)
@pytest.mark.slow
def test_small_chains_are_partitioned_as_by_brute_force(seed, num_blocks, num_stages, num_kinds, share_forbidden):
    num_stages = min(num_stages, num_blocks)
    chain = random_chain(seed, num_blocks=num_blocks, num_stages=num_stages, num_kinds=num_kinds, share_forbidden=share_forbidden)
    best = brute_force(chain)
    if math.isinf(best):
        with pytest.raises(InputError, match="no partition is possible"):
            partition_chain(**chain)
        return
    partition = partition_chain(**chain)
    assert partition.cost == pytest.approx(best, rel=1e-10)
    assert partition.is_proved
    assert (partition.lower_bound, partition.gap) == (partition.cost, 0.0)
    assert (partition.cuts[0], partition.cuts[-1], len(partition.cuts)) == (0, num_blocks, num_stages + 1)
    cost, stage_times, stage_weights = cost_of(chain, partition.cuts, partition.layouts)
    assert cost == pytest.approx(partition.cost, rel=1e-12)
    assert partition.stage_times == pytest.approx(stage_times, rel=1e-12)
    assert partition.stage_weights == pytest.approx(stage_weights, rel=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 3, 64])
def test_one_layout_is_the_partition_of_numbers(num_microbatches):
    """Without layouts and weights: balance against the sum, which no cut changes."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 100, 12).astype(float)
    partition = partition_chain([[[length]] for length in lengths], num_stages=4, num_microbatches=num_microbatches)
    largest = min(
        max(lengths[a:b].sum() for a, b in itertools.pairwise((0, *cuts, 12))) for cuts in itertools.combinations(range(1, 12), 3)
    )
    assert partition.cost == lengths.sum() + (num_microbatches - 1) * largest


@pytest.mark.slow
def test_equal_blocks_are_split_evenly():
    block = np.array([[2.0, 3.0], [3.0, 2.0]])
    partition = partition_chain([block] * 80, num_stages=8, num_microbatches=16)
    assert partition.cuts == tuple(range(0, 81, 10))
    assert partition.cost == 160.0 + 15 * 20.0
    assert len(set(partition.layouts)) == 1


def test_what_is_in_flight_moves_blocks_to_later_stages():
    """Four kept by the first stage and one by the last: even stages would not fit."""
    ones = np.ones((1, 1))
    even = partition_chain([ones] * 8, num_stages=2, num_microbatches=8, kept=[ones] * 8)
    partition = partition_chain([ones] * 8, num_stages=2, num_microbatches=8, kept=[ones] * 8, in_flight=[4.0, 1.0], limits=[12.0, 12.0])
    assert even.cuts == (0, 4, 8)
    assert partition.cuts == (0, 3, 8)
    assert partition.stage_weights == (12.0, 5.0)
    assert partition.cost == 8.0 + 7 * 5.0


@pytest.mark.slow
def test_a_long_chain_within_limits():
    """A slow layout that holds little and a fast one that holds much, forty-eight blocks and two ends, four stages: proved."""
    rng = np.random.default_rng(3)
    block = rng.integers(10, 40, (6, 6)).astype(float)
    held = np.outer(np.ones(6), 200.0 / block.min(axis=0))
    ends = [block + 20.0, block + 35.0]
    times = [ends[0], *[block] * 48, ends[1]]
    loads = {"held": [held] * 50, "kept": [0.2 * held] * 50, "in_flight": [4.0, 3.0, 2.0, 1.0]}
    free = partition_chain(times, num_stages=4, num_microbatches=8)
    weights = partition_chain(times, num_stages=4, num_microbatches=8, **loads).stage_weights
    partition = partition_chain(times, num_stages=4, num_microbatches=8, limits=[0.8 * max(weights)] * 4, **loads)
    assert partition.is_proved
    assert max(partition.stage_weights) <= 0.8 * max(weights)
    assert partition.cost > free.cost


def test_out_of_work_it_reports_a_true_gap():
    chain = random_chain(5, num_blocks=20, num_stages=4) | {"limits": [60.0] * 4, "num_microbatches": 4}
    complete = partition_chain(**chain)
    gaps = []
    for work in (1.0, 1e6, 5e6, 2e7, 1e8):
        try:
            early = partition_chain(**chain, budget=Budget(work))
        except InputError:
            continue
        assert early.lower_bound <= complete.cost <= early.cost
        assert early.is_proved == (early.gap == 0.0) == (early.cut_off == "")
        gaps.append(early.gap)
    assert max(gaps) > 0


ONE = [[[1.0]], [[1.0]]]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"times": []}, r"times=\[\]: a chain has at least one block; "),
        ({"times": [[[1.0, np.nan]]], "num_stages": 1}, r"times\[0\]=nan: a time is a number of at least 0; "),
        ({"times": [[[-1.0]]], "num_stages": 1}, r"times\[0\]=-1.0: a time is a number of at least 0; "),
        ({"times": [[1.0]]}, r"times\[0\]=1 dims: this is a matrix; "),
        ({"times": [[["a"]]]}, r"times\[0\]=\[\['a'\]\]: times and weights are real numbers "),
        ({"times": [[[]]]}, r"times\[0\]=\[\]: a tensor has at least one layout; "),
        ({"times": [[[1.0, 1.0]], [[1.0]]]}, r"times\[1\]=matrix \(1, 1\): the tensor between blocks 0 and 1 has 2 layouts; "),
        ({"num_stages": 3}, r"num_stages=3: a stage needs a block, and there are 2; "),
        ({"num_stages": 0}, r"num_stages=0: must be a whole number of at least 1; "),
        ({"num_microbatches": 1.5}, r"num_microbatches=1.5: must be a whole number of at least 1; "),
        ({"held": [[[1.0]]]}, r"held=1 matrices: there are 2 blocks; "),
        ({"held": [[[1.0]], [[np.inf]]]}, r"held\[1\]=inf: a weight is a finite number of at least 0; "),
        ({"kept": [[[1.0]], [[1.0, 2.0]]]}, r"kept\[1\]=matrix \(1, 2\): block 1 has times \(1, 1\); "),
        ({"send_times": [[1.0]]}, r"send_times=1 vectors: there are 3 tensors; "),
        ({"send_times": [[1.0], [1.0, 2.0], [1.0]]}, r"send_times\[1\]=2 entries: tensor 1 has 1 layouts; "),
        ({"in_flight": [1.0]}, r"in_flight=1 numbers: there are 2 stages; "),
        ({"in_flight": [1.0, -1.0]}, r"in_flight\[1\]=-1.0: must be a number of at least 0; "),
        ({"limits": [1.0, math.nan]}, r"limits\[1\]=nan: must be a number of at least 0; "),
        ({"limits": [1.0, 0.5], "held": ONE}, r"limits: no partition is possible; "),
    ],
)
def test_bad_input_is_one_sentence(changed, sentence):
    given = {"times": ONE, "num_stages": 2, "num_microbatches": 1}
    with pytest.raises(InputError, match="^" + sentence) as caught:
        partition_chain(**(given | changed))
    assert "\n" not in str(caught.value)
