"""Cost function of PaSE, in FLOP: one formula for each kind of layer, one for a tensor between two layers.

It counts a multiply-add once and communication as r FLOP a word. It ignores memory, latency, topology and overlap, which makes it
comparable with the published searches. The project's own costs are in `perfmodel.cost`.

    x   per-device size of a dim, size / c
    c   parts that a configuration splits the dim into
    P   product of all x
    AR(w, n) = r * 2 w (n - 1) / n      all-reduce of w words among n

Source: Elango, PaSE, IPDPS 2021, section III, and its released code (github.com/baidu-research/PaSE), whose tables these formulas equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.planner.pase.layer import ALL_DIMS, LayerKind, Shape, layer, names_of, shape_of, terms_of, text_of
from perfmodel.workload.graph import Operator
from perfmodel.workload.imported.graph import DimLink

Array = NDArray[np.float64]
Splits = NDArray[np.int64]

_WORD_BYTES = 8.0
#: The released code's defaults: 10 TFLOP/s and 16 GB/s.
DEFAULT_FLOP_RATE = 10e12
DEFAULT_BANDWIDTH = 16e9


def flops_per_word(*, flop_rate: float = DEFAULT_FLOP_RATE, bandwidth: float = DEFAULT_BANDWIDTH) -> float:
    """Return r, the work that is done while one word is sent. [FLOP]

    r = F / (B / 8)

    flop_rate  F  of one device          [FLOP/s]
    bandwidth  B  of one device's link   [byte/s]
    """
    F, B = flop_rate, bandwidth
    return F / (B / _WORD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """A layer under many configurations at once: rows of `splits` are configurations, columns its dims."""

    layer: Operator
    splits: Splits
    word_flops: float

    @property
    def names(self) -> str:
        return names_of(self.layer)

    @property
    def axes(self) -> str:
        return text_of(self.layer, "axes")

    @property
    def pointwise(self) -> int:
        return int(text_of(self.layer, "pointwise"))

    def parts(self, names: str) -> Array:
        """Return the product of c over some dims."""
        return _product(self.splits[:, [self.names.index(name) for name in names]].astype(np.float64))

    def share(self, names: str) -> Array:
        """Return the product of x over some dims."""
        at = [self.names.index(name) for name in names]
        return _product(np.array(list(self.layer.dims.values()), dtype=np.float64)[at] / self.splits[:, at])

    def all_reduce(self, words: Array, among: Array) -> Array:
        """Return AR(w, n)."""
        w, n = words, among
        return self.word_flops * 2.0 * w * (n - 1) / n


def _product(columns: Array) -> Array:
    return np.prod(columns, axis=-1)


def _matmul(at: SplitLayer, *, batch: str, rows: str, columns: str, inner: str, factors: tuple[int, int, int] = (1, 1, 1)) -> Array:
    """Return B [3 m n k + 3 q m n + AR(m n, c_k) + AR(m k, c_n) + AR(n k, c_m)]: forward and both gradients, with their reductions.

    Each name lists dims whose product is B, m, n or k; `factors` multiply m, n and k. q pointwise operations follow the product.
    """
    B, q = at.share(batch), at.pointwise
    m, n, k = (at.share(names) * factor for names, factor in zip((rows, columns, inner), factors, strict=True))
    c_m, c_n, c_k = at.parts(rows), at.parts(columns), at.parts(inner)
    reductions = at.all_reduce(m * n, c_k) + at.all_reduce(m * k, c_n) + at.all_reduce(n * k, c_m)
    return B * (3 * m * n * k + 3 * q * m * n + reductions)


def _convolution(at: SplitLayer) -> Array:
    """Return the cost of a matmul with m = b h w, k = c r s; halos are not counted (h and w are never split)."""
    return _matmul(at, batch="", rows="bhw", columns="n", inner="crs")


def _fully_connected(at: SplitLayer) -> Array:
    names = at.names
    return _matmul(at, batch="", rows=names[:-2], columns=names[-2], inner=names[-1])


def _einsum(at: SplitLayer) -> Array:
    first, second, output = terms_of(at.layer)
    return _matmul(
        at,
        batch="".join(name for name in output if name in first and name in second),
        rows="".join(name for name in output if name in first and name not in second),
        columns="".join(name for name in output if name in second and name not in first),
        inner="".join(name for name in at.names if name not in output and (name in first or name in second)),
    )


def _attention(at: SplitLayer) -> Array:
    """Return the cost of queries times keys, of the softmax over the keys, and of the scores times values, for each entry of b and h."""
    *leads, s, d, z, e = at.layer.dims
    heads = "".join(leads)
    names = heads + s + z
    softmax = layer(LayerKind.SOFTMAX, {name: at.layer.dims[name] for name in names}, axes=z)
    scores = replace(at, layer=softmax, splits=at.splits[:, [at.names.index(name) for name in names]])
    by_keys = _matmul(at, batch=heads, rows=s, columns=z, inner=d)
    by_values = _matmul(at, batch=heads, rows=s, columns=e, inner=z)
    return by_keys + _softmax(scores) + by_values


#: Gates of an LSTM's cell, and the two vectors (input and hidden state) that it multiplies.
_GATES, _INPUTS = 4, 2


def _lstm(at: SplitLayer) -> Array:
    """Return the cost of a matmul per layer and step, and of the hidden state [b, e] that must arrive as [b, d]."""
    layers, steps = at.layer.dims["l"], at.layer.dims["s"]
    hidden = (at.layer.dims["b"], at.layer.dims["d"])
    produced, needed = (at.splits[:, [at.names.index(name) for name in names]] for names in ("be", "bd"))
    moved = layers * steps * at.word_flops * missing_words(hidden, produced, needed)
    return _matmul(at, batch="l", rows="sb", columns="e", inner="d", factors=(1, _GATES, _INPUTS)) + moved


def _pooling(at: SplitLayer) -> Array:
    """Return P + r b c [(h + R [c_h > 1])(w + S [c_w > 1]) - h w], with h and w of the input."""
    b, c, h, w = (np.array(shape_of(at.layer, "reads"), dtype=np.float64) / at.splits).T
    R, S = shape_of(at.layer, "window")
    halo = (h + R * (at.parts("h") > 1)) * (w + S * (at.parts("w") > 1)) - h * w
    return at.share(at.names) + at.word_flops * b * c * halo


#: Operations per element of a normalisation and of a softmax, as counted in the released code.
_NORM_OPERATIONS, _NORM_REDUCTIONS, _SOFTMAX_OPERATIONS = 16, 4, 4


def _norm(at: SplitLayer) -> Array:
    """Return 16 P + 4 AR(P / x_a, c_a) + 4 AR(x_a, product of the other c)."""
    P, x_a, c_a = at.share(at.names), at.share(at.axes), at.parts(at.axes)
    others = at.parts(at.names) / c_a
    return _NORM_OPERATIONS * P + _NORM_REDUCTIONS * at.all_reduce(P / x_a, c_a) + _NORM_REDUCTIONS * at.all_reduce(x_a, others)


def _softmax(at: SplitLayer) -> Array:
    """Return 4 P + P d_a + 2 AR(P / x_a, c_a) + AR(d_a P / x_a, c_a)."""
    P, x_a, c_a = at.share(at.names), at.share(at.axes), at.parts(at.axes)
    d_a = at.layer.dims[at.axes]
    return _SOFTMAX_OPERATIONS * P + P * d_a + 2 * at.all_reduce(P / x_a, c_a) + at.all_reduce(d_a * P / x_a, c_a)


def _cross_entropy(at: SplitLayer) -> Array:
    """Return 4 P + 2 b + [c_v > 1] 2 r b, b = P / x_v, where v is the axis, or the last dim."""
    v = at.axes or at.names[-1]
    P, b = at.share(at.names), at.share(at.names.replace(v, ""))
    return _SOFTMAX_OPERATIONS * P + 2 * b + (at.parts(v) > 1) * 2 * at.word_flops * b


def _elementwise(at: SplitLayer) -> Array:
    return (1 + at.pointwise) * at.share(at.names)


def _mean(at: SplitLayer) -> Array:
    """Return AR(P, product of c over the reduced dims)."""
    return at.all_reduce(at.share(at.names), at.parts(at.axes))


def _nothing(at: SplitLayer) -> Array:
    return np.zeros(len(at.splits))


#: Cost of each kind of layer. A new kind is a line here, a formula above, and its tensors' dims in `layer.py`.
COSTS: Mapping[str, Callable[[SplitLayer], Array]] = {
    LayerKind.CONVOLUTION: _convolution,
    LayerKind.FULLY_CONNECTED: _fully_connected,
    LayerKind.EINSUM: _einsum,
    LayerKind.ATTENTION: _attention,
    LayerKind.LSTM: _lstm,
    LayerKind.POOLING: _pooling,
    LayerKind.NORM: _norm,
    LayerKind.SOFTMAX: _softmax,
    LayerKind.CROSS_ENTROPY: _cross_entropy,
    LayerKind.ELEMENTWISE: _elementwise,
    LayerKind.MEAN: _mean,
    LayerKind.CONCAT: _nothing,
    LayerKind.STACK: _nothing,
    LayerKind.UNSTACK: _nothing,
    LayerKind.RAVEL: _nothing,
    LayerKind.UNRAVEL: _nothing,
}


def layer_cost(layer: Operator, splits: Splits, *, word_flops: float) -> Array:
    """Return t_l of one layer under each configuration. [FLOP]"""
    return COSTS[layer.kind](SplitLayer(layer=layer, splits=splits, word_flops=word_flops))


def edge_cost(
    runs: Sequence[DimLink], producer: Operator, produced: Splits, consumer: Operator, consumed: Splits, *, word_flops: float
) -> Array:
    """Return t_x between each configuration of a producer and of a consumer of a tensor with these runs. [FLOP]

    It is 2 r times the missing words: forward and backward. A reshape costs nothing where the parts of both sides agree.
    """
    if not runs:
        return np.zeros((len(produced), len(consumed)))
    a = _parts_of_runs([(run.producer, run.producer_inner, run.size) for run in runs], produced, producer)
    b = _parts_of_runs([(run.consumer, run.consumer_inner, run.size) for run in runs], consumed, consumer)
    # Many configurations split the tensor alike; the words are counted once per distinct pair.
    (a, of_a), (b, of_b) = (np.unique(splits, axis=0, return_inverse=True) for splits in (a, b))
    words = 2 * word_flops * missing_words(tuple(run.size for run in runs), a[:, None, :], b[None, :, :])
    return words[of_a.ravel()[:, None], of_b.ravel()]


def _parts_of_runs(runs: Sequence[tuple[str, int, int]], splits: Splits, layer: Operator) -> Splits:
    """Return the number of parts of each run (dim, stride, size). A dim is split from outside: its outermost run first, the remaining parts
    on the next one."""
    names = names_of(layer)
    parts = np.ones((len(splits), len(runs)), dtype=np.int64)
    for dim in {dim for dim, _, _ in runs if dim}:
        left = splits.prod(axis=1) if dim == ALL_DIMS else splits[:, names.index(dim)].copy()
        columns = [column for column, run in enumerate(runs) if run[0] == dim]
        columns.sort(key=lambda column: -runs[column][1])
        if len(columns) == 1:
            parts[:, columns[0]] = left  # also where one side has fewer entries: a window, a stride
            continue
        for column in columns:
            run_parts = np.gcd(left, runs[column][2])
            parts[:, column] = run_parts
            left //= run_parts
    return parts


def missing_words(shape: Shape, produced: Splits, needed: Splits) -> Array:
    """Return the words of its share of a tensor that a consumer's device does not already hold as producer.

    max(0, prod(s / b) - I),  I = 0 if prod b > prod a else prod min(s / a, s / b)

    shape     s  of the tensor                                     [words]
    produced  a  parts of each dim at the producer; last axis: dims   [-]
    needed    b  the same at the consumer                             [-]

    If the consumer has more devices than the producer, nothing is counted as held. The assignment of parts to devices is ignored.
    """
    s, a, b = np.array(shape, dtype=np.float64), produced, needed
    held = np.where(np.prod(b, axis=-1) > np.prod(a, axis=-1), 0.0, _product(np.minimum(s / a, s / b)))
    return np.maximum(0.0, _product(s / b) - held)
