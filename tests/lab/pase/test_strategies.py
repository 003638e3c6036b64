"""PaSE's layers find their operators, and strategies cut what they say."""

import numpy as np
import pytest

from lab.pase.strategies import expert_strategy, last_axes, pase_parts, pase_strategies, with_one_hot_embeddings
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.mesh import mesh_axes
from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.search import run_pase
from perfmodel.planner.per_operator.space import network_space
from perfmodel.workload.networks import load_network
from perfmodel.workload.work import Product

TIERS = (8, 64)


def allowed(network, strategy, axes):
    """Operator -> the parts of each dim of every configuration that a strategy leaves."""
    space = network_space(network, axes)
    parts = {}
    for operator, rows in zip(network.operators, space.operators, strict=True):
        parts[operator.name] = [dict(zip(rows.dims, map(int, row), strict=True)) for row in rows.parts[strategy.allowed(operator, rows)]]
    return parts


@pytest.fixture(scope="module")
def runs():
    return {name: run_pase(load_pase_graph(name), 32) for name in ("alexnet", "inception3", "rnnlm", "transformer")}


class TestPaseParts:
    @pytest.mark.parametrize("name", ["alexnet", "inception3", "rnnlm", "transformer"])
    def test_every_layer_with_a_product_is_spoken_of(self, runs, name):
        network = load_network(name)
        parts = pase_parts(network, runs[name])
        for operator in network.operators:
            if any(isinstance(work, Product) for work in operator.forward) or operator.kind == "embedding":
                assert operator.name in parts
            for dim, count in parts.get(operator.name, {}).items():
                assert dim in operator.dims
                assert count <= 32

    def test_alexnet_is_table_2(self, runs):
        parts = pase_parts(load_network("alexnet"), runs["alexnet"])
        assert parts["conv1"] == {"b": 32, "h": 1, "w": 1, "n": 1, "c": 1}
        assert parts["conv5"] == {"b": 16, "h": 1, "w": 1, "n": 1, "c": 2}
        assert [parts[name] for name in ("fc6", "fc7", "fc8")] == [
            {"b": 1, "n": 4, "c": 8},
            {"b": 1, "n": 8, "c": 4},
            {"b": 1, "n": 4, "c": 8},
        ]
        assert parts["loss"] == {"b": 1, "n": 4}

    def test_an_lstm_that_cuts_its_contraction_cuts_hidden_units(self, runs):
        parts = pase_parts(load_network("rnnlm"), runs["rnnlm"])
        assert parts["lstm0.input"] == {"b": 4, "e": 2, "d": 2}
        assert parts["lstm0"] == parts["lstm1"] == {"b": 4, "e": 4}

    def test_keys_are_cut_by_their_own_sequence(self, runs):
        parts = pase_parts(load_network("transformer"), runs["transformer"])
        assert set(parts["encoder.0.attention.k_proj"]) == {"b", "h", "t", "d"}
        assert sum(name.endswith("q_proj") for name in parts) == 18

    def test_another_networks_strategy_is_refused(self, runs):
        with pytest.raises(InputError, match="graph=alexnet: the strategy is not for rnnlm"):
            pase_parts(load_network("rnnlm"), runs["alexnet"])


class TestStrategies:
    def test_layers_apart_leave_an_axis_alone(self, runs):
        network, axes = load_network("rnnlm"), mesh_axes(32, TIERS)
        strategies = pase_strategies(network, runs["rnnlm"], axes)
        assert [strategy.unused for strategy in strategies] == list(last_axes(axes))
        names = [axis.name for axis in axes]
        space = network_space(network, axes)
        for strategy in strategies:
            assert strategy.apart == 2
            for operator, rows in zip(network.operators, space.operators, strict=True):
                masks = rows.masks[strategy.allowed(operator, rows)]
                assert len(masks)
                if operator.layer.startswith("lstm"):
                    assert not (masks >> names.index(strategy.unused) & 1).any()

    @pytest.mark.parametrize(("devices", "batch", "model"), [(4, 2, 2), (8, 2, 4), (16, 4, 4), (64, 8, 8)])
    def test_experts_transformer_is_as_square_as_can_be(self, devices, batch, model):
        network, axes = load_network("transformer", layers=1), mesh_axes(devices, TIERS)
        parts = allowed(network, expert_strategy(network, axes), axes)
        assert {row["b"] for row in parts["encoder.0.mlp.up_proj"]} == {batch}
        assert {row["e"] for row in parts["encoder.0.mlp.up_proj"]} == {model}
        assert {row["v"] for row in parts["projection"]} == {model}
        assert {row["d"] for row in parts["encoder.0.mlp.norm"]} == {1}

    def test_experts_rnnlm_is_pairs_of_devices(self):
        network, axes = load_network("rnnlm"), mesh_axes(16, TIERS)
        strategy = expert_strategy(network, axes)
        parts = allowed(network, strategy, axes)
        assert strategy.apart == 2
        assert {(row["b"], row["e"]) for row in parts["lstm0"]} == {(8, 1)}
        assert {(row["b"], row["v"]) for row in parts["projection"]} == {(8, 2)}
        assert len(parts["projection"]) == 1

    def test_experts_alexnet_cuts_features_after_the_images(self):
        network, axes = load_network("alexnet"), mesh_axes(8, TIERS)
        parts = allowed(network, expert_strategy(network, axes), axes)
        assert {row["b"] for row in parts["conv3"]} == {8}
        for name in ("fc6", "fc7_bias", "relu7", "fc8", "loss"):
            assert {(row["b"], row["n"]) for row in parts[name]} == {(1, 8)}

    def test_lookups_become_products(self):
        network = with_one_hot_embeddings(load_network("rnnlm", vocabulary=1000))
        (table,) = [operator for operator in network.operators if operator.kind == "embedding"]
        assert table.flops == 2 * 64 * 256 * 1000 * 2048
        assert isinstance(table.backward[0], Product)
        assert np.prod([size for size, _ in table.backward[0].k]) == 64 * 256
