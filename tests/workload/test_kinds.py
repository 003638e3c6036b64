"""Kinds of operators against torch: shapes, FLOPs of both passes, what autograd keeps; their own traffic against numbers made by hand."""

from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.derive import extent_amount
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.per_operator.traffic import network_traffic
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor, TensorRole
from perfmodel.workload.kinds.attention import Causal, attention, rotary
from perfmodel.workload.kinds.batch_norm import batch_norm
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.dense import einsum, elementwise, layer_norm, reduction, rms_norm, softmax
from perfmodel.workload.kinds.interaction import interaction
from perfmodel.workload.kinds.joining import concat, flatten, prepend, select
from perfmodel.workload.kinds.lstm import lstm
from perfmodel.workload.kinds.pooling import pooling
from perfmodel.workload.kinds.vocabulary import binary_cross_entropy, cross_entropy, embedding, embedding_bag
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.work import Data, FusedAttention, OwnTraffic, Pass, Product, Stream, halo_rows, passes, window_output
from tests.network_plans import network_plan


def operand(tensor, dims):
    """`.` stands for a whole position."""
    return Operand(tensor=tensor, dims=tuple("" if dim == "." else dim for dim in dims.split()))


def elements(extent):
    return prod(size for size, _ in extent)


def product_flops(works):
    return sum(
        2 * work.repeats * elements(work.batch) * elements(work.m) * elements(work.n) * elements(work.k)
        for work in works
        if isinstance(work, Product)
    )


def torch_flops(function, *tensors):
    """Return the FLOP of forward and of backward, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        output = function(*tensors)
        forward = counter.get_total_flops()
        output.sum().backward()
    return forward, counter.get_total_flops() - forward


def values(*shape, grad=True):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_(grad)


CONVOLUTIONS = [
    {"channels": 8, "filters": 6, "window": (3, 3), "padding": (1, 1)},
    {"channels": 3, "filters": 5, "window": (7, 7), "stride": (2, 2), "padding": (3, 3)},
    {"channels": 4, "filters": 4, "window": (1, 7), "padding": (0, 3)},
    {"channels": 8, "filters": 12, "window": (3, 3), "groups": 4, "stride": (2, 1)},
    {"channels": 8, "filters": 8, "window": (5, 3), "groups": 8, "padding": (2, 0)},
    {"channels": 4, "filters": 2, "window": (3, 3), "dilation": (2, 3), "padding": (2, 2)},
]


@pytest.mark.parametrize("sizes", CONVOLUTIONS)
@pytest.mark.parametrize("is_first", [False, True])
def test_convolution_has_torchs_shape_and_flops(sizes, is_first):
    channels, filters, groups = sizes["channels"], sizes["filters"], sizes.get("groups", 1)
    image, others = Tensor(name="x", shape=(2, channels, 16, 14)), {name: sizes[name] for name in sizes if name != "channels"}
    op = convolution("c", image, "w", "y", first_has_gradient=not is_first, **others)
    settings = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)} | {
        k: sizes[k] for k in sizes if k in ("stride", "padding", "dilation")
    }
    weight = values(filters, channels // groups, *sizes["window"])
    x = values(2, channels, 16, 14, grad=not is_first)

    def run(x, weight):
        # group by group: of a grouped one torch counts the weight's gradient `groups` times
        parts = zip(x.chunk(groups, 1), weight.chunk(groups), strict=True)
        return torch.cat([F.conv2d(*part, **settings) for part in parts], 1)

    assert run(x, weight).shape[2:] == (op.dims["h"], op.dims["w"])
    assert (product_flops(op.forward), product_flops(op.backward)) == torch_flops(run, x, weight)
    assert op.flops == product_flops(op.forward)
    assert op.settings == {"window": sizes["window"], "groups": groups, **settings}


def test_channels_are_summed_and_groups_are_not():
    plain = convolution("c", Tensor(name="x", shape=(2, 8, 8, 8)), "w", "y", filters=6, window=(1, 1))
    assert plain.roles.sums == ("c",)
    assert plain.inputs[1].dims == ("n", "c", "", "")
    grouped = convolution("c", Tensor(name="x", shape=(2, 8, 8, 8)), "w", "y", filters=4, window=(1, 1), groups=4)
    assert grouped.roles.sums == ()
    assert grouped.inputs[0].dims[1] == grouped.inputs[1].dims[0] == grouped.output.dims[1] == "g"


@pytest.mark.parametrize(
    ("window", "stride", "padding", "dilation"),
    [
        (3, 1, 1, 1),
        (7, 2, 3, 1),
        (3, 2, 1, 1),
        (1, 1, 0, 1),
        (1, 2, 0, 1),
        (2, 2, 0, 1),
        (5, 1, 2, 1),
        (3, 1, 2, 2),
        (3, 3, 1, 1),
        (4, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("num_parts", [4, 8])
def test_the_halo_is_what_windows_read_outside_their_share(window, stride, padding, dilation, num_parts):
    size = 48
    outputs = window_output("c", size, window, stride, padding, dilation)
    assert size == stride * outputs
    owned, share_of_outputs = size // num_parts, outputs // num_parts
    share = range(owned, 2 * owned)  # the second: neighbours on both sides
    read = {o * stride - padding + tap * dilation for o in range(share_of_outputs, 2 * share_of_outputs) for tap in range(window)}
    assert halo_rows(window, stride, padding, dilation) == len(set(range(min(read), max(read) + 1)) - set(share))


def test_halo_rows_are_sent_forward_and_their_gradients_back():
    op = convolution("c", Tensor(name="x", shape=(4, 8, 32, 16)), "w", "y", filters=6, window=(5, 3), padding=(2, 1))
    sent = [(collective.over, elements(collective.extent), collective.phase, collective.kind) for collective in op.traffic]
    rows, columns = 4 * 8 * 4 * 16, 4 * 8 * 2 * 32  # batch, channels, halo, along
    assert sent == [
        (("h",), rows, Pass.FORWARD, CollectiveKind.SEND_RECV),
        (("h",), rows, Pass.BACKWARD, CollectiveKind.SEND_RECV),
        (("w",), columns, Pass.FORWARD, CollectiveKind.SEND_RECV),
        (("w",), columns, Pass.BACKWARD, CollectiveKind.SEND_RECV),
    ]
    amount = extent_amount(op, {"b": ("p",), "c": ("q",), "h": ("r",)}, op.traffic[0].extent)
    assert (amount.base, amount.axes) == (rows, {"p", "q"})  # the halo itself is not cut by h


def test_data_gets_no_gradient_and_sends_no_halo_back():
    op = convolution(
        "c", Tensor(name="x", shape=(4, 3, 32, 16)), "w", "y", filters=6, window=(3, 3), padding=(1, 1), first_has_gradient=False
    )
    assert {collective.phase for collective in op.traffic} == {Pass.FORWARD}
    assert len(op.backward) == 1


def test_sides_that_do_not_divide_by_the_stride_stay_whole():
    op = convolution("c", Tensor(name="x", shape=(1, 3, 227, 224)), "w", "y", filters=8, window=(11, 2), stride=(4, 2))
    assert op.roles.unsplit == ("h",)
    assert op.traffic == ()
    op = pooling("p", Tensor(name="x", shape=(1, 3, 8, 9)), "y", window=(3, 3), stride=(2, 2), padding=(1, 1))
    assert op.roles.unsplit == ("w",)
    assert [collective.over for collective in op.traffic] == [("h",), ("h",)]


@pytest.mark.parametrize("window", [(2, 2), (3, 3), (3, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_pooling_has_torchs_shape(window, stride):
    for mode, function in (("max", F.max_pool2d), ("average", F.avg_pool2d)):
        op = pooling("p", Tensor(name="x", shape=(2, 3, 13, 16)), "y", window=window, stride=stride, padding=(1, 1), mode=mode)
        assert function(values(2, 3, 13, 16), window, stride, (1, 1)).shape[2:] == (op.dims["h"], op.dims["w"])


# --- what is kept ------------------------------------------------------------------------------------------------

X4 = operand("x", "b c h w")
S4 = {"b": 2, "h": 6, "w": 5, "c": 4}
X3 = operand("x", "b s d")
S3 = {"b": 2, "s": 6, "d": 8}
Y3 = operand("y", "b s d")


def kept_by_torch(function, *tensors, parameters=()):
    """Float32 elements (an int64 counts as two) that autograd keeps, each storage once and without parameters and integer inputs; which
    of the tensors are among them, by position, the output after the inputs."""
    seen = {}

    def address(tensor):
        return tensor.untyped_storage().data_ptr()

    def pack(tensor):
        if tensor.dim() and address(tensor) not in {address(parameter) for parameter in parameters}:
            seen[address(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*tensors)
    kept = [position for position, tensor in enumerate((*tensors, output)) if address(tensor) in seen]
    return sum(tensor.numel() * tensor.element_size() // 4 for tensor in seen.values()), kept


def heads(*, groups=2, shared=3, depth=4, queries=6, keys=6, **settings):
    return attention(
        "o",
        operand("q", "b q g r ."),
        operand("k", "b z g ."),
        operand("v", "b z g ."),
        operand("y", "b q g r ."),
        {"b": 2, "q": queries, "z": keys, "g": groups, "r": shared},
        head_dim=depth,
        **settings,
    )


CLICKS = torch.ones(4, 1)
LABELS = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2]])
W8, B8, W4, B4 = values(8), values(8), values(4), values(4)
IMAGE = values(2, 4, 6, 5)
KEPT = {
    "relu": (elementwise("o", "relu", (X3,), Y3, S3), torch.relu, (values(2, 6, 8),), ()),
    "sigmoid": (elementwise("o", "sigmoid", (X3,), Y3, S3), torch.sigmoid, (values(2, 6, 8),), ()),
    "tanh": (elementwise("o", "tanh", (X3,), Y3, S3), torch.tanh, (values(2, 6, 8),), ()),
    "gelu": (elementwise("o", "gelu", (X3,), Y3, S3), F.gelu, (values(2, 6, 8),), ()),
    "silu": (elementwise("o", "silu", (X3,), Y3, S3), F.silu, (values(2, 6, 8),), ()),
    "add": (elementwise("o", "add", (X3, operand("z", "b s d")), Y3, S3), torch.add, (values(2, 6, 8), values(2, 6, 8)), ()),
    "mul": (elementwise("o", "mul", (X3, operand("z", "b s d")), Y3, S3), torch.mul, (values(2, 6, 8), values(2, 6, 8)), ()),
    "bias": (elementwise("o", "bias", (X3, operand("z", "d")), Y3, S3), torch.add, (values(2, 6, 8), W8), (W8,)),
    "einsum": (
        einsum("o", X3, operand("w", "n d"), operand("y", "b s n"), {"b": 2, "s": 6, "n": 4, "d": 8}),
        F.linear,
        (values(2, 6, 8), WN := values(4, 8)),
        (WN,),
    ),
    "two activations": (
        einsum("o", X3, operand("z", "b t d"), operand("y", "b s t"), S3 | {"t": 3}, second_is_parameter=False),
        lambda x, z: x @ z.transpose(1, 2),
        (values(2, 6, 8), values(2, 3, 8)),
        (),
    ),
    "convolution": (
        convolution("o", Tensor(name="x", shape=(2, 4, 6, 5)), "w", "y", filters=3, window=(3, 3)),
        F.conv2d,
        (IMAGE, WC := values(3, 4, 3, 3)),
        (WC,),
    ),
    "max pooling": (
        pooling("o", Tensor(name="x", shape=(2, 4, 6, 5)), "y", window=(2, 2), stride=(2, 2)),
        lambda x: F.max_pool2d(x, 2),
        (IMAGE,),
        (),
    ),
    "average pooling": (
        pooling("o", Tensor(name="x", shape=(2, 4, 6, 5)), "y", window=(2, 2), stride=(2, 2), mode="average"),
        lambda x: F.avg_pool2d(x, 2),
        (IMAGE,),
        (),
    ),
    "mean": (reduction("o", X4, operand("y", "b c"), S4), lambda x: x.mean((2, 3)), (IMAGE,), ()),
    "batch norm": (
        batch_norm("o", X4, operand("w", "c"), operand("z", "c"), operand("y", "b c h w"), S4),
        lambda x, w, z: F.batch_norm(x, None, None, w, z, training=True),
        (IMAGE, W4, B4),
        (W4, B4),
    ),
    "layer norm": (
        layer_norm("o", X3, operand("w", "d"), operand("z", "d"), Y3, S3),
        lambda x, w, z: F.layer_norm(x, (8,), w, z),
        (values(2, 6, 8), W8, B8),
        (W8, B8),
    ),
    "softmax": (softmax("o", X3, Y3, S3, over="d"), lambda x: F.softmax(x, -1), (values(2, 6, 8),), ()),
    "attention": (
        heads(shared=1),
        lambda *qkv: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv)),
        (values(2, 6, 2, 4), values(2, 6, 2, 4), values(2, 6, 2, 4)),
        (),
    ),
    "cross-entropy": (
        cross_entropy("o", operand("x", "b s v"), operand("l", "b s"), operand("y", "b s"), {"b": 2, "s": 6, "v": 8}),
        lambda x: F.cross_entropy(x.reshape(12, 8), LABELS.reshape(12), reduction="none"),
        (values(2, 6, 8),),
        (LABELS,),
    ),
    "binary cross-entropy": (
        binary_cross_entropy("o", operand("x", "b n"), operand("l", "b n"), operand("y", "b n"), {"b": 4, "n": 1}),
        lambda x: F.binary_cross_entropy_with_logits(x, CLICKS, reduction="none"),
        (values(4, 1),),
        (CLICKS,),
    ),
    "embedding": (
        embedding("o", operand("l", "b s"), operand("t", "v d"), Y3, S3 | {"v": 10}),
        lambda t: F.embedding(LABELS, t),
        (TABLE := values(10, 8),),
        (TABLE, LABELS),
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_for_backward_is_what_autograd_keeps(kind):
    op, function, tensors, parameters = KEPT[kind]
    count, positions = kept_by_torch(function, *tensors, parameters=parameters)
    assert sum(elements(data.extent) for data in op.saved) == count
    names = [operand.tensor for operand in op.inputs[: len(tensors)]] + [op.output.tensor]
    assert set(op.kept) == {names[position] for position in positions}


# --- work --------------------------------------------------------------------------------------------------------


def test_attention_has_torchs_flops_and_its_causal_share():
    q, k = values(2, 6, 6, 4), values(2, 6, 5, 4)
    with sdpa_kernel(SDPBackend.MATH):
        forward, _ = torch_flops(F.scaled_dot_product_attention, q, k, k.detach())
    assert heads(keys=5).flops == forward
    assert heads(causal=Causal()).flops == heads().flops / 2
    assert heads(causal=Causal()).roles.unsplit == ("z", "q")
    assert heads().roles.unsplit == ("z",)
    assert elements(heads().saved[-1].extent) == 2 * 6 * 2 * 3  # one log-sum-exp a query and head


def test_a_window_leaves_the_share_of_scores_that_it_shows():
    s, w = 400, 50
    seen = sum(min(i + 0.5, w) for i in range(s))  # half of the diagonal's square, as in the half of a full triangle
    shares = [heads(causal=Causal(window=window), queries=s, keys=s).forward[0].mask.over(s).fraction for window in (w, 0, s)]
    assert shares == [pytest.approx(seen / s**2, rel=1e-3), 0.5, 0.5]
    assert heads(causal=Causal(window=2)).settings["window"] == 2


def test_the_interaction_has_torchs_flops_and_width():
    op = interaction("o", tuple(f"x{i}" for i in range(5)), "y", batch=3, features=7)
    vectors = [values(3, 7) for _ in range(5)]

    def run(*vectors):
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.tril_indices(5, 5, -1)
        return torch.cat([vectors[0], torch.bmm(stacked, stacked.transpose(1, 2))[:, rows, columns]], 1)

    assert run(*vectors).shape == (3, 7 + 10)
    assert elements(op.forward[-1].elements) == 3 * 17
    assert (product_flops(op.forward), product_flops(op.backward)) == torch_flops(run, *vectors)


def test_an_lstm_has_the_flops_of_its_steps():
    op = lstm("o", "gates", "w", "y", batch=3, seq_len=5, hidden=4)
    weight, gates = values(16, 4), values(3, 5, 16)

    def run(gates, weight):
        h = c = torch.zeros(3, 4, requires_grad=True)
        for step in range(5):
            i, f, g, o = (gates[:, step] + F.linear(h, weight)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h

    assert (product_flops(op.forward), product_flops(op.backward)) == torch_flops(run, gates, weight)


def test_a_mean_divides_by_the_entries_of_the_whole_tensor():
    op = reduction("o", X4, operand("y", "b c"), S4)
    assert op.settings == {"function": "mean", "count": 30}
    assert op.roles.sums == ("h", "w")
    assert own_traffic(op, {"x": (2, 4, 6, 5), "y": (2, 4)}, h=2) == []


@pytest.mark.parametrize("kind", ["rotary", "concat", "prepend", "select", "flatten", "embedding_bag", "embedding"])
def test_forward_of_copies_reads_and_writes_every_entry_once(kind):
    op, read, written = COPIES[kind]
    (stream,) = op.forward
    assert sum(elements(access.extent) for access in stream.accesses) == read + written
    assert all(isinstance(work, Stream) for work in op.backward)


COPIES = {
    "rotary": (rotary("o", operand("x", "b s g ."), operand("y", "b s g ."), {"b": 2, "s": 3, "g": 5}, head_dim=4), 120, 120),
    "concat": (
        concat("o", (operand("x", "b . h"), operand("z", "b . h")), operand("y", "b . h"), {"b": 2, "h": 5}, axis=1, sizes=(3, 4)),
        70,
        70,
    ),
    "prepend": (prepend("o", operand("t", "d"), operand("x", "b . d"), operand("y", "b . d"), {"b": 2, "d": 5}, length=3), 30, 40),
    "select": (select("o", operand("x", "b . d"), operand("y", "b d"), {"b": 2, "d": 5}, axis=1, index=0, size=9), 10, 10),
    "flatten": (flatten("o", operand("x", "b n h ."), operand("y", "b h n"), {"b": 2, "h": 3, "n": 5}, width=4), 120, 120),
    "embedding_bag": (
        embedding_bag("o", operand("i", "b ."), operand("t", "v d"), operand("y", "b d"), {"b": 2, "d": 5, "v": 9}, bag=3),
        30,
        10,
    ),
    "embedding": (embedding("o", operand("i", "b s"), operand("t", "v d"), Y3, S3 | {"v": 9}), 96, 96),
}


# --- own traffic -------------------------------------------------------------------------------------------------


def own_traffic(op, shapes, **cuts):
    """(kind, ranks, elements, phase, repeats, itemsize) of one operator whose dims are cut by one axis each: `h=2`."""
    axes = tuple(MeshAxis(name=f"a{dim}", size=size, tier=0) for dim, size in cuts.items())
    tensors = {name: Tensor(name=name, shape=shape) for name, shape in shapes.items()}
    network = Graph(name="n", operators=(op,), tensors=tensors, batch=1)
    plan = network_plan(network, axes, {op.name: {dim: (f"a{dim}",) for dim in cuts}})
    check_assignment(plan.cuts, network, needs_held=True)
    rows = [row for row in network_traffic(network, plan) if row.what == "own"]
    return [(str(row.kind), plan.cuts.size(row.axes), row.num_elements, str(row.phase)[0], row.repeats, row.itemsize) for row in rows]


X, Y = {"x": (8, 16, 12), "y": (8, 16, 12)}, {"w": (12,), "z": (12,)}
SHARED = {"b": 8, "s": 16, "d": 12}


@pytest.mark.parametrize("cuts", [{"d": 4}, {"d": 2, "b": 4}])
def test_norms_reduce_their_statistics_where_features_are_cut(cuts):
    rows = 8 * 16 / cuts.get("b", 1)
    op = layer_norm("o", X3, operand("w", "d"), operand("z", "d"), Y3, SHARED)
    expected = [("all_reduce", cuts["d"], 2 * rows, phase, 1, 4.0) for phase in "fb"]
    assert own_traffic(op, X | Y, **cuts) == expected
    op = rms_norm("o", X3, operand("w", "d"), Y3, SHARED)
    assert own_traffic(op, X | {"w": (12,)}, **cuts) == [("all_reduce", cuts["d"], rows, phase, 1, 4.0) for phase in "fb"]


def test_softmax_and_cross_entropy_reduce_numbers_of_rows():
    op = softmax("o", X3, Y3, SHARED, over="d")
    assert own_traffic(op, X, d=3, s=2) == [("all_reduce", 3, 64.0, phase, 1, 4.0) for phase in "ffb"]
    op = cross_entropy("o", operand("x", "b s v"), operand("l", "b s"), operand("y", "b s"), {"b": 8, "s": 16, "v": 11})
    shapes = {"x": (8, 16, 11), "l": (8, 16), "y": (8, 16)}
    assert own_traffic(op, shapes, v=4, b=2) == [("all_reduce", 4, 64.0, "f", 1, 4.0)] * 3  # 11 words in 4 parts: uneven
    assert op.roles.sums == ()


def test_batch_norm_reduces_two_numbers_a_channel_only_if_synchronised():
    shapes = {"x": (4, 6, 8, 8), "y": (4, 6, 8, 8), "w": (6,), "z": (6,)}
    sizes = {"b": 4, "h": 8, "w": 8, "c": 6}
    operands = X4, operand("w", "c"), operand("z", "c"), operand("y", "b c h w")
    together = batch_norm("o", *operands, sizes, synchronised=True)
    assert own_traffic(together, shapes, b=2, h=2, c=3) == [("all_reduce", 4, 4.0, phase, 1, 4.0) for phase in "fb"]
    assert own_traffic(batch_norm("o", *operands, sizes), shapes, b=2, h=2, c=3) == []


def test_an_lstm_gathers_its_state_every_step_but_the_first():
    op = lstm("o", "x", "w", "y", batch=8, seq_len=16, hidden=12)
    shapes = {"x": (8, 16, 4, 12), "w": (4, 12, 12), "y": (8, 16, 12)}
    assert own_traffic(op, shapes, e=3, b=2) == [
        ("all_gather", 3, 4 * 12.0, "f", 15, 0.0),
        ("reduce_scatter", 3, 4 * 12.0, "b", 15, 0.0),
    ]
    assert own_traffic(op, shapes, b=2) == []
    with pytest.raises(InputError, match="must stay whole"):
        own_traffic(op, shapes, s=2)


def test_a_convolution_sends_rows_only_where_they_are_cut():
    op = convolution("o", Tensor(name="x", shape=(4, 8, 32, 16)), "w", "y", filters=6, window=(3, 3), padding=(1, 1))
    shapes = {"x": (4, 8, 32, 16), "w": (6, 8, 3, 3), "y": (4, 6, 32, 16)}
    assert own_traffic(op, shapes, h=4, b=2) == [("send_recv", 4, 2 * 8 * 2 * 16.0, phase, 1, 0.0) for phase in "fb"]
    assert own_traffic(op, shapes, b=4, c=2) == []


# --- bad input, and a new kind -----------------------------------------------------------------------------------

SQUARE = Tensor(name="x", shape=(2, 4, 4, 4))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: convolution("o", SQUARE, "w", "y", filters=6, window=(3, 3), groups=3), "groups=3: must divide channels=4"),
        (lambda: convolution("o", SQUARE, "w", "y", filters=6, window=(3, 3), groups=4), "groups=4: must divide filters=6"),
        (lambda: convolution("o", SQUARE, "w", "y", filters=6, window=(7, 3)), "window=7: is wider than the padded input of 4"),
        (lambda: convolution("o", SQUARE, "w", "y", filters=6, window=(3, 3), stride=(0, 1)), "stride=0: must be a whole number"),
        (
            lambda: pooling("o", SQUARE, "y", window=(2, 2), stride=(2, 2), mode="maximum"),
            "mode=maximum: is not known; did you mean 'max'",
        ),
        (lambda: pooling("o", SQUARE, "y", window=(9, 2), stride=(2, 2)), "window=9: is wider"),
        (lambda: reduction("o", X3, operand("y", "b s"), S3, function="median"), "function=median: is not known"),
        (lambda: reduction("o", X3, Y3, S3), "must lack a dim of the input"),
        (lambda: elementwise("o", "relux", (X3,), Y3, S3), "function=relux: is not known; did you mean 'relu'"),
        (lambda: layer_norm("o", X3, operand("w", "n"), None, Y3, S3 | {"n": 2}), "must be some of the dims"),
        (lambda: batch_norm("o", X3, operand("w", "n"), operand("z", "n"), Y3, S3 | {"n": 2}), "must be some of the dims"),
        (lambda: softmax("o", X3, Y3, S3, over="z"), "dim 'z': is not one of the dims"),
        (lambda: softmax("o", X3, Y3, S3, over="d", causal_queries="q"), "dim 'q': is not one of the dims"),
        (lambda: cross_entropy("o", X3, operand("l", "b s"), Y3, S3, over="d"), "dim 'd': must be a dim of the logits"),
        (lambda: embedding("o", operand("l", "b s"), operand("t", "d"), Y3, S3), "must be the vocabulary"),
        (lambda: embedding_bag("o", operand("l", "b ."), operand("t", "v d"), operand("y", "b d"), S3 | {"v": 3}, bag=0), "bag=0: must be"),
        (lambda: rotary("o", operand("x", "b ."), operand("y", "b ."), {"b": 2}, head_dim=3), "head_dim=3: must be even"),
        (lambda: concat("o", (X3,), Y3, S3, axis=1, sizes=(3,)), "axis=1: must be the whole position"),
        (lambda: concat("o", (operand("x", "b ."),), operand("y", "b ."), S3, axis=1, sizes=(3, 4)), "sizes=(3, 4): must be one for each"),
        (lambda: concat("o", (operand("x", "s ."),), operand("y", "b ."), S3, axis=1, sizes=(3,)), "must have those of the output"),
        (lambda: select("o", operand("x", "b ."), operand("y", "b"), S3, axis=1, index=5, size=5), "index=5: must be from 0 to 4"),
        (lambda: interaction("o", ("x",), "y", batch=2, features=3), "must be at least 2"),
        (
            lambda: toy("o", "x", "y", {"b": 4, "d": 8}, saved=(Data(extent=(), of=2),)),
            "keeps operand 2: has 1 inputs and the output",
        ),
    ],
)
def test_a_wrong_size_is_one_sentence(make, sentence):
    with pytest.raises(InputError) as error:
        make()
    assert "operator o: " in str(error.value)
    assert sentence in str(error.value)


def toy(name, x, y, dims, *, saved=()):
    """Return an operator of an unknown kind: entries of a row in reverse order, which moves all of them where the row is cut."""
    entries = tuple((size, dim) for dim, size in dims.items())
    copy = Stream(kernel="default", elements=entries, accesses=passes(entries, entries))
    return Operator(
        name=name,
        kind="reverse",
        dims=dims,
        inputs=(Operand(tensor=x, dims=tuple(dims)),),
        output=Operand(tensor=y, dims=tuple(dims)),
        forward=(copy,),
        backward=(copy,),
        traffic=tuple(OwnTraffic(kind=CollectiveKind.ALL_TO_ALL, over=("d",), extent=entries, phase=phase) for phase in Pass),
        saved=saved,
    )


def test_a_new_kind_is_one_function():
    b = NetworkBuilder("toys", batch=4, source="")
    x = b.linear("fc", b.input("data", 4, 6), "b k", "d k", "b d", new={"d": 8})
    x = b.add(toy("reverse", x, "reverse.out", {"b": 4, "d": 8}), 4, 8)
    b.cross_entropy(b.linear("head", x, "b d", "n d", "b n", new={"n": 3}), "b n", "n")
    network = b.build()
    assert [op.kind for op in network.operators].count("reverse") == 1
    assert network.num_parameters == 8 * 6 + 8 + 3 * 8 + 3
    axes = (MeshAxis(name="a", size=2, tier=0),)
    cut = {"fc": "d", "fc_bias": "d", "reverse": "d", "head": "d"}
    shardings = {op.name: {cut.get(op.name, "b"): ("a",)} for op in network.operators}
    plan = network_plan(network, axes, shardings)
    check_assignment(plan.cuts, network, needs_held=True)
    sent = [(row.kind, row.num_elements, row.phase) for row in network_traffic(network, plan) if row.operator == "reverse"]
    assert sent == [(CollectiveKind.ALL_TO_ALL, 4 * 4, phase) for phase in Pass]
    assert network.tensors["labels"].role is TensorRole.INDEX
    assert not any(isinstance(work, FusedAttention) for op in network.operators for work in op.forward)
