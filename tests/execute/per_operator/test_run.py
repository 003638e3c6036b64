"""Network plans compute what one process does and issue what their traffic says."""

import json
from collections import Counter

import pytest

from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan, measure_network_plans
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError, RunError
from perfmodel.parallel.algebra.sharding import Held
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.per_operator.parameters import step_traffic
from perfmodel.parallel.plan import plan_to_dict
from tests.execute.per_operator import toys as toys
from tests.execute.per_operator.plans import FOUR, TINY, TWO, random_plan, tiny_network
from tests.marks import mostly_nightly
from tests.network_plans import changed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = [name for name in TINY if name != "inception3"]


@pytest.mark.parametrize("name", TINY)
def test_random_plans_equal_one_process(name, groups):
    check_random_plan(name, random_plan(tiny_network(name), TWO, 0), groups)


#: In `make test` those of which `test_many_random_plans` draws none, one of each kind of operators.
@pytest.mark.parametrize("name", mostly_nightly(TINY, ["alexnet", "rnnlm", "transformer", "vit-large", "densenet121"]))
def test_random_plans_on_four_processes_equal_one(name, groups):
    check_random_plan(name, random_plan(tiny_network(name), FOUR, 1), groups)


def check_random_plan(name, plan, groups):
    network = tiny_network(name)
    result = check_network_plan(network, plan, NetworkOptions(compares_outputs=True), group=groups(plan.num_chips))
    assert result.gradient_error < 1e-9
    assert result.output_error < 1e-9
    assert result.traffic


@pytest.mark.slow
def test_processes_are_started_and_ended_for_a_run_of_its_own():
    network = toys.two_layers()
    result = check_network_plan(network, toys.plan_of(network, TWO, {"up": {"n": ("p",)}}), device="cpu")
    assert result.gradient_error < 1e-9
    axes = tuple(MeshAxis(name=f"x{i}", size=2, tier=0) for i in range(6))
    with pytest.raises(InputError, match="chips=64: this machine runs up to"):
        check_network_plan(network, toys.plan_of(network, axes, {}), device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", mostly_nightly(QUICK, ["resnet50", "dlrm"]))
def test_many_random_plans(name, groups):
    network = tiny_network(name)
    for seed in range(100, 103):
        check_network_plan(network, random_plan(network, FOUR, seed), NetworkOptions(compares_outputs=True), group=groups(4))


def test_two_layers_by_hand(groups):
    """Megatron's pair: columns, then rows; nothing forward before the second product, and its sum is reduced once."""
    network = toys.two_layers(classes=8)
    shardings = {"up": {"n": ("p",)}, "act": {"n": ("p",)}, "down": {"n": ("p",)}}
    plan = toys.plan_of(network, TWO, shardings)
    result = check_network_plan(network, plan, group=groups(2))
    rows = [(str(row.kind), row.tensor, str(row.phase), row.num_elements, row.repeats) for row in result.traffic]
    assert rows == [("all_reduce", "down.out", "forward", 4 * 8.0, 1)]


def test_two_biases_of_one_sum_have_gradients_of_their_own(groups):
    """A sample a rank and an image of one point: torch hands both the same tensor, which must not be reduced twice."""
    network = tiny_network("resnet50")
    shardings = {operator.name: {"b": ("a", "b")} for operator in network.operators}
    held = {
        tensor: Held(cuts=(("a", "b"), *((),) * (len(network.tensors[tensor].shape) - 1)))
        for tensor, reading in network.readers().items()
        if len(reading) > 1 and tensor in network.producers()
    }
    check_network_plan(network, toys.plan_of(network, FOUR, shardings, held), group=groups(4))


def test_training_goes_on_as_in_one_process(groups):
    network = tiny_network("transformer")
    plan = random_plan(network, FOUR, 3)
    result = check_network_plan(network, plan, NetworkOptions(steps=4, learning_rate=0.5), group=groups(4))
    assert result.loss_error < 1e-9


def test_single_precision_is_near(groups):
    network = tiny_network("llama-3-8b")
    result = check_network_plan(network, random_plan(network, TWO, 5), NetworkOptions(dtype="float32"), group=groups(2))
    assert 0 < result.gradient_error < 1e-4


@pytest.mark.parametrize("axes, cut", [(TWO, ("p",)), (FOUR, ("a", "b"))])
def test_an_uneven_vocabulary_is_padded(axes, cut, groups):
    """10 classes over 4 ranks are 3, 3, 3 and 1."""
    network = toys.two_layers(classes=10)
    plan = toys.plan_of(network, axes, {"down": {"v": cut}, "loss": {"v": cut}})
    assert "loss" in plan.cuts.shardings
    result = check_network_plan(network, plan, NetworkOptions(steps=2), group=groups(plan.num_chips))
    assert Counter(str(row.kind) for row in result.traffic for _ in range(row.repeats)) == {"all_reduce": 4}  # of act.out, and three


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [3, 5])
def test_a_cut_image_trades_its_border(window, stride, groups):
    """Rows of h on a, columns of w on b, in every operator that has them."""
    network = toys.two_convolutions(image=16, window=window, stride=stride)
    shardings = {
        operator.name: {
            dim: (axis,) for dim, axis in (("h", "a"), ("w", "b")) if dim in operator.dims and dim not in operator.roles.unsplit
        }
        for operator in network.operators
    }
    assert all(shardings[name] == {"h": ("a",), "w": ("b",)} for name in ("conv1", "conv2", "pool"))
    result = check_network_plan(network, toys.plan_of(network, FOUR, shardings), NetworkOptions(compares_outputs=True), group=groups(4))
    halos = [row for row in result.traffic if row.kind is CollectiveKind.SEND_RECV]
    assert {(row.operator, *row.axes) for row in halos} == {(name, axis) for name in ("conv1", "conv2", "pool") for axis in "ab"}


def test_one_dim_of_an_image_over_four_ranks_sends_what_is_declared(groups):
    """Without corners what torch sends is counted to the last element: inner ranks both ways, outer ones one way."""
    network = toys.two_convolutions(image=16)
    shardings = {name: {"h": ("a", "b")} for name in ("conv1", "relu1", "conv2", "pool")}
    result = check_network_plan(network, toys.plan_of(network, FOUR, shardings), group=groups(4))
    halos = {(row.operator, str(row.phase)): row.num_elements for row in result.traffic if row.kind is CollectiveKind.SEND_RECV}
    # 2 rows of 16 columns, 4 channels and 2 samples; the data has no gradient to send back
    assert halos["conv1", "forward"] == 2 * 16 * 4 * 2
    assert halos["conv2", "backward"] == 2 * 16 * 4 * 2


# ------------------------------------------------------------------------------------------------------------- new kinds


CUT_ROWS = {"centre": {"n": ("p",)}}


def test_a_new_kind_is_one_function(groups):
    network = toys.centring()
    with pytest.raises(InputError, match=r"operator centre: kind 'centre' has no torch function; add one to the table or pass it"):
        check_network_plan(network, toys.plan_of(network, TWO, CUT_ROWS), group=groups(2))
    result = check_network_plan(
        network, toys.plan_of(network, TWO, CUT_ROWS), NetworkOptions(functions={"centre": toys.centre}), group=groups(2)
    )
    of_kind = [(str(row.kind), str(row.phase), row.num_elements) for row in result.traffic if row.what == "own"]
    assert of_kind == [("all_reduce", "forward", 4.0), ("all_reduce", "backward", 4.0)]


@pytest.mark.parametrize(
    "function, says",
    [
        (toys.centre_by_share, "the loss of step 0 differs from one process"),
        (toys.centre_without_gradient, "the gradient of up.weight differs from one process"),
    ],
)
def test_a_wrong_function_is_found(function, says, groups):
    network = toys.centring()
    with pytest.raises(RunError, match=says):
        check_network_plan(network, toys.plan_of(network, TWO, CUT_ROWS), NetworkOptions(functions={"centre": function}), group=groups(2))


@pytest.mark.parametrize(
    "function, says",
    [
        (toys.gelu_with_a_reduction_too_many, r"too many 1 all_reduce over p of 3 elements \(own act.out at act, forward\)"),
        (toys.gelu_with_a_hidden_reduction, r"all_reduce over p: on rank 0 torch issued 2 of 280 bytes, noted were 1 of 256"),
    ],
)
def test_a_collective_too_many_is_named(function, says, groups):
    network = toys.two_layers(classes=8)
    plan = toys.plan_of(network, TWO, {"up": {"n": ("p",)}, "act": {"n": ("p",)}, "down": {"n": ("p",)}})
    with pytest.raises(RunError, match=says):
        check_network_plan(network, plan, NetworkOptions(functions={"elementwise": function}), group=groups(2))


def test_wrong_traffic_is_found(groups, monkeypatch):
    """Collectives that the plan's traffic lacks, or that are not issued, end the check."""
    from perfmodel.execute.per_operator import run as network_run

    network = tiny_network("rnnlm")
    plan = random_plan(network, TWO, 0)

    def without_one(network, plan, stage):
        return step_traffic(network, plan, stage)[1:]

    monkeypatch.setattr(network_run, "step_traffic", without_one)
    with pytest.raises(RunError, match="issued other collectives than the plan's traffic: missing none; too many 1"):
        check_network_plan(network, plan, group=groups(2))


# ------------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_run_is_refused(groups):
    network = toys.two_layers()
    plan = toys.plan_of(network, TWO, {"up": {"b": ("p",)}})
    with pytest.raises(InputError, match="chips=2: the worker group has 4 ranks"):
        check_network_plan(network, plan, group=groups(4))
    with pytest.raises(InputError, match="dtype=bfloat16: is not one that a run is compared in"):
        check_network_plan(network, plan, NetworkOptions(dtype="bfloat16"), group=groups(2))
    with pytest.raises(InputError, match="steps=0"):
        check_network_plan(network, plan, NetworkOptions(steps=0), group=groups(2))
    with pytest.raises(InputError, match="steps=0, warmup=1: steps must be at least 1"):
        measure_network_plans(network, [plan], steps=0, group=groups(2))
    with pytest.raises(InputError, match="must be at least one"):
        measure_network_plans(network, [], group=groups(2))
    with pytest.raises(InputError, match=r"are for \[2, 4\] chips"):
        measure_network_plans(network, [plan, toys.plan_of(network, FOUR, {})], group=groups(2))
    uneven = toys.plan_of(network, TWO, {"up": {"b": ("q",)}})
    with pytest.raises(InputError, match="is not an axis of the mesh"):
        check_network_plan(network, uneven, group=groups(2))


def test_readers_of_one_parameter_need_it_in_one_layout(groups):
    network = tiny_network("gpt2")
    name = next(p.name for p in network.parameters if len(network.readers()[p.name]) > 1)
    (first, position), *_ = network.readers()[name]
    operator = network.operators[first]
    plan = random_plan(network, TWO, 0, use=0.0)
    dim = operator.inputs[position].dims[0]
    plan = changed(plan, shardings={**plan.cuts.shardings, operator.name: {dim: ("p",)}})
    with pytest.raises(InputError, match=f"parameter {name}: .* need it in 2 layouts; cut .* alike"):
        check_network_plan(network, plan, group=groups(2))


# --------------------------------------------------------------------------------------------------------------- timing


def test_plans_measured_together(groups):
    network = toys.two_layers(batch=8, features=16, hidden=16, classes=8)
    data = toys.plan_of(network, TWO, {operator.name: {"b": ("p",)} for operator in network.operators})
    pair = toys.plan_of(network, TWO, {"up": {"n": ("p",)}, "act": {"n": ("p",)}, "down": {"n": ("p",)}})
    measurements = measure_network_plans(network, [data, pair], steps=5, rounds=2, warmup=1, group=groups(2))
    assert [result.plan for result in measurements] == [data, pair]
    for measurement in measurements:
        assert len(measurement.step_times) == 5
        assert min(measurement.step_times) <= measurement.step_time <= max(measurement.step_times)
        assert 0 < measurement.gradient_error < 1e-4
        assert measurement.parts["communication.p"] > 0
        assert len(measurement.memory_by_rank) == 2
    assert measurements[0].loss == pytest.approx(measurements[1].loss, rel=1e-5)
    assert {row.what for row in measurements[0].traffic} == {"gradient"}
    record = json.loads(json.dumps(measurements[1].to_dict()))
    assert record["plan"] == json.loads(json.dumps(plan_to_dict(pair)))
    assert [(row["kind"], row["tensor"], row["count"]) for row in record["traffic"]] == [("all_reduce", "down.out", 1)]
    # half of the weights and of their gradients
    assert measurements[1].peak_memory < measurements[0].peak_memory
    (once,) = measure_network_plans(network, [data], steps=1, group=groups(2))
    assert len(once.step_times) == 1


def test_a_tensor_held_whole_is_reduced_once(groups):
    """Two readers cut by the same axis: their gradients are added, then reduced in one collective."""
    network = tiny_network("llama-3-8b")
    producers = network.producers()
    tensor = next(t for t, reading in network.readers().items() if t in producers and len(reading) == 3)
    plan = random_plan(network, TWO, 0, use=0.0)
    readers = [network.operators[index] for index, _ in network.readers()[tensor]]
    shardings = dict(plan.cuts.shardings)
    for reader in readers:
        outside = next(dim for dim in reader.output.dims if dim and dim not in reader.inputs[0].dims)
        shardings[reader.name] = {outside: ("p",)}
    held = {**plan.cuts.held, tensor: Held(cuts=((), (), ()), partial=frozenset("p"))}
    result = check_network_plan(network, changed(plan, shardings=shardings, held=held), group=groups(2))
    assert [(row.kind, row.phase) for row in result.traffic if row.tensor == tensor] == [("all_reduce", "backward")]


# ------------------------------------------------------------------------------------- last: each of these ends its group


def test_a_share_smaller_than_its_halo_is_refused(groups):
    network = toys.two_convolutions(image=8, window=5)
    plan = toys.plan_of(network, FOUR, {"pool": {}, "conv1": {"h": ("a", "b")}})
    check_network_plan(network, plan, group=groups(4))  # two rows a share, a halo of two
    network = toys.two_convolutions(image=8, window=7)
    plan = toys.plan_of(network, FOUR, {"conv1": {"h": ("a", "b")}})
    with pytest.raises(RunError, match=r"operator conv1: a share of dim h has 2 rows, a window reaches 3 into the next; use fewer parts"):
        check_network_plan(network, plan, group=groups(4))


def test_a_rank_that_fails_is_named(groups):
    network = toys.two_layers(classes=8)
    plan = toys.plan_of(network, TWO, {"act": {"n": ("p",)}})
    with pytest.raises(RunError, match=r"rank 1 of 2 failed: RuntimeError: operator act \(elementwise\): no room for the toy"):
        check_network_plan(network, plan, NetworkOptions(functions={"elementwise": toys.gelu_that_fails_on_rank_one}), group=groups(2))
