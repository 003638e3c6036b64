"""Recurrences over a sequence, in chunks: the scan of Mamba-2, the gated delta rule, the short convolution and the norm around them.

A chunk of Q positions is attended to within itself, below the diagonal, and what went before it enters as one state for each head. Products
are those of the chunked forms; backward has two for each, and makes again what no forward pass keeps (states, scores within a chunk).

Where positions are cut, the state that a rank leaves goes to the next: a send of all states, counted once, since what does not hang on
them runs meanwhile. The convolution takes the positions before its own from the rank before.

Sources: Dao and Gu 2024, arXiv 2405.21060, section 6; Yang et al. 2024, arXiv 2412.06464, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Data, Extent, Operand, Operator, OwnTraffic, Pass, Product, Setting, Stream
from perfmodel.workload.kinds.extents import extent, halo_exchange

#: States are kept in float32.
_STATE_BYTES = 4.0


def causal_conv(
    name: str, x: Operand, weight: Operand, bias: Operand | None, output: Operand, dims: Mapping[str, int], *, taps: int, layer: str = ""
) -> Operator:
    """Each channel by a window of its own over the last `taps` positions (position 1), then silu: one kernel, which keeps its input."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    entries = extent(dims, output.dims)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    back = (replace(written, is_gradient=True), read, replace(read, is_gradient=True))
    positions, others = x.dims[1], tuple(dim for dim in x.dims if dim != x.dims[1])
    return Operator(
        name=name,
        kind="causal_conv",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="default", elements=entries, accesses=back),),
        traffic=halo_exchange(positions, taps - 1, extent(dims, others)),
        saved=(read,),
        settings={"taps": taps},
        layer=layer,
    )


def gated_norm(
    name: str,
    x: Operand,
    gate: Operand,
    weight: Operand,
    output: Operand,
    dims: Mapping[str, int],
    *,
    rows: Extent,
    width: int,
    gates_first: bool,
    layer: str = "",
) -> Operator:
    """RMSNorm of `width` entries of x at a time, and times silu(gate), before it (`gates_first`) or after it, in one kernel.

    rows   how many are normed each by itself. Kept: x and the statistics; the gate lies with what it is a piece of
    """
    entries = extent(dims, output.dims)
    x_data, gate_data, written = (Data(extent=entries, of=place) for place in (0, 1, 3))
    back = (replace(written, is_gradient=True), x_data, gate_data, replace(x_data, is_gradient=True), replace(gate_data, is_gradient=True))
    return Operator(
        name=name,
        kind="gated_norm",
        dims=dims,
        inputs=(x, gate, weight),
        output=output,
        forward=(Stream(kernel="rmsnorm", elements=entries, accesses=(x_data, gate_data, written)),),
        backward=(Stream(kernel="rmsnorm", elements=entries, accesses=back),),
        saved=(x_data, Data(extent=rows, itemsize=4.0)),
        settings={"width": width, "gates_first": gates_first},
        layer=layer,
    )


class Chunks:
    """Chunks of the positions of x (b, s, ...): their number as a batch of products, the length of one, and half of it.

    num_chunks   0: as many as the positions need
    """

    def __init__(self, x: Operand, dims: Mapping[str, int], *, chunk: int, num_chunks: int = 0) -> None:
        batch, positions = x.dims[:2]
        self.length = chunk if num_chunks else min(chunk, dims[positions])
        self.half = max(self.length // 2, 1)
        self.positions = positions
        self.batch: Extent = (*extent(dims, (batch,)), (num_chunks or ceil(dims[positions] / self.length), positions))


def state_scan(
    name: str,
    x: Operand,
    steps: Operand,
    parameters: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    chunks: Chunks,
    groups: Extent,
    heads: Extent,
    head_dim: int,
    state: int,
    layer: str = "",
) -> Operator:
    """Mamba-2's scan of x[b,s,...], which holds inputs, B and C of each group, with a step of each head: y[b,s,...].

    FLOP a token: Q G N + Q H P below the diagonal of a chunk, 2 H P N for what it leaves and as many for what came before it.
    """
    half, whole = chunks.half, chunks.length
    scores = _product((*chunks.batch, *groups), whole, half, state)
    within = _product((*chunks.batch, *heads), whole, head_dim, half)
    left = _product((*chunks.batch, *heads), head_dim, state, whole)
    entered = _product((*chunks.batch, *heads), whole, head_dim, state)
    return _scan(
        "state_scan",
        name,
        (x, steps, *parameters),
        output,
        dims,
        chunks,
        forward=(scores, left, entered, within),
        again=(scores, left),
        settings={"state": state, "head_dim": head_dim},
        states=(*chunks.batch, *heads, (head_dim * state, "")),
        layer=layer,
    )


def delta_scan(
    name: str,
    x: Operand,
    strengths: Operand,
    parameters: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    chunks: Chunks,
    heads: Extent,
    key_dim: int,
    value_dim: int,
    layer: str = "",
) -> Operator:
    """The gated delta rule on x[b,s,...], which holds queries, keys and values, with a strength and a decay of each head: y[b,s,...].

    FLOP a token and head, d and v wide, below the diagonal of a chunk: scores of keys with keys and with queries 2 Q d, an inverse of a
    triangle Q^2 / 3, what it makes of keys and values Q (d + v), what scores weigh Q v; and 6 d v with the state.
    """
    half, whole, batch = chunks.half, chunks.length, (*chunks.batch, *heads)
    key_scores, query_scores = (_product(batch, whole, half, key_dim),) * 2
    inverse = _product(batch, whole, whole, max(round(whole / 6), 1))
    keys, values = _product(batch, whole, key_dim, half), _product(batch, whole, value_dim, half)
    within = _product(batch, whole, value_dim, half)
    erased, entered = (_product(batch, whole, value_dim, key_dim),) * 2
    left = _product(batch, key_dim, value_dim, whole)
    made = (key_scores, inverse, keys, values)
    return _scan(
        "delta_scan",
        name,
        (x, strengths, *parameters),
        output,
        dims,
        chunks,
        forward=(*made, erased, left, entered, query_scores, within),
        again=(*made, erased, left),
        settings={"key_dim": key_dim, "value_dim": value_dim},
        states=(*batch, (key_dim * value_dim, "")),
        saved=(Data(extent=extent(dims, strengths.dims), of=1),),
        layer=layer,
    )


def _product(batch: Extent, m: int, n: int, k: int) -> Product:
    """A product of sizes that no axis cuts."""
    return Product(batch=batch, m=((m, ""),), n=((n, ""),), k=((k, ""),))


def _scan(
    kind: str,
    name: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    chunks: Chunks,
    *,
    forward: tuple[Product, ...],
    again: tuple[Product, ...],
    states: Extent,
    settings: Mapping[str, Setting],
    saved: tuple[Data, ...] = (),
    layer: str,
) -> Operator:
    """again: what backward makes a second time. states: of all chunks, which are written and read, and are there while it runs.

    saved   what backward reads that is no piece of what the convolution keeps
    """
    x, steps, written = (Data(extent=extent(dims, each.dims), of=place) for each, place in ((inputs[0], 0), (inputs[1], 1), (output, -1)))
    written = replace(written, of=len(inputs))
    state = Data(extent=states, itemsize=_STATE_BYTES)
    gradients = tuple(replace(each, is_gradient=True) for each in (written, x, steps))
    passed: Extent = tuple(each for each in states if each[1] != chunks.positions)
    backward = tuple(gradient for each in forward for gradient in (replace(each, n=each.k, k=each.n), replace(each, m=each.k, k=each.m)))
    return Operator(
        name=name,
        kind=kind,
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(*forward, Stream(kernel="default", elements=written.extent, accesses=(x, steps, state, state, written))),
        backward=(*again, *backward, Stream(kernel="default", elements=x.extent, accesses=(x, steps, *(state,) * 4, *gradients))),
        traffic=tuple(
            OwnTraffic(kind=CollectiveKind.SEND_RECV, over=(chunks.positions,), extent=passed, phase=phase, itemsize=_STATE_BYTES)
            for phase in Pass
        ),
        saved=saved,
        scratch=(state,),
        settings=settings,
        layer=layer,
    )
