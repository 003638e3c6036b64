"""Imported modules that are decoders, whatever their submodules are called; and what is none, by its first operator that says so."""

import json
from random import Random

import pytest
from torch import nn

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.workload.imported.decoder import decoder_of, read_graph
from perfmodel.workload.imported.graph import graph_to_dict
from perfmodel.workload.models import load_model, read_config
from tests.workload.imported.decoders import (
    Forward,
    Latent,
    Layer,
    Linear,
    Mixer,
    Mixture,
    Net,
    by_one_hot,
    by_taken_weights,
    imported,
    in_groups,
    softmax_first,
)
from tests.workload.imported.hugging_face import RmsNorm

#: Fields that distinguish two models, except their names and sources.
WIDTHS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "gated_mlp", "activation", "norm", "qkv_bias", "mlp_bias", "tie_word_embeddings", "parallel_block", "qk_norm", "position",
)  # fmt: skip


def llama(layers=3, h=64, n=8, g=2, d=16, f=96, form="gated", fused=False, **how):
    layer_options = {name: how.pop(name) for name in ("parallel", "norms") if name in how}
    mixed = {name: how.pop(name) for name in ("normed", "bias") if name in how}
    layer_options |= {name: how[name] for name in ("norm",) if name in how}
    return lambda: Net(
        [Layer(h, Mixer(h, n, g, d, fused=fused, **mixed), Forward(h, f, form=form), **layer_options) for _ in range(layers)], h=h, **how
    )


def gpt2():
    """GPT-2 as its authors have it: fused queries, keys and values, biases, layer norms, a table of positions, tied embeddings."""
    layers = [
        Layer(768, Mixer(768, 12, 12, 64, fused=True, bias=True), Forward(768, 3072, form="plain", bias=True), norm=nn.LayerNorm)
        for _ in range(12)
    ]
    return Net(layers, h=768, vocab=50257, positions=1024, tied=True, norm=nn.LayerNorm)


@pytest.fixture(scope="module")
def llama_8b():
    return imported(llama(32, 4096, 32, 8, 128, 14336, vocab=128256))


@pytest.mark.parametrize("known", ["gpt2", "llama-3-8b"])
@pytest.mark.slow
def test_a_known_model_comes_out_as_itself(known, llama_8b):
    decoder, model = decoder_of(imported(gpt2) if known == "gpt2" else llama_8b), load_model(known)
    assert decoder.num_parameters == model.num_parameters
    differing = {name for name in WIDTHS if decoder.values[name] != model.values[name]}
    assert differing <= ({"activation"} if known == "gpt2" else set())  # gpt2's gelu is its tanh form


@pytest.fixture(scope="module")
def plain():
    return decoder_of(imported(llama()))


@pytest.mark.parametrize(
    ("how", "field", "value"),
    [
        (dict(fused=True), "num_key_value_heads", 2),
        (dict(form="fused"), "gated_mlp", True),
        (dict(form="plain"), "gated_mlp", False),
        (dict(parallel=True), "parallel_block", True),
        (dict(parallel=True, norms="one"), "shared_norm", True),
        (dict(norms="both"), "sandwich_norm", True),
        (dict(norms="both", norm=RmsNorm), "sandwich_norm", True),
        (dict(norms="after"), "pre_norm", False),
        (dict(norms="after", norm=RmsNorm), "pre_norm", False),
        (dict(normed=True), "qk_norm", True),
        (dict(tied=True), "tie_word_embeddings", True),
        (dict(positions=128), "position", "learned"),
        (dict(bias=True), "qkv_bias", True),
    ],
)
def test_forms_of_layers_are_recognised(how, field, value, plain):
    graph = imported(llama(**how))
    changed = decoder_of(graph)
    assert changed.values[field] == value
    assert (changed.num_hidden_layers, changed.hidden_size, changed.num_attention_heads, changed.head_dim) == (3, 64, 8, 16)
    assert (changed.intermediate_size, changed.vocab_size) == (96, 500)
    if field not in ("num_key_value_heads", "gated_mlp") or not value:
        assert plain.values[field] != value
    assert changed.num_parameters == (graph.num_parameters if "bias" not in how else pytest.approx(graph.num_parameters, rel=2e-3))


@pytest.mark.slow
def test_it_is_served_as_the_model_that_it_is(tmp_path, llama_8b):
    graph = llama_8b
    words = dict(cluster="dgx-h100", chips=2, tp=2, input_len=1024, output_len=256, concurrency=16)
    known = perfmodel.serve(model="llama-3-8b", **words)
    saved = tmp_path / "graph.json"
    saved.write_text(json.dumps(graph_to_dict(graph), indent=1))
    for model in (graph, str(saved)):
        served = perfmodel.serve(model=model, **words)
        assert (served.ttft, served.tpot, served.max_sequences, served.memory) == (
            known.ttft,
            known.tpot,
            known.max_sequences,
            known.memory,
        )
        assert any("taken to be causal" in note for note in served.notes)
    assert read_graph(json.loads(saved.read_text()), where="graph.json") == graph


class Cross(Net):
    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer.mixer(x, other=self.table(tokens) * 2)
        return self.head(x)


def layers_of(*widths, mixer=Mixer):
    return [Layer(64, mixer(64, 8, 8, 8), Forward(64, f)) for f in widths]


@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: nn.Linear(8, 8), "float32[2,8]", "has no attention"),
        (lambda: nn.LSTM(8, 8), "float32[2,4,8]", "is no operator of a decoder .recurrent"),
        (lambda: Net(layers_of(96, mixer=Linear)), "int64[2,32]", "product of two activations; attention is scaled_dot_product"),
        (lambda: Net(layers_of(96, 128)), "int64[2,32]", "unlike the first .width 128, not 96"),
        (lambda: Net(layers_of(96), head=False), "int64[2,32]", "a feed-forward has|neither gated nor plain"),
        (lambda: Cross(layers_of(96)), "int64[2,32]", "keys of another tensor than its queries"),
        (lambda: nn.Sequential(Net(layers_of(96)), nn.Linear(500, 7)), "int64[2,32]", "a feed-forward has two or three"),
    ],
    ids=[
        "no attention",
        "recurrent",
        "no softmax",
        "unlike layers",
        "no head",
        "cross-attention",
        "products after the head",
    ],
)
def test_what_is_no_decoder_is_refused_by_its_first_operator(make, inputs, message):
    with pytest.raises(InputError, match=message) as raised:
        decoder_of(imported(make, inputs))
    assert len(str(raised.value).splitlines()) == 1


def mixture(run):
    """Latents, a dense layer and one with experts."""
    feeds = (Forward(64, 96), Mixture(64, 32, 8, 2, run, route=in_groups if run is by_taken_weights else softmax_first, shared=32))
    return lambda: Net([Layer(64, Latent(64, 4, 24, 16, 8, 4, 8), feed) for feed in feeds])


@pytest.mark.parametrize(
    ("make", "trials"),
    [(llama(layers=2), 80), (mixture(by_one_hot), 25), (mixture(by_taken_weights), 40)],
    ids=["dense", "experts in a loop", "experts taken by choices"],
)
@pytest.mark.slow
def test_a_file_that_was_changed_is_a_decoder_or_one_sentence(make, trials):
    """Any value of it replaced by any other, one or two at a time."""
    original, random = graph_to_dict(imported(make)), Random(7)
    others = (None, 0, -1, 7, 1e30, "x", "", [], {}, [[]], True, "attention", "matmul", "embedding")
    refused = []
    for _ in range(trials):
        data = json.loads(json.dumps(original))
        for _ in range(random.randint(1, 2)):
            node = data
            while True:
                key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
                if not isinstance(node[key], (dict, list)) or not node[key] or random.random() < 0.1:
                    break
                node = node[key]
            node[key] = random.choice(others)
        try:
            read_config(data)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > trials // 3
    assert {len(message.splitlines()) for message in refused} == {1}


def test_a_file_of_version_1_whose_edges_were_apart_is_read():
    graph = imported(llama(layers=1))
    data = json.loads(json.dumps(graph_to_dict(graph)))
    edges = []
    for consumer, vertex in enumerate(data["vertices"]):
        for number, operand in enumerate(vertex["inputs"]):
            if producer := operand.pop("producer"):
                links, operand["links"] = operand["links"], []
                edges.append({"producer": producer[0], "output": producer[1], "consumer": consumer, "input": number, "links": links})
    data |= {"schema_version": 1, "edges": edges}
    assert read_graph(data, where="graph.json") == graph
    data["edges"][0]["consumer"] = len(data["vertices"])
    with pytest.raises(InputError, match=r"graph.json: edges: must lead to inputs of vertices; import the module again"):
        read_graph(data, where="graph.json")


def test_a_module_by_its_name_and_a_broken_file_are_refused_with_what_to_do(tmp_path):
    words = dict(cluster="dgx-h100", chips=1, input_len=64, output_len=64, concurrency=1)
    with pytest.raises(InputError, match=r"perfmodel import 'mynets:make_net' .* --save graph.json"):
        perfmodel.serve(model="mynets:make_net", **words)
    data = graph_to_dict(imported(llama()))
    for broken, message in (
        ({**data, "schema_version": 9}, "import the module again"),
        ({**data, "vertices": [{}]}, "required field is missing"),
    ):
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError, match=message):
            perfmodel.serve(model=str(path), **words)
