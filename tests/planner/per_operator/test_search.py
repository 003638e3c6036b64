"""The per-operator search on any network: spaces, optima, memory limits, strategies, folded layers, pipelines."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.per_operator.mesh import mesh_axes
from perfmodel.parallel.per_operator.stages import blocks_of
from perfmodel.parallel.per_operator.traffic import derive_assigned
from perfmodel.planner.per_operator.fold import fold_layers
from perfmodel.planner.per_operator.pipeline import PipelineSearch, search_pipeline
from perfmodel.planner.per_operator.search import fixed_parts
from perfmodel.planner.per_operator.space import dim_classes, network_space
from perfmodel.planner.per_operator.strategies import data_parallel, mesh_tensorflow, one_weird_trick, sample_dims
from perfmodel.search import Budget
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum, elementwise
from perfmodel.workload.networks import load_network
from perfmodel.workload.work import OwnTraffic, Pass, Stream, passes
from tests.planner.per_operator.cases import estimator, machine, planner


def perceptron(batch: int = 8, width: int = 64) -> Graph:
    """x -> relu(x W1) W2, and a skip from x: one tensor with two readers."""
    tensors = {
        "x0": Tensor(name="x0", shape=(batch, width)),
        "x": Tensor(name="x", shape=(batch, width)),
        "h": Tensor(name="h", shape=(batch, 2 * width)),
        "a": Tensor(name="a", shape=(batch, 2 * width)),
        "y": Tensor(name="y", shape=(batch, width)),
        "z": Tensor(name="z", shape=(batch, width)),
        "w1": Tensor(name="w1", shape=(2 * width, width), role=TensorRole.PARAMETER),
        "w2": Tensor(name="w2", shape=(width, 2 * width), role=TensorRole.PARAMETER),
    }

    def of(name: str, *dims: str) -> Operand:
        return Operand(tensor=name, dims=dims)

    small, large = {"b": batch, "d": width}, {"b": batch, "f": 2 * width}
    operators = (
        elementwise("first", "relu", (of("x0", "b", "d"),), of("x", "b", "d"), small),
        einsum("up", of("x", "b", "d"), of("w1", "f", "d"), of("h", "b", "f"), {"b": batch, "f": 2 * width, "d": width}),
        elementwise("act", "relu", (of("h", "b", "f"),), of("a", "b", "f"), large),
        einsum("down", of("a", "b", "f"), of("w2", "d", "f"), of("y", "b", "d"), {"b": batch, "d": width, "f": 2 * width}),
        elementwise("skip", "add", (of("x", "b", "d"), of("y", "b", "d")), of("z", "b", "d"), small),
    )
    return Graph(name="perceptron", operators=operators, tensors=tensors, batch=batch)


def test_axes_are_the_prime_factors_of_the_tiers_and_are_joined_on_request():
    assert [(axis.size, axis.tier) for axis in mesh_axes(24, (8, 64))] == [(3, 1), (2, 0), (2, 0), (2, 0)]
    assert [(axis.size, axis.tier) for axis in mesh_axes(12, (8, 64))] == [(2, 1), (3, 0), (2, 0)]
    assert math.prod(axis.size for axis in mesh_axes(512, (8, 512), most=6)) == 512
    assert len(mesh_axes(512, (8, 512), most=6)) == 6
    with pytest.raises(InputError, match="chips=0"):
        mesh_axes(0, (8, 64))


def test_dims_at_one_position_of_a_tensor_are_one_class():
    classes, count = dim_classes(perceptron())
    assert count == 3  # samples, features, hidden
    assert classes[1, "f"] == classes[2, "f"] == classes[3, "f"] != classes[1, "d"] == classes[4, "d"]


def test_the_space_has_every_way_to_count_axes_onto_dims():
    """t axes of one size and k dims: (t + k choose k), here in two tiers of two axes and one of three dims."""
    axes = mesh_axes(32, (8, 64))
    space = network_space(perceptron(batch=64), axes)
    up = space.operators[1]
    assert len(up) == math.comb(3 + 3, 3) * math.comb(2 + 3, 3)
    assert space.held == ("x",)
    assert {tuple(row) for row in up.masks.tolist()} == {tuple(row) for row in np.unique(up.masks, axis=0).tolist()}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_search_finds_the_least_of_all_plans(zero):
    searcher = planner(perceptron(), 4, zero=zero)
    tables = searcher.tables
    costs = tables.costs(1.0, searcher.setting)
    # operators and the held tensor one by one: a brute force over every choice
    from perfmodel.search import eliminate

    solution = eliminate(costs, tables.edges)
    best = math.inf
    for choice in itertools.product(*(range(len(cost)) for cost in costs)):
        total = sum(cost[i] for cost, i in zip(costs, choice, strict=True))
        if total < best:
            best = min(best, total + sum(matrix[choice[u], choice[v]] for u, v, matrix in tables.edges))
    assert solution.cost == pytest.approx(best, rel=1e-12)
    result = searcher.search()
    assert result.is_proved
    assert result.lower_bound <= result.best.step_time
    check_assignment(result.best.plan.cuts, searcher.network, needs_held=True)


@pytest.mark.parametrize("name", ["alexnet", "rnnlm", "transformer", "resnet50"])
@pytest.mark.slow
def test_no_strategy_beats_the_search_and_none_its_bound(name):
    sizes = {"transformer": {"layers": 1}}.get(name, {})
    searcher = planner(load_network(name, **sizes), 8, cluster="pase-2080ti")
    best = searcher.search()
    for strategy in (data_parallel(searcher.network), one_weird_trick(searcher.network)):
        other = searcher.search(strategy)
        assert best.best.step_time <= other.best.step_time * (1 + 1e-9)
        assert best.lower_bound <= other.best.step_time


def test_data_parallelism_cuts_samples_only_and_reduces_every_gradient():
    searcher = planner(load_network("alexnet"), 8)
    plan = searcher.search(data_parallel(searcher.network)).best.plan
    assert all(set(sharding) <= {"b"} for sharding in plan.cuts.shardings.values())
    assert all(len(sharding["b"]) == 3 for sharding in plan.cuts.shardings.values())


def test_samples_are_followed_from_the_input_whatever_their_dim_is_called():
    network = perceptron()
    calls = {"b": "i", "d": "b", "f": "f"}  # features called b

    def renamed(operator: Operator) -> Operator:
        dims = {calls[dim]: size for dim, size in operator.dims.items()}
        inputs, output = (
            [replace(operand, dims=tuple(map(calls.__getitem__, operand.dims))) for operand in some]
            for some in (operator.inputs, [operator.output])
        )
        return Operator(name=operator.name, kind=operator.kind, dims=dims, inputs=tuple(inputs), output=output[0])

    turned = replace(network, operators=tuple(map(renamed, network.operators)))
    assert set(sample_dims(network).values()) == {"b"}
    assert sample_dims(turned) == {operator.name: "i" for operator in network.operators}


def test_one_weird_trick_cuts_output_features_of_fully_connected_layers():
    searcher = planner(load_network("alexnet"), 8)
    plan = searcher.search(one_weird_trick(searcher.network)).best.plan
    convolutions = [o for o in searcher.network.operators if o.kind == "convolution"]
    products = [o for o in searcher.network.operators if o.kind == "einsum"]
    assert convolutions
    assert products
    assert all(set(plan.cuts.shardings[o.name]) == {"b"} for o in convolutions)
    assert all(set(plan.cuts.shardings[o.name]) == {"n"} for o in products)


def test_mesh_tensorflow_cuts_batch_and_the_dims_it_is_given():
    searcher = planner(perceptron(), 8)
    keep = mesh_tensorflow(searcher.network, batch_parts=2, model_dims={"up": ("f",), "act": ("f",), "down": ("f",)})
    plan = searcher.search(keep).best.plan
    assert len(plan.cuts.shardings["up"]["b"]) == 1
    assert len(plan.cuts.shardings["up"]["f"]) == 2
    with pytest.raises(InputError, match="batch_parts=0"):
        mesh_tensorflow(searcher.network, batch_parts=0, model_dims={})


def test_fixed_parts_are_kept_and_impossible_ones_named():
    searcher = planner(perceptron(), 4)
    result = searcher.search(fixed_parts({"up": {"f": 4}}))
    assert len(result.best.plan.cuts.shardings["up"]["f"]) == 2
    with pytest.raises(InputError, match=r"allowed\[up\]"):
        searcher.search(fixed_parts({"up": {"f": 3}}))
    with pytest.raises(InputError, match="parts\\[up\\]=q"):
        searcher.search(fixed_parts({"up": {"q": 2}}))


@pytest.mark.slow
def test_a_memory_limit_is_kept_and_has_a_price():
    searcher = planner(load_network("transformer", layers=2), 8)
    free = searcher.search()
    assert free.price == 0.0
    limit = 0.9 * free.best.memory["total"]
    tight = searcher.search(memory_limit=limit)
    assert tight.best.memory["total"] <= limit * (1 + 1e-9)
    assert tight.best.step_time >= free.best.step_time
    assert tight.price > 0
    with pytest.raises(InputError, match="no plan of the space needs less than"):
        searcher.search(memory_limit=0.01 * free.best.memory["total"])


def test_folded_layers_cost_what_the_repeated_plan_costs():
    network = load_network("gpt2", batch=8, seq_len=64, layers=4, vocabulary=1024)
    searcher = planner(network, 8, zero=1)
    tables = searcher.tables
    fold = fold_layers(searcher.space)
    assert len(fold.first) < len(fold.of)
    costs, edges = fold.problem(tables.costs(0.5, searcher.setting), tables.edges)
    rng = np.random.default_rng(0)
    for _ in range(20):
        folded = [int(rng.integers(len(cost))) for cost in costs]
        choice = fold.unfold(folded)
        unfolded = sum(c[i] for c, i in zip(tables.costs(0.5, searcher.setting), choice, strict=True))
        unfolded += sum(matrix[choice[u], choice[v]] for u, v, matrix in tables.edges)
        short = sum(c[i] for c, i in zip(costs, folded, strict=True)) + sum(m[folded[u], folded[v]] for u, v, m in edges)
        assert (math.isinf(short) and math.isinf(unfolded)) or short == pytest.approx(unfolded, rel=1e-9)
    alike, separate = searcher.search(has_equal_layers=True), searcher.search(has_equal_layers=False)
    assert alike.has_equal_layers
    assert separate.best.step_time <= alike.best.step_time * (1 + 1e-9)


def test_blocks_end_where_one_tensor_goes_on():
    network = perceptron()
    assert blocks_of(network) == [(0, 1), (1, 5)]  # the skip spans the rest


@pytest.mark.slow
def test_a_pipeline_is_no_worse_than_its_single_stage_and_keeps_its_bound():
    def at(batch: int) -> Graph:
        return load_network("gpt2", batch=batch, seq_len=128, layers=4, vocabulary=1024)

    two_nodes = estimator(at, 8, global_batch=64)
    options = {"cluster": "pase-1080ti", "zero": 1}
    capacity = machine("pase-1080ti", 8).memory.capacity
    best = search_pipeline(two_nodes, memory_limit=capacity, **options)
    single = search_pipeline(two_nodes, memory_limit=capacity, stages=(1,), **options)
    assert best.step_time <= single.step_time * (1 + 1e-9)
    assert best.lower_bound <= best.step_time
    assert sum(best.best.parts.values()) == pytest.approx(best.step_time)
    two = search_pipeline(two_nodes, memory_limit=capacity, stages=(2,), microbatches=(8,), **options)
    assert len(two.stages) == 2
    assert two.best.plan.num_microbatches == 8
    assert [stage.in_flight for stage in two.stages] == [2, 1]
    assert sum(stage.num_operators for stage in two.stages) == len(at(8).operators)
    assert max(stage.memory["total"] for stage in two.stages) == pytest.approx(two.best.memory["total"], rel=0.02)
    assert two.best.memory["total"] <= capacity
    with pytest.raises(InputError, match="stages=3"):
        search_pipeline(two_nodes, memory_limit=capacity, stages=(3,), **options)
    with pytest.raises(InputError, match="microbatches=7"):
        search_pipeline(two_nodes, memory_limit=capacity, microbatches=(7,), **options)
    with pytest.raises(InputError, match="no plan fits"):
        search_pipeline(two_nodes, memory_limit=1e7, **options)


def pipeline_within(limit: float, **given: Any) -> PipelineSearch:
    def at(batch: int) -> Graph:
        return load_network("gpt2", batch=batch, seq_len=128, layers=4, vocabulary=1024)

    two_nodes = estimator(at, 8, global_batch=64)
    return search_pipeline(two_nodes, cluster="pase-1080ti", zero=1, memory_limit=limit, stages=(2,), microbatches=(8,), **given)


@pytest.mark.slow
def test_a_pipeline_is_the_same_under_a_slow_clock(monkeypatch):
    """The limit binds: stages are searched under it, as far as their work goes."""
    free = pipeline_within(1e12)
    limit = 0.8 * free.best.memory["total"]
    before = pipeline_within(limit)
    assert (before.price > 0, before.cut_off) == (True, "")
    seconds = itertools.count(step=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: next(seconds))
    after = pipeline_within(limit)
    assert replace(after, search_time=0.0) == replace(before, search_time=0.0)


@pytest.mark.slow
def test_what_ends_a_pipeline_search_is_reported(monkeypatch):
    free = pipeline_within(1e12)
    limit = 0.8 * free.best.memory["total"]
    best = pipeline_within(limit)
    monkeypatch.setattr("perfmodel.planner.per_operator.pipeline._COARSE_EFFORT", (0.0, 1e3))
    monkeypatch.setattr("perfmodel.planner.per_operator.pipeline._FINE_EFFORT", (0.0, 1e3))
    cut_short = pipeline_within(limit)
    assert cut_short.cut_off == "work limit"
    assert cut_short.lower_bound <= best.step_time <= cut_short.step_time
    assert cut_short.gap > 0
    late = pipeline_within(1e12, budget=Budget(time_limit=1e-6))
    assert late.cut_off == "time limit"
    assert late.lower_bound <= late.step_time


def test_one_stage_of_a_pipeline_is_a_plan_without_one():
    def at(batch: int) -> Graph:
        return load_network("gpt2", batch=batch, seq_len=128, layers=2, vocabulary=1024)

    one_node = estimator(at, 8, global_batch=16)
    options = {"memory_limit": machine("pase-1080ti", 8).memory.capacity, "stages": (1,), "microbatches": (1,)}
    search = search_pipeline(one_node, cluster="pase-1080ti", zero=0, **options)
    assert search.best.plan.cuts.stages == ()
    assert search.step_time == one_node.predict(search.best.plan).step_time


def test_a_toy_kind_of_operator_is_one_function():
    """A new kind of operator describes itself (ARCHITECTURE.md): space, tables, search and prediction need nothing else."""

    def cumulative_sum(name: str, x: str, output: str, sizes: dict[str, int]) -> Operator:
        """y[b, d] = sum of x[b, 0..d]: cutting d needs the sums of the chips before."""
        elements = tuple((size, dim) for dim, size in sizes.items())
        rows = tuple((size, dim) for dim, size in sizes.items() if dim != "d")
        work = (Stream(kernel="default", elements=elements, accesses=passes(elements, elements)),)
        from perfmodel.foundation.collectives import CollectiveKind

        return Operator(
            name=name,
            kind="cumulative_sum",
            dims=sizes,
            inputs=(Operand(tensor=x, dims=tuple(sizes)),),
            output=Operand(tensor=output, dims=tuple(sizes)),
            forward=work,
            backward=work,
            traffic=tuple(OwnTraffic(kind=CollectiveKind.ALL_GATHER, over=("d",), extent=rows, phase=phase) for phase in Pass),
        )

    sizes = {"b": 8, "d": 64}
    tensors = {name: Tensor(name=name, shape=(8, 64)) for name in ("x", "h", "y")}
    first = elementwise("first", "relu", (Operand(tensor="x", dims=("b", "d")),), Operand(tensor="h", dims=("b", "d")), sizes)
    network = Graph(name="toy", operators=(first, cumulative_sum("sum", "h", "y", sizes)), tensors=tensors, batch=8)
    searcher = planner(network, 8)
    free = searcher.search()
    cut = searcher.search(fixed_parts({"sum": {"d": 8}}))
    assert free.best.parts["redistributions"] == 0.0
    assert cut.best.parts["redistributions"] > 0.0


def test_a_chain_with_an_unread_parameter_is_predicted_as_it_was_searched():
    chain = perceptron()
    unread = Tensor(name="unread", shape=(64, 64), role=TensorRole.PARAMETER)
    network = replace(chain, operators=chain.operators[:-1], tensors=chain.tensors | {"unread": unread})
    assert not network.shared()
    result = planner(network, 4).search()
    assert result.lower_bound <= result.best.step_time
    assert [parameter.name for parameter in derive_assigned(network, result.best.plan.cuts).parameters] == ["w1", "w2"]
