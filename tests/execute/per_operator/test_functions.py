"""The torch functions of the kinds, in one process, against torch's own modules or the definition written out."""

import pytest
import torch
import torch.nn.functional as F

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.layers.kernel import unsharded
from perfmodel.execute.layers.norm import normalise
from perfmodel.execute.layers.softmax import sharded_softmax
from perfmodel.execute.per_operator.collective_rules import joined, shares
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import FUNCTIONS
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.workload.graph import Operand, Operator, Tensor
from perfmodel.workload.kinds.attention import Causal, attention, rotary
from perfmodel.workload.kinds.batch_norm import batch_norm
from perfmodel.workload.kinds.convolution import convolution
from perfmodel.workload.kinds.dense import einsum, elementwise, layer_norm, reduction, rms_norm
from perfmodel.workload.kinds.dense import softmax as softmax_operator
from perfmodel.workload.kinds.interaction import interaction
from perfmodel.workload.kinds.joining import concat, flatten, prepend, select
from perfmodel.workload.kinds.lstm import lstm
from perfmodel.workload.kinds.pooling import pooling
from perfmodel.workload.kinds.vocabulary import binary_cross_entropy, cross_entropy, embedding, embedding_bag

MESH = NetworkMesh(Worker(0, 1, "cpu"), ())


def on(tensor, dims):
    return Operand(tensor=tensor, dims=tuple("" if dim == "." else dim for dim in dims.split()))


def context_of(operator: Operator) -> OperatorContext:
    return OperatorContext(MESH, operator, {}, dict(operator.dims))


def run(operator, *inputs):
    return FUNCTIONS[operator.kind](inputs, context_of(operator))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def agree(ours, theirs, *leaves):
    """Values and the gradients of a random weighting."""
    torch.testing.assert_close(ours, theirs)
    weights = random(*ours.shape, seed=99).detach()
    gradients, expected = (torch.autograd.grad((result * weights).sum(), leaves, retain_graph=True) for result in (ours, theirs))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_einsum_sums_what_the_output_lacks():
    x, w = random(2, 3, 4), random(5, 4, seed=1)
    operator = einsum("o", on("x", "b s d"), on("w", "n d"), on("y", "b n s"), {"b": 2, "s": 3, "d": 4, "n": 5})
    agree(run(operator, x, w), (x @ w.t()).transpose(1, 2), x, w)


@pytest.mark.parametrize(
    "function, expected",
    [
        ("relu", torch.relu),
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("tanh", torch.tanh),
    ],
)
def test_activations(function, expected):
    x = random(2, 3)
    agree(run(elementwise("o", function, (on("x", "b d"),), on("y", "b d"), {"b": 2, "d": 3}), x), expected(x), x)


def test_elementwise_inputs_are_aligned_by_name_and_whole_positions_from_the_last():
    dims = {"b": 2, "s": 3, "e": 5}
    x, bias, other = random(2, 3, 4, 5), random(4, 5, seed=1), random(5, 3, seed=2)
    operator = elementwise("o", "bias", (on("x", "b s . e"), on("c", ". e")), on("y", "b s . e"), dims)
    agree(run(operator, x, bias), x + bias, x, bias)
    operator = elementwise("o", "mul", (on("x", "b s . e"), on("c", "e s")), on("y", "b s . e"), dims)
    agree(run(operator, x, other), x * other.t()[None, :, None, :], x, other)


@pytest.mark.parametrize("groups, dilation", [(1, 1), (2, 1), (4, 2)])
def test_convolution(groups, dilation):
    x, w = random(2, 4, 9, 9), random(8, 4 // groups, 3, 3, seed=1)
    operator = convolution("o", Tensor(name="x", shape=(2, 4, 9, 9)), "w", "y", filters=8, window=(3, 3), stride=(2, 1),
                           padding=(1, 2), dilation=(dilation, dilation), groups=groups)  # fmt: skip
    agree(run(operator, x, w), F.conv2d(x, w, None, (2, 1), (1, 2), dilation, groups), x, w)


@pytest.mark.parametrize("mode, expected", [("max", F.max_pool2d), ("average", F.avg_pool2d)])
def test_pooling(mode, expected):
    x = random(2, 4, 9, 9)
    operator = pooling("o", Tensor(name="x", shape=(2, 4, 9, 9)), "y", window=(3, 3), stride=(2, 2), padding=(1, 1), mode=mode)
    agree(run(operator, x), expected(x, 3, 2, 1), x)


@pytest.mark.parametrize("function", ["mean", "sum"])
def test_reduction(function):
    x = random(2, 3, 4)
    operator = reduction("o", on("x", "b s d"), on("y", "d b"), {"b": 2, "s": 3, "d": 4}, function=function)
    agree(run(operator, x), getattr(x, function)(1).t(), x)


@pytest.mark.parametrize("synchronised", [False, True])
def test_batch_norm(synchronised):
    x, w, c = random(4, 3, 2, 2), random(3, seed=1), random(3, seed=2)
    dims = {"b": 4, "h": 2, "w": 2, "c": 3}
    operator = batch_norm("o", on("x", "b c h w"), on("g", "c"), on("c", "c"), on("y", "b c h w"), dims, synchronised=synchronised)
    agree(run(operator, x, w, c), F.batch_norm(x, None, None, w, c, training=True), x, w, c)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(has_bias):
    x, w, c = random(2, 3, 8), random(8, seed=1), random(8, seed=2)
    dims = {"b": 2, "s": 3, "d": 8}
    operator = layer_norm("o", on("x", "b s d"), on("g", "d"), on("c", "d") if has_bias else None, on("y", "b s d"), dims)
    leaves = (x, w, c) if has_bias else (x, w)
    agree(run(operator, *leaves), F.layer_norm(x, (8,), w, c if has_bias else None), *leaves)


def test_norm_of_each_head_with_weights_of_its_own():
    x, w = random(2, 3, 4, 8), random(4, 8, seed=1)
    operator = rms_norm("o", on("x", "b s g d"), on("w", "g d"), on("y", "b s g d"), {"b": 2, "s": 3, "g": 4, "d": 8}, over=("d",))
    agree(run(operator, x, w), F.rms_norm(x, (8,), None, 1e-6) * w, x, w)


def test_rows_of_positions_are_the_same_for_every_sequence():
    ids, table = torch.tensor([2, 0, 1]), random(5, 4)
    operator = embedding("o", on("ids", "s"), on("t", "p d"), on("y", "b s d"), {"b": 2, "s": 3, "p": 5, "d": 4})
    agree(run(operator, ids, table), F.embedding(ids, table).expand(2, 3, 4), table)


def test_rms_norm():
    x, w = random(2, 3, 8), random(8, seed=1)
    operator = rms_norm("o", on("x", "b s d"), on("g", "d"), on("y", "b s d"), {"b": 2, "s": 3, "d": 8})
    agree(run(operator, x, w), w * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), x, w)


@pytest.mark.parametrize("centred", [False, True])
def test_what_norms_do_where_a_dim_is_cut_is_what_they_do_where_it_is_not(centred):
    """The function that serves every cut, with nothing cut."""
    x, w, c = random(2, 3, 8), random(8, seed=1), random(8, seed=2)
    rows = w.view(1, 1, 8), c.view(1, 1, 8) if centred else None
    ours = normalise(x, *rows, over=(2,), count=8, eps=1e-5, centred=centred)
    theirs = F.layer_norm(x, (8,), w, c, 1e-5) if centred else F.rms_norm(x, (8,), w, 1e-5)
    agree(ours, theirs, *((x, w, c) if centred else (x, w)))


@pytest.mark.parametrize("causal", [False, True])
def test_softmax(causal):
    x = random(2, 3, 4, 4)
    dims = {"b": 2, "h": 3, "q": 4, "z": 4}
    operator = softmax_operator(
        "o", on("x", "b h q z"), on("y", "b h q z"), dims, over="z", scale=0.5, causal_queries="q" if causal else ""
    )
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1) if causal else None
    values = 0.5 * x if hidden is None else (0.5 * x).masked_fill(hidden, -torch.inf)
    agree(run(operator, x), values.softmax(-1), x)
    agree(sharded_softmax(x, position=3, scale=0.5, hidden=hidden, reduce=unsharded), values.softmax(-1), x)


def test_cross_entropy_of_any_order_of_positions():
    logits, labels = random(2, 7, 3), torch.tensor([[0, 6, 2], [3, 3, 1]])
    dims = {"b": 2, "s": 3, "v": 7}
    operator = cross_entropy("o", on("x", "b v s"), on("l", "b s"), on("y", "s b"), dims)
    agree(run(operator, logits, labels), F.cross_entropy(logits, labels, reduction="none").t(), logits)


def test_columns_that_pad_are_left_out_of_the_loss():
    logits, labels = random(2, 8), torch.tensor([0, 5])
    operator = cross_entropy("o", on("x", "b v"), on("l", "b"), on("y", "b"), {"b": 2, "v": 8})
    context = OperatorContext(MESH, operator, {}, {"b": 2, "v": 6})
    ours = FUNCTIONS["cross_entropy"]((logits, labels), context)
    agree(ours, F.cross_entropy(logits[:, :6], labels, reduction="none"), logits)


def test_binary_cross_entropy():
    logits, labels = random(4, 1), torch.rand(4, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    operator = binary_cross_entropy("o", on("x", "b n"), on("l", "b n"), on("y", "b n"), {"b": 4, "n": 1})
    p = logits.sigmoid()
    agree(run(operator, logits, labels), -(labels * p.log() + (1 - labels) * (1 - p).log()), logits)


def test_embeddings():
    table, ids = random(10, 4), torch.tensor([[1, 9, 9], [0, 1, 3]])
    operator = embedding("o", on("i", "b s"), on("t", "v d"), on("y", "b s d"), {"b": 2, "s": 3, "v": 10, "d": 4})
    agree(run(operator, ids, table), table[ids], table)
    operator = embedding_bag("o", on("i", "b ."), on("t", "v d"), on("y", "b d"), {"b": 2, "v": 10, "d": 4}, bag=3)
    agree(run(operator, ids, table), table[ids].sum(1), table)


@pytest.mark.parametrize("causal, window", [(False, 0), (True, 0), (True, 2)])
def test_attention_shares_heads_and_masks(causal, window):
    q, k, v = random(2, 5, 3, 2, 4), random(2, 5, 3, 4, seed=1), random(2, 5, 3, 4, seed=2)
    dims = {"b": 2, "q": 5, "z": 5, "g": 3, "r": 2}
    operator = attention("o", on("q", "b q g r ."), on("k", "b z g ."), on("v", "b z g ."), on("y", "b q g r ."), dims,
                         head_dim=4, causal=Causal(window=window) if causal else None)  # fmt: skip
    scores = torch.einsum("bqgrd,bzgd->bgrqz", q, k) / 2
    if causal:
        distance = torch.arange(5)[:, None] - torch.arange(5)[None, :]
        scores = scores.masked_fill((distance < 0) | ((distance >= window) if window else (distance < 0)), -torch.inf)
    agree(run(operator, q, k, v), torch.einsum("bgrqz,bzgd->bqgrd", scores.softmax(-1), v), q, k, v)


def test_rotary_turns_pairs_by_their_position():
    x = random(2, 5, 3, 4)
    operator = rotary("o", on("x", "b s g ."), on("y", "b s g ."), {"b": 2, "s": 5, "g": 3}, head_dim=4)
    angles = torch.arange(5, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    pairs = torch.complex(x[..., :2], x[..., 2:]) * turns
    agree(run(operator, x), torch.cat((pairs.real, pairs.imag), -1), x)


@pytest.mark.parametrize("steps", [1, 4])
def test_lstm_is_that_of_torch(steps):
    module = torch.nn.LSTM(6, 5, batch_first=True).double()
    x = random(2, steps, 6)
    gates = (x @ module.weight_ih_l0.t() + module.bias_ih_l0 + module.bias_hh_l0).unflatten(-1, (4, 5))
    operator = lstm("o", "g", "w", "y", batch=2, seq_len=steps, hidden=5)
    ours = run(operator, gates, module.weight_hh_l0.view(4, 5, 5))
    agree(ours, module(x)[0], x, *module.parameters())


def test_what_joins_and_parts():
    one, other, token = random(2, 3, 4), random(2, 1, 4, seed=1), random(4, seed=2)
    operator = concat("o", (on("x", "b . d"), on("y", "b . d")), on("z", "b . d"), {"b": 2, "d": 4}, axis=1, sizes=(3, 1))
    agree(run(operator, one, other), torch.cat((one, other), 1), one, other)
    operator = prepend("o", on("t", "d"), on("x", "b . d"), on("y", "b . d"), {"b": 2, "d": 4}, length=3)
    agree(run(operator, token, one), torch.cat((token.expand(2, 1, 4), one), 1), token, one)
    operator = select("o", on("x", "b . d"), on("y", "b d"), {"b": 2, "d": 4}, axis=1, index=2, size=3)
    agree(run(operator, one), one[:, 2], one)
    image = random(2, 4, 3, 5)
    operator = flatten("o", on("x", "b n h ."), on("y", "b h n"), {"b": 2, "h": 3, "n": 4}, width=5)
    agree(run(operator, image), image.flatten(2).transpose(1, 2), image)


def test_interaction_is_the_first_vector_and_each_pair():
    vectors = [random(2, 4, seed=seed) for seed in range(3)]
    operator = interaction("o", ("x", "y", "z"), "out", batch=2, features=4)
    a, b, c = vectors
    pairs = torch.stack([(b * a).sum(-1), (c * a).sum(-1), (c * b).sum(-1)], -1)
    agree(run(operator, *vectors), torch.cat((a, pairs), -1), *vectors)


def test_shares_are_put_together_again():
    x = random(4, 6, 2)
    pieces = shares(x, (2, 3, 1))
    assert len(pieces) == 6
    assert torch.equal(pieces[1], x[:2, 2:4])
    assert torch.equal(joined(pieces, (2, 3, 1)), x)
