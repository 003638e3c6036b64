"""Imported graphs as training networks: work and parameters stay, views become dims that line up."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import perfmodel
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.algebra.sharding import Held, gradient_layout, output_layout
from perfmodel.parallel.per_operator.assignment import check_assignment, divides
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.per_operator.traffic import network_traffic
from perfmodel.workload.graph import TensorRole
from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.kinds import KINDS
from perfmodel.workload.imported.network import network_of
from perfmodel.workload.work import Pass
from tests.execute.per_operator.networks import LanguageLSTM, OddProducts, SmallAlexNet, SmallResNet, WithFourier
from tests.marks import mostly_slow
from tests.network_plans import network_plan


class Attention(nn.Module):
    """Grouped heads by view and transpose, without a fused kernel; keys and values in one projection."""

    def __init__(self, width=64, heads=8, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        b, s, width = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = (tensor.view(b, s, self.kv_heads, self.size).transpose(1, 2) for tensor in self.kv(x).chunk(2, -1))
        shape = (b, self.kv_heads, self.heads // self.kv_heads, s, self.size)
        k, v = (tensor[:, :, None].expand(*shape).reshape(b, self.heads, s, self.size) for tensor in (k, v))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, s, width))


class FusedHeads(nn.Module):
    """q, k and v of one projection, split along the features as GPT-2 does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (tensor.unflatten(-1, (8, 8)).transpose(1, 2) for tensor in self.qkv(x).split(64, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 16))

    def forward(self, x):
        return torch.addmm(torch.zeros(16), x, self.weight) @ self.weight.t()


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))


LLAMA = "perfmodel.execute.importer.import_graph:shipped('llama-3-8b')"
GPT = "perfmodel.execute.importer.import_graph:shipped('gpt2')"

NETWORKS = {
    "mlp": (mlp, "float32[16,64]"),
    "alexnet": (SmallAlexNet, "images=float32[16,3,96,96] labels=int64[16]"),
    "resnet": (SmallResNet, "float32[16,3,64,64]"),
    "lstm": (LanguageLSTM, "tokens=int64[16,10] labels=int64[16,10]"),
    "gru both ways": (lambda: nn.GRU(8, 16, 2, bidirectional=True), "float32[10,4,8]"),
    "odd products": (OddProducts, "float32[16,8,12,12]"),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), "float32[16,8,64]"),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(64, 4, 128), "float32[6,4,64] float32[8,4,64]"),
    "pointers": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), "float32[4,6,32] float32[4,6,32] float32[4,6,32]"),
    "attention": (Attention, "float32[4,6,64]"),
    "fused heads": (FusedHeads, "float32[4,6,64]"),
    "fourier": (WithFourier, "float32[16,8]"),
    "turned": (Turned, "float32[8,32]"),
    "llama": (LLAMA, "int64[4,128]"),
    "gpt": (GPT, "int64[4,128]"),
}


@pytest.fixture(scope="module")
def converted():
    results = {}

    def convert(name):
        if name not in results:
            graph = perfmodel.import_graph(*NETWORKS[name])
            results[name] = graph, network_of(graph)
        return results[name]

    return convert


def operator_of(network, name):
    (match,) = [operator for operator in network.operators if operator.name == name]
    return match


def operators_of(network, kind):
    return [operator for operator in network.operators if operator.kind == kind]


def producer_of(network, tensor):
    return network.operators[network.producers()[tensor]]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_work_and_parameters_are_the_graphs(name, converted):
    graph, imported = converted(name)
    assert imported.network.flops == graph.flops
    assert imported.network.num_parameters == graph.num_parameters
    is_time_first = name in ("gru both ways", "decoder layer")
    assert imported.network.batch == graph.vertices[0].outputs[0].shape[is_time_first]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_dims_line_up_on_every_edge(name, converted):
    """A dim has the size of each position that it cuts, but for strides and for the gates of recurrent layers."""
    graph, imported = converted(name)
    network = imported.network
    for operator in network.operators:
        for operand in (*operator.inputs, operator.output):
            tensor = network.tensors[operand.tensor]
            for size, dim in zip(tensor.shape, operand.dims, strict=True):
                if not dim or operator.dims[dim] == size:
                    continue
                assert operator.kind in ("convolution", "recurrent")
                assert size % operator.dims[dim] == 0
    shapes = {vertex.name: [operand.num_elements for operand in vertex.outputs] for vertex in graph.vertices}
    for vertex_name, sizes in shapes.items():
        for number, size in enumerate(sizes):
            tensor = network.tensors.get(vertex_name if len(sizes) == 1 else f"{vertex_name}.{number}")
            assert tensor is None or tensor.num_elements == size


@pytest.mark.parametrize("name", mostly_slow(NETWORKS, quick=7))
def test_every_dim_that_is_cut_leaves_something_right(name, converted):
    """A dim that the output lacks is summed or has traffic of its own; nothing else could tell that the output is not complete."""
    for operator in converted(name)[1].network.operators:
        covered = {*operator.output.dims, *operator.roles.sums, *(dim for collective in operator.traffic for dim in collective.over)}
        assert set(operator.dims) <= covered
        assert operator.roles.unsplit == ()


@pytest.mark.parametrize("name", mostly_slow(NETWORKS, quick=7))
def test_what_is_kept_is_among_what_is_saved(name, converted):
    network = converted(name)[1].network
    for operator in network.operators:
        left = [data.extent for data in operator.saved]
        for operand in (*operator.inputs, operator.output):
            if operand.tensor in operator.kept:
                assert network.tensors[operand.tensor].role is not TensorRole.PARAMETER
                left.remove(tuple(zip(network.tensors[operand.tensor].shape, operand.dims, strict=True)))


@pytest.mark.slow
def test_what_backward_needs_is_kept(converted):
    network = converted("resnet")[1].network
    assert {operator.kept for operator in network.operators if operator.name in ("relu", "relu_")} == {("relu",), ("relu_",)}
    assert operator_of(network, "conv2d_1").kept == ("max_pool2d",)
    assert operator_of(network, "mean").kept == ()
    llama = converted("llama")[1].network
    rotated = operator_of(llama, "mul")  # the cosines have no gradient: only they are needed
    assert rotated.kept == ("cos",)
    gate = next(operator for operator in llama.operators if operator.inputs[0].tensor == "silu")
    assert gate.kept == tuple(operand.tensor for operand in gate.inputs)


@pytest.mark.parametrize("name", mostly_slow(NETWORKS, quick=7))
def test_any_network_has_a_data_parallel_plan(name, converted):
    """Its only traffic is that of gradients, where every operator knows its samples."""
    network = converted(name)[1].network
    axis = MeshAxis(name="a", size=2, tier=0)
    cuts = {operator.name for operator in network.operators if "b" in operator.dims and divides(operator, network, "b", 2)}
    shardings = {operator.name: {"b": ("a",)} if operator.name in cuts else {} for operator in network.operators}
    tensors = {tensor for tensor, readers in network.readers().items() if len(readers) > 1 and tensor in network.producers()}
    held = {}
    for tensor in tensors:
        producer = producer_of(network, tensor)
        partial = frozenset()
        for reader, position in network.readers()[tensor]:
            reading = network.operators[reader]
            partial |= gradient_layout(shardings[reading.name], reading.inputs[position]).partial
        held[tensor] = Held(cuts=output_layout(producer, shardings[producer.name]).cuts, partial=partial)
    plan = network_plan(network, (axis,), shardings, held)
    check_assignment(plan.cuts, network, needs_held=True)
    if name == "fourier":
        return  # an operator that has no samples
    assert {row.what for row in network_traffic(network, plan)} == {"gradient"}
    read = {operand.tensor for operator in network.operators for operand in operator.inputs}
    trained = [tensor for tensor in network.parameters if tensor.name in read]
    reduced = [row for row in network_traffic(network, plan) if row.what == "gradient"]
    assert sum(row.num_elements for row in reduced) == sum(tensor.num_elements for tensor in trained)


@pytest.mark.slow
def test_heads_are_dims_of_the_projection_and_of_the_attention(converted):
    network = converted("llama")[1].network
    attention = operators_of(network, "attention")[0]
    assert dict(attention.dims) == {"b": 4, "h0": 8, "h1": 4, "s": 128}
    query, _, value = attention.inputs
    assert value.dims == ("b", "", "h0", "")
    projection = producer_of(network, value.tensor)
    assert (projection.kind, projection.output.dims) == ("einsum", ("b", "s", "n0", ""))
    assert network.tensors[value.tensor].shape == (4, 128, 8, 128)
    assert query.dims == ("b", "s", "h0", "h1", "")
    assert network.tensors["layers.0.attention.q_proj.weight"].shape == (8, 4, 128, 4096)
    (work,) = attention.forward
    assert (work.heads, work.kv_heads) == (((8, "h0"), (4, "h1")), ((8, "h0"),))


def test_cutting_heads_alike_moves_no_data(converted):
    """Megatron's plan of an attention, on a hand-written one: heads on an axis, one reduction of the output."""
    network = converted("attention")[1].network
    cut = {"linear": "n0", "linear.bias": "n0", "linear_1": "n1", "linear_1.bias": "n1", "chunk.0": "d1", "chunk.1": "d1", "matmul": "s0",
           "softmax": "c0", "matmul_1": "s0", "linear_2": "c0"}  # fmt: skip
    shardings = {operator.name: {cut[operator.name]: ("a",)} if operator.name in cut else {} for operator in network.operators}
    kv = operator_of(network, "linear_1.bias").output
    held = Held(cuts=tuple(("a",) if dim == "n1" else () for dim in kv.dims))
    rows = network_traffic(network, network_plan(network, (MeshAxis(name="a", size=2, tier=0),), shardings, {kv.tensor: held}))
    assert [(row.kind, row.tensor, row.num_elements) for row in rows] == [(CollectiveKind.ALL_REDUCE, "linear_2.product", 4 * 6 * 64)]


def test_heads_repeated_for_their_queries_stay_dims():
    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Linear(16, 2 * 8, bias=False)

        def forward(self, x):
            return self.k(x).unflatten(-1, (2, 8)).repeat_interleave(4, dim=2).relu()

    projection, repeat, after = network_of(perfmodel.import_graph(Repeats, "float32[4,6,16]")).network.operators
    assert projection.output.dims == ("b", "s", "n0", "n1")
    assert dict(repeat.dims) == {"b": 4, "c": 6, "h0": 2, "h1": 4, "w": 8}
    assert (repeat.inputs[0].dims, repeat.output.dims) == (("b", "c", "h0", "w"), ("b", "c", "h0", "h1", "w"))
    assert after.inputs[0].dims == ("b", "c", "h0", "h1", "w")


def test_fused_projections_keep_their_heads(converted):
    network = converted("fused heads")[1].network
    assert operator_of(network, "linear").output.dims == ("b", "s", "", "n1", "")
    assert network.tensors["qkv.weight"].shape == (3, 8, 8, 64)
    for number in range(3):
        part = operator_of(network, f"split.{number}")
        assert (part.inputs[0].dims, part.output.dims) == (("b", "s", "", "d1", ""), ("b", "s", "d1", ""))


def test_a_flatten_is_dims_of_the_layer_after_it(converted):
    network = converted("alexnet")[1].network
    linear = operator_of(network, "linear")
    assert dict(linear.dims) == {"b": 16, "n": 32, "c0": 16, "c1": 2, "c2": 2}
    assert [operand.dims for operand in linear.inputs] == [("b", "c0", "c1", "c2"), ("n", "c0", "c1", "c2")]
    assert linear.roles.sums == ("c0", "c1", "c2")
    assert network.tensors["classifier.1.weight"].shape == (32, 16, 2, 2)


def test_a_bias_is_added_after_the_sum(converted):
    network = converted("mlp")[1].network
    product, added = network.operators[:2]
    assert (product.kind, product.roles.sums, len(product.inputs)) == ("einsum", ("c",), 2)
    assert [operand.tensor for operand in added.inputs] == [product.output.tensor, "0.bias"]
    assert added.inputs[1].dims == ("n",)


def test_a_parameter_keeps_its_order(converted):
    """Read as it is by the first product, transposed by the second."""
    network = converted("turned")[1].network
    assert network.tensors["weight"].shape == (32, 16)
    first, second = operators_of(network, "einsum")
    assert first.inputs[1].dims == ("k", "n")
    assert second.inputs[1].dims == ("n", "k")


def test_parts_of_a_parameter_are_parameters(converted):
    network = converted("pointers")[1].network
    parts = [tensor for tensor in network.parameters if tensor.name.startswith("in_proj_weight")]
    assert [(tensor.name, tensor.shape) for tensor in parts] == [(f"in_proj_weight[{count}]", (4, 8, 32)) for count in range(3)]


def test_backward_work(converted):
    """Two products for each one forward, but none for the gradient of data."""
    network = converted("mlp")[1].network
    assert [len(operator.backward) for operator in operators_of(network, "einsum")] == [1, 2]
    network = converted("resnet")[1].network
    assert {len(operator.backward) for operator in operators_of(network, "convolution")[1:]} == {2}
    assert len(operators_of(network, "convolution")[0].backward) == 1


def test_rows_of_a_convolution_are_cut_with_a_halo(converted):
    network = converted("resnet")[1].network
    stem, block = operators_of(network, "convolution")[:2]
    halo = [collective for collective in block.traffic if collective.over == ("h",)]
    assert [collective.phase for collective in halo] == [Pass.FORWARD, Pass.BACKWARD]
    assert halo[0].extent == ((2, ""), (16, "b"), (8, "c"), (16, "w"))
    assert stem.inputs[0].dims == ("b", "c", "h", "w")  # 64 rows for 32: two for each
    assert [collective.extent[0] for collective in stem.traffic] == [(5, ""), (5, "")]
    assert {collective.phase for collective in stem.traffic} == {Pass.FORWARD}


def test_hidden_entries_of_a_recurrence(converted):
    network = converted("lstm")[1].network
    (lstm,) = operators_of(network, "recurrent")
    assert dict(lstm.dims) == {"b": 16, "e": 32}
    assert [(collective.kind, collective.over, collective.repeats) for collective in lstm.traffic] == [
        (CollectiveKind.ALL_GATHER, ("e",), 20),
        (CollectiveKind.REDUCE_SCATTER, ("e",), 20),
    ]
    network = converted("gru both ways")[1].network
    (both_ways,) = operators_of(network, "recurrent")
    assert list(both_ways.dims.values()) == [4]  # the samples alone: a matrix has the rows of one direction


def test_shares_of_a_vocabulary_may_be_uneven(converted):
    """100 words on 8 chips: so may those of the layer before the loss, and of what is added to it."""
    network = converted("lstm")[1].network
    padded = {operator.name: operator.roles.padded for operator in network.operators if operator.roles.padded}
    assert padded == {"embedding": ("v",), "linear": ("n",), "linear.bias": ("n",), "cross_entropy_loss": ("v",)}


def test_bags_know_their_samples():
    network = network_of(perfmodel.import_graph("torch.nn:EmbeddingBag(100, 8)", "int64[4,5]")).network
    (bag,) = network.operators
    assert [operand.dims for operand in bag.inputs if operand.tensor == "input"] == [("b", "")]
    assert bag.output.dims == ("b", "d")


def test_a_loss_on_two_tensors_is_a_sum_over_the_samples():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, y):
            return nn.functional.mse_loss(self.linear(x), y)

    loss = network_of(perfmodel.import_graph(Loss, "float32[16,8] float32[16,4]")).network.operators[-1]
    assert [operand.dims for operand in loss.inputs] == [("b", "d"), ("b", "d")]
    assert loss.roles.sums == ("b", "d")


def test_an_unrecognised_operator_is_replicated_and_reported(converted):
    imported = converted("fourier")[1]
    (unknown,) = operators_of(imported.network, "unrecognised")
    assert dict(unknown.dims) == {}
    assert [line for line in imported.treatments if "fft_rfft" in line] == [
        "aten.fft_rfft.default (fft_rfft) is not recognised: computed whole on every chip"
    ]


def test_an_operator_that_cannot_be_sharded_is_reported(converted):
    (treatment,) = [line for line in converted("odd products")[1].treatments if "cat" in line]
    assert treatment == "aten.cat.default (cat and 1 more) reads 6 entries of its input whole: tensors are joined along it"


@pytest.mark.slow
def test_indices_have_no_gradient(converted):
    network = converted("lstm")[1].network
    roles = {name: network.tensors[name].role for name in ("tokens", "labels", "embedding", "head.weight")}
    assert list(roles.values()) == [TensorRole.INDEX, TensorRole.INDEX, TensorRole.ACTIVATION, TensorRole.PARAMETER]
    llama = converted("llama")[1].network
    (table,) = {operator.output.tensor for operator in llama.operators if operator.name == "cos"}
    assert llama.tensors[table].role is TensorRole.INDEX
    assert operator_of(llama, "cos").backward == ()


def test_nothing_flows_back_through_whole_numbers():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).argmax(-1)

    network = network_of(perfmodel.import_graph(Picks, "float32[4,8]")).network
    search = network.operators[-1]
    assert (search.backward, search.saved, network.tensors[search.output.tensor].role) == ((), (), TensorRole.INDEX)
    assert dict(search.dims) == {"b": 4}  # the largest of all entries: no share knows it


@pytest.mark.slow
def test_equal_layers_are_equal_apart_from_names(converted):
    network = converted("llama")[1].network
    layers = {}
    for operator in network.operators:
        if operator.layer.startswith("layers."):
            operands = tuple((operand.dims, network.tensors[operand.tensor].shape) for operand in (*operator.inputs, operator.output))
            inputs = tuple(replace(operand, tensor="") for operand in operator.inputs)
            anonymous = replace(operator, name="", layer="", inputs=inputs, output=replace(operator.output, tensor=""))
            layers.setdefault(operator.layer, []).append((anonymous, operands))
    assert len(layers) == 32
    assert layers["layers.1"] == layers["layers.2"] == layers["layers.31"]


def test_every_kind_has_a_description():
    assert set(KINDS) == set(ImportedKind) - {ImportedKind.INPUT, ImportedKind.CONSTANT}


@pytest.mark.slow
def test_kinds_are_those_of_networks_written_by_hand(converted):
    """Statistics are float32 numbers, and the passes say which tensors they read, as a framework's fused kernels need to know."""
    network = converted("gpt")[1].network
    norm = next(operator for operator in network.operators if operator.kind == "layer_norm")
    assert [(data.of, data.itemsize) for data in norm.saved] == [(0, 0.0), (None, 4.0), (None, 4.0)]
    assert [data.of for data in norm.forward[0].accesses] == [0, len(norm.inputs)]
    gelu = next(operator for operator in network.operators if operator.kind == "elementwise" and len(operator.inputs) == 1)
    assert [(data.of, data.is_gradient) for data in gelu.backward[0].accesses] == [(1, True), (0, False), (0, True)]


def test_labels_may_be_probabilities():
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 10)

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.linear(x), y)

    loss = network_of(perfmodel.import_graph(Soft, "float32[16,8] float32[16,10]")).network.operators[-1]
    assert [operand.dims for operand in loss.inputs] == [("b", "v"), ("b", "v")]
    assert loss.roles.sums == ("b",)
