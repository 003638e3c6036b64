"""The network of a decoder is the graph that uniform plans are predicted with, layer by layer."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.workload.models import load_model
from perfmodel.workload.networks.language_model import transformer_network
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.unroll import unrolled
from perfmodel.workload.work import FusedAttention, Product, extents_of
from tests.laws.test_regions import stacked

BATCH, SEQ_LEN, LAYERS = 3, 64, 4


def count(extent, samples=()):
    return prod(size * (BATCH if dim in samples else 1) for size, dim in extent)


def facts(operator, samples=()):
    """All that prices an operator, for BATCH sequences: sizes of works, of what is kept and held, of collectives."""

    def data(items):
        return tuple((count(access.extent, samples), access.itemsize, access.of, access.is_gradient) for access in items)

    def work(operation):
        sizes = tuple(count(extent, samples) for extent in extents_of(operation))
        if isinstance(operation, Product):
            return "product", sizes, operation.repeats
        if isinstance(operation, FusedAttention):
            return "attention", sizes, operation.head_dim, operation.mask
        return operation.kernel, sizes, data(operation.accesses), operation.repeats

    return (
        operator.kind,
        tuple(map(work, operator.forward)),
        tuple(map(work, operator.backward)),
        data(operator.saved),
        data(operator.scratch),
        tuple(
            (collective.kind, collective.phase, collective.repeats, collective.itemsize, count(collective.extent, samples))
            for collective in operator.traffic
        ),
        operator.group,
        tuple(operator.roles.logical.values()),
    )


def folded(config, attention, drops):
    return build_graph(
        config, seq_len=SEQ_LEN, attention=attention, dropout=drops, activation_bytes=0.0, parameter_bytes=0.0, weight_form_kv=False
    )


@pytest.mark.parametrize("attention, drops", [("flash", True), ("unfused", True), ("flash", False)])
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "falcon-7b", "gemma-2-9b", "qwen3-8b", "olmo-2-7b", "phi-2", "bloom-176b"])
def test_unrolled_is_the_layer_times_their_number_and_the_ends(name, attention, drops):
    config = replace(load_model(name), num_hidden_layers=LAYERS)
    graph = folded(config, attention, drops)
    network = transformer_network(config, batch=BATCH, seq_len=SEQ_LEN, fused_attention=attention == "flash", dropout=drops)
    expected = Counter()
    for operator in graph.operators:
        if operator.kind != "identity":
            expected[facts(operator, operator.roles.per_sample)] += graph.count(operator.layer)
    assert Counter(facts(operator) for operator in network.operators) == expected
    assert network.num_parameters == graph.num_parameters == config.num_parameters
    assert network.batch == BATCH
    assert not network.repeats
    assert network.tied == graph.tied
    assert network.loss == graph.loss
    # the shape of a tensor is that of the dims by which its operators know it
    for operator in network.operators:
        for operand in operator.operands:
            shape = network.tensors[operand.tensor].shape
            assert all(operator.dims[dim] == size for dim, size in zip(operand.dims, shape, strict=True))


def test_layers_read_one_another_and_share_what_is_tied():
    network = unrolled(folded(load_model("gpt2"), "flash", True), batch=2, layers=3)
    inputs = {operator.name: tuple(operand.tensor for operand in operator.inputs) for operator in network.operators}
    assert inputs["layer0.attention_norm"][0] == "embedding_dropout.out"
    assert inputs["layer2.attention_add"] == ("layer1.mlp_add.out", "layer2.attention_dropout.out")
    assert inputs["final_norm"][0] == "layer2.mlp_add.out"
    assert inputs["lm_head"] == ("final_norm.out", "embedding.weight")
    assert inputs["token_embedding"] == ("tokens", "embedding.weight")
    assert {operator.layer for operator in network.operators} == {"embedding", "layer0", "layer1", "layer2", "head"}
    assert network.tensors["layer1.q_proj.bias"].bias_of == "layer1.q_proj"
    assert network.tensors["tokens"].shape == (2, SEQ_LEN)
    assert network.tensors["positions"].shape == (SEQ_LEN,)


@pytest.mark.parametrize("counts", [(3, 3), (4, 2)])
def test_layers_of_two_kinds_take_turns(counts):
    """As the same layers written down one by one."""
    plain, gated = ((name, name, count) for name, count in zip(("plain", "gated"), counts, strict=True))
    turns = "pgpgpg" if counts == (3, 3) else "ppgppg"
    alone = [(f"{letter}{position}.", {"p": "plain", "g": "gated"}[letter], 1) for position, letter in enumerate(turns)]
    network, expected = (unrolled(graph, batch=2) for graph in (stacked([plain, gated], turn="both"), stacked(alone, turn="")))

    def linked(graph):
        return [(facts(operator), [graph.producers().get(operand.tensor) for operand in operator.inputs]) for operator in graph.operators]

    assert linked(network) == linked(expected)
    assert network.num_parameters == expected.num_parameters


@pytest.mark.parametrize("arguments, message", [({"batch": 0}, "batch=0: must be"), ({"batch": 1, "layers": 2000}, "more than 10,000")])
def test_what_cannot_be_written_out_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        unrolled(folded(load_model("gpt2"), "flash", True), **arguments)
