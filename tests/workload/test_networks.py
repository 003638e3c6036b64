"""Built-in networks against published counts, the graphs of PaSE, and torch modules of the same architecture."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import Held
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.per_operator.traffic import network_traffic
from perfmodel.planner.pase.graph import load_pase_graph
from perfmodel.planner.pase.layer import LayerKind
from perfmodel.workload.graph import TensorRole
from perfmodel.workload.models import list_models, load_model
from perfmodel.workload.networks import list_networks, load_network
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.networks.language_model import transformer_network
from perfmodel.workload.work import Pass
from tests.marks import mostly_nightly
from tests.network_plans import network_plan

TINY = {
    "alexnet": {"image": 67, "filters": (4, 8, 8, 8, 4), "hidden": 16, "classes": 8},
    "inception3": {"image": 75, "width_divisor": 16, "classes": 8},
    "resnet50": {"image": 32, "blocks": (1, 1), "width": 4, "classes": 8},
    "resnet101": {"image": 32, "blocks": (1, 2), "width": 4, "classes": 8},
    "densenet121": {"image": 32, "blocks": (2, 3), "growth": 4, "classes": 8},
    "rnnlm": {"seq_len": 6, "embedding": 8, "hidden": 12, "vocabulary": 20},
    "transformer": {"seq_len": 6, "layers": 2, "hidden": 8, "heads": 2, "head_dim": 4, "intermediate": 16, "vocabulary": 20},
    "bert-large": {"seq_len": 6, "layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "vocabulary": 20, "positions": 8},
    "vit-large": {"image": 32, "layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "classes": 8},
    "dlrm": {"rows": (10, 3), "bags": (2, 1), "features": 4, "bottom": (8,), "top": (8, 4), "dense": 5},
    "gpt2": {"seq_len": 8, "layers": 2, "hidden": 16, "heads": 2, "intermediate": 32, "vocabulary": 20},
    "llama-3-8b": {"seq_len": 8, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 32, "vocabulary": 20},
    "falcon-7b": {"seq_len": 8, "layers": 2, "hidden": 16, "heads": 4, "intermediate": 32, "vocabulary": 20},
    "gemma-2-9b": {"seq_len": 8, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 32, "vocabulary": 20},
    "qwen3-8b": {"seq_len": 8, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 32, "vocabulary": 20},
}


# --- published counts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50", 25_557_032),  # torchvision
        ("resnet101", 44_549_160),
        ("densenet121", 7_978_856),
        ("inception3", 27_161_264 - 3_326_696),  # without the auxiliary classifier
        ("vit-large", 304_326_632),
        ("bert-large", 335_174_458),  # Hugging Face, BertForMaskedLM
    ],
)
def test_parameters_are_the_published_ones(name, expected):
    assert load_network(name).num_parameters == expected


@pytest.mark.parametrize(("name", "expected"), [("resnet50", 4.089), ("resnet101", 7.801), ("densenet121", 2.834), ("inception3", 5.713)])
def test_multiply_adds_of_an_image_are_those_of_torchvisions_table(name, expected):
    assert load_network(name, batch=1).flops / 2e9 == pytest.approx(expected, abs=0.0005)


#: One model of each architecture; tests/oracles counts the parameters of all in their folded graphs.
KEPT = {load_model(name).origin.architecture: name for name in list_models()}.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly(list_models(), KEPT))
def test_language_models_have_the_parameters_of_their_config(name):
    config = load_model(name)
    network = load_network(name, batch=1, seq_len=16)
    assert network.num_parameters == config.num_parameters + config.num_mtp_parameters
    if config.num_mtp_layers:
        return  # the tensors of a module that predicts further tokens are not listed by the config
    sizes = Counter(tensor.num_elements for tensor in network.parameters)
    assert sizes == Counter(shape.num_elements for shape in config.parameter_shapes())


def test_fewer_layers_of_a_model_with_several_kinds():
    network = load_network("deepseek-v2-lite", batch=1, seq_len=64, layers=3)
    config = load_model("deepseek-v2-lite").with_layers(3)
    assert network.num_parameters == config.num_parameters
    assert network.name == "deepseek-v2-lite"


def test_dlrm_has_the_tables_and_layers_of_the_benchmark():
    network = load_network("dlrm")
    tables = sum(tensor.num_elements for tensor in network.parameters if tensor.name.startswith("table"))
    # 204,184,588 rows of 128; the dense layers by hand
    widths = [(13, 512), (512, 256), (256, 128), (128 + 27 * 26 // 2, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    assert network.num_parameters - tables == sum(k * n + n for k, n in widths)
    assert tables == 128 * 204_184_588
    assert sum(network.tensors[f"table{i}.ids"].shape[1] for i in range(26)) == 214


# --- the graphs of PaSE ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sizes"), [("alexnet", {}), ("inception3", {}), ("resnet101", {"image": 227}), ("densenet121", {})])
def test_convolutions_and_pooling_are_those_of_pases_graph(name, sizes):
    graph = load_pase_graph(name)
    network = load_network(name, batch=graph.batch, **sizes)
    assert Counter(tuple(layer.dims[dim] for dim in "bcnhwrs") for layer in graph.layers if layer.kind == LayerKind.CONVOLUTION) == Counter(
        (*(op.dims[dim] for dim in "bcnhw"), *op.settings["window"]) for op in network.operators if op.kind == "convolution"
    )
    assert Counter(
        (layer.settings["reads"], layer.settings["writes"]) for layer in graph.layers if layer.kind == LayerKind.POOLING
    ) == Counter(
        (network.tensors[op.inputs[0].tensor].shape, network.tensors[op.output.tensor].shape)
        for op in network.operators
        if op.kind == "pooling"
    )


@pytest.mark.parametrize("name", ["rnnlm", "transformer"])
def test_defaults_of_sequence_models_are_pases_sizes(name):
    graph, network = load_pase_graph(name), load_network(name)
    assert network.batch == graph.batch
    logits = next(layer for layer in graph.layers if layer.kind == LayerKind.CROSS_ENTROPY)
    assert network.tensors["projection.out"].shape == logits.settings["writes"]
    products = sum(2 * op.dims["s"] * 64 * 512 * 2048 for op in network.operators if op.name.endswith("up_proj"))
    wide = sum(2 * layer.dims["b"] * layer.dims["s"] * 512 * 2048 for layer in graph.layers if layer.settings["equation"] == "bsd,de->bse")
    assert products == wide


# --- torch modules -----------------------------------------------------------------------------------------------


def torch_counts(module, *inputs):
    """Parameters and FLOPs of one forward pass, on the meta device."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(*inputs)
    return sum(parameter.numel() for parameter in module.parameters()), counter.get_total_flops()


def counts(network):
    return network.num_parameters, network.flops


def tokens(*shape):
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


class AlexNet(nn.Sequential):
    def __init__(self, f, hidden, classes, flat):
        super().__init__(
            nn.Conv2d(3, f[0], 11, 4), nn.MaxPool2d(3, 2), nn.Conv2d(f[0], f[1], 5, padding=2), nn.MaxPool2d(3, 2),
            nn.Conv2d(f[1], f[2], 3, padding=1), nn.Conv2d(f[2], f[3], 3, padding=1), nn.Conv2d(f[3], f[4], 3, padding=1),
            nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(flat, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, classes),
        )  # fmt: skip


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride, widens):
        super().__init__()
        sizes = [(channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.main = nn.Sequential(*(conv_norm(*size) for size in sizes))
        self.shortcut = conv_norm(channels, 4 * width, 1, stride) if widens else nn.Identity()

    def forward(self, x):
        return F.relu(self.main(x) + self.shortcut(x))


def conv_norm(channels, filters, window, stride=1):
    return nn.Sequential(nn.Conv2d(channels, filters, window, stride, window // 2, bias=False), nn.BatchNorm2d(filters))


def resnet(blocks, width, classes):
    layers, channels = [conv_norm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)], width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width * 2**stage, 2 if stage and not block else 1, not block))
            channels = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class DenseLayer(nn.Module):
    def __init__(self, channels, growth):
        super().__init__()
        self.grow = nn.Sequential(
            nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x):
        return torch.cat([x, self.grow(x)], 1)


def densenet(blocks, growth, classes):
    channels = 2 * growth
    layers = [conv_norm(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for block, count in enumerate(blocks):
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        layers.append(nn.BatchNorm2d(channels))
        if block < len(blocks) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


IMAGE_MODULES = {
    "alexnet": (lambda: AlexNet((96, 256, 384, 384, 256), 4096, 1024, 9216), 227, {}),
    "alexnet tiny": (lambda: AlexNet((4, 8, 8, 8, 4), 16, 8, 4), 67, TINY["alexnet"]),
    "resnet50": (lambda: resnet((3, 4, 6, 3), 64, 1000), 224, {}),
    "resnet101": (lambda: resnet((3, 4, 23, 3), 64, 1000), 224, {}),
    "resnet50 tiny": (lambda: resnet((1, 1), 4, 8), 32, TINY["resnet50"]),
    "densenet121": (lambda: densenet((6, 12, 24, 16), 32, 1000), 224, {}),
    "densenet121 tiny": (lambda: densenet((2, 3), 4, 8), 32, TINY["densenet121"]),
}


@pytest.mark.parametrize("name", IMAGE_MODULES)
def test_networks_for_images_have_torchs_parameters_and_flops(name):
    make, side, sizes = IMAGE_MODULES[name]
    with torch.device("meta"):
        expected = torch_counts(make(), torch.empty(3, 3, side, side))
    assert counts(load_network(name.split()[0], batch=3, **sizes)) == expected


class Recurrent(nn.Module):
    """As the network: one bias a layer, steps one after another."""

    def __init__(self, vocabulary, embedding, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.inputs = nn.ModuleList([nn.Linear(width, 4 * hidden) for width in (embedding, hidden)])
        self.states = nn.ModuleList([nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2)])
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for read, state in zip(self.inputs, self.states, strict=True):
            gates = read(x)
            h = x.new_zeros(len(ids), state.in_features)
            steps = []
            for step in range(ids.shape[1]):
                i, f, g, o = (gates[:, step] + state(h)).chunk(4, 1)
                h = torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * torch.tanh(g) + f)
                steps.append(h)
            x = torch.stack(steps, 1)
        return self.head(x)


def test_rnnlm_has_torchs_parameters_and_flops():
    sizes = {"seq_len": 6, "embedding": 8, "hidden": 12, "vocabulary": 20}
    with torch.device("meta"):
        expected = torch_counts(Recurrent(20, 8, 12), tokens(3, 6))
    assert counts(load_network("rnnlm", batch=3, **sizes)) == expected


class Translation(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.source, self.target = (nn.Embedding(s["vocabulary"], s["hidden"]) for _ in range(2))
        self.core = nn.Transformer(s["hidden"], s["heads"], s["layers"], s["layers"], s["intermediate"], 0.0, batch_first=True)
        self.head = nn.Linear(s["hidden"], s["vocabulary"], bias=False)

    def forward(self, source, target):
        return self.head(self.core(self.source(source), self.target(target)))


@pytest.mark.parametrize("sizes", [TINY["transformer"], {}], ids=["tiny", "default"])
def test_the_transformer_has_torchs_flops_and_its_parameters_but_biases_of_attention(sizes):
    full = {"seq_len": 256, "layers": 6, "hidden": 512, "heads": 8, "intermediate": 2048, "vocabulary": 50_000} | sizes
    with torch.device("meta"):
        parameters, flops = torch_counts(Translation(full), tokens(2, full["seq_len"]), tokens(2, full["seq_len"]))
    # torch's attentions have four biases each, and a norm closes its encoder and its decoder
    parameters -= (3 * full["layers"] * 4 + 2 * 2) * full["hidden"]
    assert counts(load_network("transformer", batch=2, **sizes)) == (parameters, flops)


class Bert(nn.Module):
    def __init__(self, s):
        super().__init__()
        h = s["hidden"]
        self.tables = nn.ModuleList([nn.Embedding(rows, h) for rows in (s["vocabulary"], 2, s["positions"])])
        layer = nn.TransformerEncoderLayer(h, s["heads"], s["intermediate"], 0.0, "gelu", batch_first=True)
        self.core = nn.TransformerEncoder(layer, s["layers"], nn.LayerNorm(h), enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(h, h), nn.GELU(), nn.LayerNorm(h))
        self.bias = nn.Parameter(torch.empty(s["vocabulary"]))

    def forward(self, ids):
        return F.linear(self.transform(self.core(self.tables[0](ids))), self.tables[0].weight, self.bias)


@pytest.mark.parametrize("fused", [True, False])
def test_bert_has_torchs_parameters_and_flops(fused):
    sizes = TINY["bert-large"]
    with torch.device("meta"):
        expected = torch_counts(Bert(sizes).train(), tokens(3, 6))
    assert counts(load_network("bert-large", batch=3, fused_attention=fused, **sizes)) == expected


class VisionTransformer(nn.Module):
    def __init__(self, s, side):
        super().__init__()
        h = s["hidden"]
        self.patches = nn.Conv2d(3, h, 16, 16)
        self.token = nn.Parameter(torch.empty(1, 1, h))
        self.positions = nn.Parameter(torch.empty(1, (side // 16) ** 2 + 1, h))
        layer = nn.TransformerEncoderLayer(h, s["heads"], s["intermediate"], 0.0, "gelu", batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, s["layers"], nn.LayerNorm(h), enable_nested_tensor=False)
        self.head = nn.Linear(h, s["classes"])

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.core(x)[:, 0])


@pytest.mark.parametrize("sizes", [TINY["vit-large"], {}], ids=["tiny", "default"])
def test_the_vision_transformer_has_torchs_parameters_and_flops(sizes):
    full = {"image": 224, "layers": 24, "hidden": 1024, "heads": 16, "intermediate": 4096, "classes": 1000} | sizes
    with torch.device("meta"):
        module = VisionTransformer(full, full["image"]).train()
        expected = torch_counts(module, torch.empty(2, 3, full["image"], full["image"]))
    assert counts(load_network("vit-large", batch=2, **sizes)) == expected


@pytest.mark.parametrize("name", [name for name in TINY if name in list_models()])
def test_language_models_have_the_flops_of_the_executors_module(name):
    from perfmodel.execute.uniform.model import Transformer

    config = load_model(name).having(sliding_window=0, full_attention_every=0, num_hidden_layers=2)
    network = transformer_network(config, batch=2, seq_len=32, fused_attention=False)
    with torch.device("meta"):
        module = Transformer(config, device="meta", fused_attention=False)
        expected = torch_counts(module, tokens(2, 32))
    assert counts(network) == expected
    # the fused kernel computes the half of the scores that a causal mask leaves
    scores = 2 * 2 * 2 * 32 * 32 * config.num_attention_heads * config.head_dim * 2
    assert network.flops - transformer_network(config, batch=2, seq_len=32).flops == scores / 2


# --- as networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_network_trains_data_parallel_with_its_parameters_as_the_only_traffic(name):
    network = load_network(name, batch=4, **TINY[name])
    assert network.batch == 4
    assert network.operators[-1].kind in ("cross_entropy", "binary_cross_entropy")
    shardings = {op.name: {"b": ("d",)} if "b" in op.dims else {} for op in network.operators}
    held = {}
    for tensor, readers in network.readers().items():
        if len(readers) > 1 and tensor in network.producers():
            held[tensor] = Held(cuts=(("d",), *((),) * (len(network.tensors[tensor].shape) - 1)))
    plan = network_plan(network, (MeshAxis(name="d", size=2, tier=0),), shardings, held)
    check_assignment(plan.cuts, network, needs_held=True)
    rows = network_traffic(network, plan)
    # rows of a position table that are looked up once, not for each sample: their gradient is reduced, not the table's
    table = network.tensors.get("position_embedding.weight")
    looked_up = any(op.kind == "embedding" and op.name == "position_embedding" and "b" not in op.dims for op in network.operators)
    reduced = sum(row.num_elements for row in rows if row.what == "gradient")
    assert reduced == network.num_parameters - (table.num_elements if looked_up else 0)
    others = [(row.kind, row.tensor) for row in rows if row.what != "gradient"]
    assert others == ([(CollectiveKind.ALL_REDUCE, "position_embedding.out")] if looked_up else [])


@pytest.mark.parametrize("name", TINY)
def test_operators_are_consistent_with_their_tensors(name):
    network = load_network(name, batch=4, **TINY[name])
    for op in network.operators:
        left = [data.extent for data in op.saved]
        for tensor in op.kept:  # what is kept is saved in the tensor's shape
            operand = next(candidate for candidate in (*op.inputs, op.output) if candidate.tensor == tensor)
            left.remove(tuple(zip(network.tensors[tensor].shape, operand.dims, strict=True)))
        assert "b" not in op.dims or next(iter(op.dims)) == "b"
        assert len(op.backward) > 0 or op.kind in ("concat", "elementwise")
        # a dim that the output lacks is summed, unless it is never cut or the operator reduces it by itself
        lacking = set(op.dims) - set(op.output.dims) - set(op.roles.unsplit)
        assert lacking - set(op.roles.sums) == ({op.settings["over"]} if op.kind == "cross_entropy" else set())
        # a product has a gradient for each operand, but for data
        if op.kind in ("einsum", "convolution"):
            is_data = network.tensors[op.inputs[0].tensor].role is TensorRole.ACTIVATION and op.inputs[0].tensor not in network.producers()
            assert len(op.backward) == (1 if is_data else 2)
    read = set(network.readers())
    assert {tensor for tensor in network.tensors if tensor not in read} == {network.operators[-1].output.tensor}
    assert {tensor.name for tensor in network.tensors.values() if tensor.role is TensorRole.PARAMETER} <= read


def _shape_of(op):
    """An operator without its names."""
    return replace(
        op,
        name="",
        layer="",
        inputs=tuple(replace(operand, tensor="") for operand in op.inputs),
        output=replace(op.output, tensor=""),
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "bert-large", "transformer", "vit-large"])
def test_equal_layers_are_equal_but_for_names(name):
    network = load_network(name, batch=4, **TINY[name])
    prefix = "encoder." if name == "transformer" else "layer"
    first, second = ([_shape_of(op) for op in network.operators if op.layer == f"{prefix}{i}"] for i in (0, 1))
    assert first == second
    assert len(first) > 8


def test_a_bias_is_cut_as_the_product_before_it():
    for name in ("bert-large", "rnnlm", "phi-2", "gpt2"):
        sizes = TINY.get(name, {"seq_len": 8, "layers": 1, "vocabulary": 20})
        by_name = {op.name: op for op in load_network(name, batch=4, **sizes).operators}
        biases = [op for op in by_name.values() if op.settings.get("function") == "bias"]
        assert biases
        for bias in biases:
            product = by_name[bias.name.removesuffix("_bias")]
            assert bias.roles.padded == product.roles.padded
            assert set(bias.roles.unsplit) == set(product.roles.unsplit) & set(product.output.dims)
    network = load_network("rnnlm", batch=4, **TINY["rnnlm"])
    assert {op.name: op.roles.unsplit for op in network.operators if op.name.startswith("lstm0")} == {
        "lstm0.input": ("i",),
        "lstm0.input_bias": ("i",),
        "lstm0": ("s",),
    }


def test_only_the_decoder_looks_at_itself_causally():
    network = load_network("transformer", batch=4, **TINY["transformer"])
    softmaxes = {op.name: op.settings for op in network.operators if op.kind == "softmax"}
    assert len(softmaxes) == 2 + 2 * 2
    for name, settings in softmaxes.items():
        assert settings["causal_queries"] == ("s" if name.startswith("decoder") and "cross" not in name else "")
        assert settings["scale"] == 4**-0.5
    unfused = load_network("gpt2", batch=4, fused_attention=False, **TINY["gpt2"])
    softmax_settings = [op.settings for op in unfused.operators if op.kind == "softmax"]
    assert softmax_settings == [{"over": "z", "scale": 8**-0.5, "causal_queries": "q"}] * 2


def test_layers_with_a_window_compute_fewer_scores():
    network = load_network("gemma-2-9b", batch=1, seq_len=8192, layers=4)
    attentions = [op for op in network.operators if op.kind == "attention"]
    window = 4096 / 8192 - 0.5 * (4096 / 8192) ** 2
    # work is the average of the layers, as in a uniform plan; a run gives each layer its own window
    assert [op.forward[0].mask.over(8192).fraction for op in attentions] == pytest.approx([(window + 0.5) / 2] * 4, rel=1e-12)
    assert [op.settings["window"] for op in attentions] == [4096, 0, 4096, 0]


def test_a_tied_matrix_is_one_tensor_with_two_readers():
    network = load_network("gpt2", batch=1, seq_len=8)
    assert "lm_head.weight" not in network.tensors
    assert [network.operators[index].name for index, _ in network.readers()["embedding.weight"]] == ["token_embedding", "lm_head"]


def test_every_network_loads_with_its_defaults_or_a_batch():
    for name in list_networks()[:10]:
        network = load_network(name)
        assert network.batch > 1
        assert network.source
        assert load_network(name, batch=8).batch == 8
    assert set(list_models()) < set(list_networks())


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        ("alexnett", {}, "network=alexnett: no network has this name; did you mean 'alexnet'"),
        ("resnet50", {"layers": 3}, "layers=3: is no size of resnet50"),
        ("rnnlm", {"seqlen": 3}, "seqlen=3: is no size of rnnlm; did you mean 'seq_len'?"),
        ("llama-3-8b", {"hidden_size": 8}, "hidden_size=8: is no size of llama-3-8b; did you mean 'hidden'?"),
        ("alexnet", {"image": 0}, "image=0: must be a whole number from 1"),
        ("alexnet", {"image": 64.0}, "image=64.0: must be a whole number"),
        ("alexnet", {"image": 64}, "operator pool5: window=3: is wider than the padded input of 2"),
        ("resnet50", {"batch": -1}, "batch=-1: must be a whole number from 1"),
        ("resnet50", {"blocks": (1, 0)}, "blocks=0: must be a whole number from 1"),
        ("resnet50", {"blocks": 3}, "blocks=3: must be several sizes"),
        ("resnet50", {"synchronised": 1}, "synchronised=1: must be true or false"),
        ("resnet50", {"image": True}, "image=True: must be a whole number"),
        ("resnet50", {"image": (3, 4)}, "image=tuple of 2: must be a whole number"),
        ("resnet50", {"batch": False}, "batch=False: must be a whole number"),
        ("resnet50", {"image": 10**30}, "image=a number of over 20 digits: must be a whole number"),
        ("alexnet", {"filters": (4, 8)}, "filters=2: must be one for each of the 5 convolutions"),
        ("bert-large", {"hidden": 100}, "heads=16: must divide hidden=100"),
        ("bert-large", {"seq_len": 600}, "seq_len=600: bert-large has learned positions for 512"),
        ("gpt2", {"seq_len": 2048}, "seq_len=2048: gpt2 has learned positions for 1024"),
        ("llama-3-8b", {"kv_heads": 5}, "num_key_value_heads=5: must divide num_attention_heads=32"),
        ("transformer", {"layers": 2**31 - 1}, "network transformer: has more than 10,000 operators; use fewer layers"),
        ("dlrm", {"rows": (3, 4)}, "bags=26: must be one for each of the 2 tables"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_sentence(name, sizes, sentence):
    with pytest.raises(InputError) as error:
        load_network(name, **sizes)
    assert sentence in str(error.value)


def test_a_builder_refuses_shapes_that_do_not_fit():
    b = NetworkBuilder("n", batch=2, source="")
    x = b.input("x", 2, 3)
    with pytest.raises(InputError, match="must be one for each position"):
        b.linear("fc", x, "b", "n b", "n", new={"n": 4})
    with pytest.raises(InputError, match=r"dim k has size 5: has size 3 elsewhere"):
        b.einsum("fc", (x, "b k"), (b.parameter("w", 5), "k"), "b")
    with pytest.raises(InputError, match="is declared already"):
        b.parameter("w", 6)


def test_networks_are_not_loaded_before_they_are_asked_for():
    code = (
        "import sys, json, perfmodel, perfmodel.workload.networks as n; "
        "before = sorted(sys.modules); n.load_network('alexnet'); print(json.dumps([before, sorted(sys.modules)]))"
    )
    before, after = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert "perfmodel.workload.networks.images" not in before
    assert "perfmodel.workload.networks.dlrm" not in after
    assert not {"torch", "pandas", "pydantic", "matplotlib"} & set(after)


def test_traffic_follows_as_it_is_issued():
    """Forward through the operators, back the other way, then the gradients of parameters."""
    network = load_network("transformer", batch=4, **TINY["transformer"])
    axes = (MeshAxis(name="d", size=2, tier=0),)
    shardings = {
        op.name: {max(op.dims, key=lambda dim: not op.dims[dim] % 2 and dim not in op.roles.unsplit): ("d",)} for op in network.operators
    }
    held = {t: Held(cuts=((),) * len(network.tensors[t].shape), partial=frozenset("d")) for t in network.producers()}
    rows = network_traffic(network, network_plan(network, axes, shardings, held))
    position = {op.name: i for i, op in enumerate(network.operators)}
    edges = [row for row in rows if row.what != "gradient"]
    assert rows[: len(edges)] == tuple(edges)
    turns = [position[row.operator] if row.phase is Pass.FORWARD else 2 * len(position) - position[row.operator] for row in edges]
    assert turns == sorted(turns)
    assert turns[0] < len(position) < turns[-1]
