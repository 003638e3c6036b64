"""Imported modules that are decoders, whatever their submodules are called; and what is none, by its first operator that says so."""

import json
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional

import perfmodel
from perfmodel.execute.importer.import_graph import import_module
from perfmodel.foundation.errors import InputError
from perfmodel.workload.huggingface import read_config
from perfmodel.workload.imported.decoder import decoder_of, read_graph
from perfmodel.workload.imported.graph import graph_to_dict
from perfmodel.workload.imported.input_spec import parse_inputs
from perfmodel.workload.models import load_model

#: Fields that tell two models apart, beside their names and where their numbers are from.
WIDTHS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "gated_mlp", "activation", "norm", "qkv_bias", "mlp_bias", "tie_word_embeddings", "parallel_block", "qk_norm", "position",
)  # fmt: skip


class Mixer(nn.Module):
    """Attention of `n` heads over `g`: queries, keys and values by three products or, fused, by one."""

    def __init__(self, h, n, g, d, *, fused=False, bias=False, normed=False):
        super().__init__()
        self.sizes, self.d = (n * d, g * d, g * d), d
        self.made = nn.ModuleList([nn.Linear(h, sum(self.sizes), bias=bias)] if fused else [nn.Linear(h, s, bias=bias) for s in self.sizes])
        self.out = nn.Linear(n * d, h, bias=bias)
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)]) if normed else None

    def forward(self, x, other=None):
        made = self.made[0](x).split(self.sizes, dim=-1) if len(self.made) == 1 else [each(x) for each in self.made]
        if other is not None:
            made = (made[0], self.made[1](other), self.made[2](other))
        q, k, v = (each.unflatten(-1, (-1, self.d)).transpose(1, 2) for each in made)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        out = self.attend(q, *(each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v)))
        return self.out(out.transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Mixer):
    def attend(self, q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Forward(nn.Module):
    def __init__(self, h, f, *, form="gated", bias=False):
        super().__init__()
        self.form, self.width = form, f
        ups = {"gated": [f, f], "fused": [2 * f], "plain": [f]}[form]
        self.up = nn.ModuleList(nn.Linear(h, width, bias=bias) for width in ups)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x):
        if self.form == "plain":
            return self.down(functional.gelu(self.up[0](x)))
        gate, up = self.up[0](x).chunk(2, -1) if self.form == "fused" else [each(x) for each in self.up]
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, h, mixer, forward, *, norm=nn.RMSNorm, parallel=False):
        super().__init__()
        self.mixer, self.feed, self.parallel = mixer, forward, parallel
        self.norms = nn.ModuleList(norm(h) for _ in range(2))

    def forward(self, x):
        mixed = self.mixer(self.norms[0](x))
        if self.parallel:
            return x + mixed + self.feed(self.norms[1](x))
        x = x + mixed
        return x + self.feed(self.norms[1](x))


class Net(nn.Module):
    def __init__(self, layers, *, h=64, vocab=500, positions=0, tied=False, norm=nn.RMSNorm, head=True):
        super().__init__()
        self.table, self.layers = nn.Embedding(vocab, h), nn.ModuleList(layers)
        self.positions = nn.Embedding(positions, h) if positions else None
        self.last = norm(h)
        self.head = nn.Linear(h, vocab, bias=False) if head else None
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.last(x) if self.head is None else self.head(self.last(x))


def imported(make, inputs="int64[2,32]"):
    return import_module(make, parse_inputs([inputs]), name="net")


def llama(layers=3, h=64, n=8, g=2, d=16, f=96, form="gated", fused=False, **how):
    made = {name: how.pop(name) for name in ("parallel",) if name in how}
    mixed = {name: how.pop(name) for name in ("normed", "bias") if name in how}
    return lambda: Net(
        [Layer(h, Mixer(h, n, g, d, fused=fused, **mixed), Forward(h, f, form=form), **made) for _ in range(layers)], h=h, **how
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
def test_a_known_model_comes_out_as_itself(known, llama_8b):
    found, model = decoder_of(imported(gpt2) if known == "gpt2" else llama_8b), load_model(known)
    assert found.num_parameters == model.num_parameters
    differing = {name for name in WIDTHS if getattr(found, name) != getattr(model, name)}
    assert differing <= {"activation"}  # gpt2's gelu is its tanh form


@pytest.mark.parametrize(
    ("how", "field", "value"),
    [
        (dict(fused=True), "num_key_value_heads", 2),
        (dict(form="fused"), "gated_mlp", True),
        (dict(form="plain"), "gated_mlp", False),
        (dict(parallel=True), "parallel_block", True),
        (dict(normed=True), "qk_norm", True),
        (dict(tied=True), "tie_word_embeddings", True),
        (dict(positions=128), "position", "learned"),
        (dict(bias=True), "qkv_bias", True),
    ],
)
def test_its_forms_are_told_apart(how, field, value):
    graph = imported(llama(**how))
    plain, found = decoder_of(imported(llama())), decoder_of(graph)
    assert getattr(found, field) == value
    assert (found.num_hidden_layers, found.hidden_size, found.num_attention_heads, found.head_dim) == (3, 64, 8, 16)
    assert (found.intermediate_size, found.vocab_size) == (96, 500)
    if field not in ("num_key_value_heads", "gated_mlp") or not value:
        assert getattr(plain, field) != value
    assert found.num_parameters == pytest.approx(graph.num_parameters, rel=2e-3)


def test_it_is_served_as_the_model_that_it_is(tmp_path, llama_8b):
    graph = llama_8b
    words = dict(cluster="dgx-h100", chips=2, tp=2, input_len=1024, output_len=256, concurrency=16)
    known = perfmodel.serve(model="llama-3-8b", **words)
    saved = tmp_path / "graph.json"
    saved.write_text(json.dumps(graph_to_dict(graph), indent=1))
    for model in (graph, str(saved)):
        found = perfmodel.serve(model=model, **words)
        assert (found.ttft, found.tpot, found.max_sequences, found.memory) == (known.ttft, known.tpot, known.max_sequences, known.memory)
        assert any("taken to be causal" in note for note in found.notes)
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
    ("make", "inputs", "said"),
    [
        (lambda: nn.Linear(8, 8), "float32[2,8]", "has no attention"),
        (lambda: nn.LSTM(8, 8), "float32[2,4,8]", "is no operator of a decoder .recurrent"),
        (lambda: Net(layers_of(96, mixer=ByHand)), "int64[2,32]", "product of two activations; attention is recognised where"),
        (lambda: Net(layers_of(96, 128)), "int64[2,32]", "unlike the first .width 128, not 96"),
        (lambda: Net(layers_of(96), head=False), "int64[2,32]", "a feed-forward has|neither gated nor plain"),
        (lambda: Cross(layers_of(96)), "int64[2,32]", "keys of another tensor than its queries"),
        (lambda: nn.Sequential(Net(layers_of(96)), nn.Linear(500, 7)), "int64[2,32]", "a feed-forward has two or three"),
    ],
    ids=["no attention", "recurrent", "attention by hand", "unlike layers", "no head", "cross-attention", "products after the head"],
)
def test_what_is_no_decoder_is_refused_by_its_first_operator(make, inputs, said):
    with pytest.raises(InputError, match=said) as raised:
        decoder_of(imported(make, inputs))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_was_changed_is_a_decoder_or_one_sentence():
    """Any value of it replaced by any other, one or two at a time."""
    whole, random = graph_to_dict(imported(llama(layers=2))), Random(7)
    others = (None, 0, -1, 7, 1e30, "x", "", [], {}, [[]], True, "attention", "matmul", "embedding")
    refused = []
    for _ in range(200):
        data = json.loads(json.dumps(whole))
        for _ in range(random.randint(1, 2)):
            place = data
            while True:
                key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], (dict, list)) or not place[key] or random.random() < 0.1:
                    break
                place = place[key]
            place[key] = random.choice(others)
        try:
            read_config(data)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert {len(each.splitlines()) for each in refused} == {1}


def test_a_module_by_its_name_and_a_broken_file_are_refused_with_what_to_do(tmp_path):
    words = dict(cluster="dgx-h100", chips=1, input_len=64, output_len=64, concurrency=1)
    with pytest.raises(InputError, match=r"perfmodel import 'mynets:make_net' .* --save graph.json"):
        perfmodel.serve(model="mynets:make_net", **words)
    data = graph_to_dict(imported(llama()))
    for broken, said in (
        ({**data, "schema_version": 9}, "import the module again"),
        ({**data, "vertices": [{}]}, "required field is missing"),
    ):
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError, match=said):
            perfmodel.serve(model=str(path), **words)
