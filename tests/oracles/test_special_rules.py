"""Operators whose rule is not restriction to dims alone: sharded norms and losses, grouped-query weights, biases; run on ranks."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.parallel.algebra.derive import derive
from perfmodel.parallel.algebra.sharding import gradient_layout, output_layout
from perfmodel.workload.graph import Graph, Operand, Operator, Repeat, Tensor, TensorRole
from perfmodel.workload.kinds.dense import einsum, layer_norm, rms_norm
from perfmodel.workload.kinds.vocabulary import cross_entropy
from perfmodel.workload.work import Pass

N = 4


def all_reduce(parts: list[np.ndarray], how=np.add) -> list[np.ndarray]:
    return [how.reduce(parts)] * len(parts)


def of(tensor: str, dims: str) -> Operand:
    return Operand(tensor=tensor, dims=tuple(dims))


def one_operator(op: Operator, *roles: str) -> Graph:
    """`roles`: those of its inputs."""
    tensors = {
        operand.tensor: Tensor(
            name=operand.tensor, shape=tuple(op.dims[d] for d in operand.dims), role=TensorRole(role), itemsize=2.0, num_rows=1
        )
        for operand, role in zip(op.operands, (*roles, "activation"), strict=True)
    }
    return Graph(
        name="one",
        operators=(replace(op, layer="layer"),),
        tensors=tensors,
        repeats=(Repeat(layer="layer", count=1, carried=op.output.tensor),),
    )


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_over_a_cut_dim_reduces_statistics_once_each_way(kind):
    """h on four ranks: one message of 1 (RMS) or 2 (LayerNorm) fp32 words a row forward, and the same backward; output stays cut."""
    random = np.random.default_rng(1)
    x, g, w = random.normal(size=(8, 8)), random.normal(size=(8, 8)), random.normal(size=8)
    words = 2 if kind == "layernorm" else 1

    def statistics(local):
        return np.stack([(local**2).sum(axis=1), local.sum(axis=1)][:words])

    xs, gs, ws = np.split(x, N, axis=1), np.split(g, N, axis=1), np.split(w, N)
    messages = 0
    forward = all_reduce([statistics(part) for part in xs])
    messages += forward[0].size
    mean = forward[0][1] / 8 if words == 2 else np.zeros(8)
    deviation = np.sqrt(forward[0][0] / 8 - mean**2)
    units = [(part - mean[:, None]) / deviation[:, None] for part in xs]
    sums = all_reduce(
        [np.stack([(gp * wp * u).sum(axis=1), (gp * wp).sum(axis=1)][:words]) for gp, wp, u in zip(gs, ws, units, strict=True)]
    )
    messages += sums[0].size
    middle = sums[0][1] / 8 if words == 2 else np.zeros(8)
    local = [
        (gp * wp - u * sums[0][0][:, None] / 8 - middle[:, None]) / deviation[:, None] for gp, wp, u in zip(gs, ws, units, strict=True)
    ]

    def loss(x):
        centred = x - (x.mean(axis=1, keepdims=True) if words == 2 else 0)
        return (centred / np.sqrt((centred**2).mean(axis=1, keepdims=True)) * w * g).sum()

    step = 1e-6
    true = np.array(
        [
            [(loss(x + step * e) - loss(x - step * e)) / (2 * step) for e in np.eye(64).reshape(64, 8, 8)[8 * i : 8 * i + 8]]
            for i in range(8)
        ]
    )
    np.testing.assert_allclose(np.concatenate(local, axis=1), true, atol=1e-6)

    x, weight, output, dims = of("x", "sh"), of("w", "h"), of("out", "sh"), {"s": 8, "h": 8}
    op = rms_norm("op", x, weight, output, dims) if words == 1 else layer_norm("op", x, weight, None, output, dims)
    graph = one_operator(op, "index", "parameter")
    derivation = derive(graph, {"op": {"h": ("tp_kv",)}})
    assert [(t.phase, t.kind, t.amount.base) for t in derivation.traffic] == [
        (Pass.FORWARD, "all_reduce", 4.0 * words * 8),
        (Pass.BACKWARD, "all_reduce", 4.0 * words * 8),
    ]
    assert sum(t.amount.base for t in derivation.traffic) == 4.0 * messages
    assert derivation.left["out"].cuts == ((), ("tp_kv",))
    assert derivation.parameters[0].gradient_axes == frozenset()


def test_cross_entropy_over_a_cut_vocabulary_reduces_three_numbers_a_token():
    """Maximum, sum of exponentials and target logit are all-reduced; the gradient needs nothing further."""
    random = np.random.default_rng(2)
    logits, labels = random.normal(size=(8, 8)), random.integers(0, 8, 8)
    parts, firsts = np.split(logits, N, axis=1), np.arange(N) * 2
    top = all_reduce([part.max(axis=1) for part in parts], np.maximum)[0]
    total = all_reduce([np.exp(part - top[:, None]).sum(axis=1) for part in parts])[0]
    mine = [(labels >= first) & (labels < first + 2) for first in firsts]
    target = all_reduce(
        [np.where(m, p[np.arange(8), np.where(m, labels - f, 0)], 0.0) for m, p, f in zip(mine, parts, firsts, strict=True)]
    )[0]
    exponentials = np.exp(logits)
    np.testing.assert_allclose(np.log(total) + top - target, np.log(exponentials.sum(axis=1)) - logits[np.arange(8), labels])
    local = [np.exp(p - top[:, None]) / total[:, None] - (labels[:, None] == f + np.arange(2)) for p, f in zip(parts, firsts, strict=True)]
    true = exponentials / exponentials.sum(axis=1, keepdims=True) - (labels[:, None] == np.arange(8))
    np.testing.assert_allclose(np.concatenate(local, axis=1), true)

    op = cross_entropy("op", of("logits", "sv"), of("labels", "s"), of("out", "s"), {"s": 8, "v": 8})
    graph = one_operator(op, "parameter", "index")
    derivation = derive(graph, {"op": {"v": ("tp_kv",)}})
    assert [(t.phase, t.kind, t.amount.base) for t in derivation.traffic] == [(Pass.FORWARD, "all_reduce", 4.0 * 8)] * 3
    assert derivation.left["out"].partial == frozenset()


def test_weight_form_of_grouped_queries():
    """k is made once on each of the ranks that share a key-value head, for its own queries: gradients of x and W are partial there."""
    random = np.random.default_rng(3)
    x, W, q, g = (random.normal(size=shape) for shape in ((5, 6), (3, 6), (5, 8, 3), (8, 5, 5)))
    scores = np.einsum("qrd,zd->rqz", q, x @ W.T)
    local_q, local_g = np.split(q, N, axis=1), np.split(g, N, axis=0)
    local_k = [x @ W.T for _ in range(N)]  # replicated work on each rank, from the whole weight
    np.testing.assert_allclose(np.concatenate([np.einsum("qrd,zd->rqz", a, k) for a, k in zip(local_q, local_k, strict=True)]), scores)
    to_k = [np.einsum("rqz,qrd->zd", gp, qp) for gp, qp in zip(local_g, local_q, strict=True)]
    gradient = np.einsum("rqz,qrd->zd", g, q)
    np.testing.assert_allclose(sum(k.T @ x for k in to_k), gradient.T @ x)
    np.testing.assert_allclose(sum(k @ W for k in to_k), gradient @ W)
    assert not np.allclose(to_k[0].T @ x, gradient.T @ x)

    product = einsum("op", of("x", "sh"), of("w", "dh"), of("out", "scd"), {"s": 8, "c": 1, "d": 8, "h": 8})
    graph = one_operator(replace(product, roles=replace(product.roles, stretched=("c",))), "index", "parameter")
    op, sharding = graph.operators[0], {"c": ("tp_q",)}
    assert output_layout(op, sharding).cuts == ((), ("tp_q",), ())
    assert output_layout(op, sharding).partial == frozenset()
    assert [gradient_layout(sharding, operand).partial for operand in op.inputs] == [{"tp_q"}, {"tp_q"}]


def test_a_bias_inside_a_contraction_would_be_added_n_times():
    """Why a bias is an operator of its own, after the reduction (R5)."""
    random = np.random.default_rng(4)
    x, W, bias = random.normal(size=(3, 8)), random.normal(size=(8, 5)), random.normal(size=5)
    pieces = list(zip(np.split(x, N, axis=1), np.split(W, N, axis=0), strict=True))
    inside = sum(a @ b + bias for a, b in pieces)
    np.testing.assert_allclose(inside, x @ W + N * bias)
    np.testing.assert_allclose(sum(a @ b for a, b in pieces) + bias, x @ W + bias)


def test_a_partial_sum_through_a_nonlinear_operator_is_wrong():
    """Why only additions take partial sums (R6)."""
    random = np.random.default_rng(5)
    parts = random.normal(size=(N, 6))
    assert not np.allclose(np.tanh(parts).sum(axis=0), np.tanh(parts.sum(axis=0)))
    other = random.normal(size=(N, 6))
    np.testing.assert_allclose((parts + other).sum(axis=0), parts.sum(axis=0) + other.sum(axis=0))
