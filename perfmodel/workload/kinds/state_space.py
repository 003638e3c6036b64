"""Chunked recurrences over a sequence: the scan of Mamba-2, the gated delta rule, their short convolution and norm.

A chunk of Q positions attends to itself below the diagonal; earlier positions enter as one state per head. Products are those of the
chunked forms. Backward has two for each, and recomputes what forward does not save (states, scores within a chunk).

Where positions are sharded, each rank sends its final state to the next: one send of all states, counted once, since work that does not
depend on them overlaps it. The convolution reads the last positions of the previous rank.

Sources: Dao and Gu 2024, arXiv 2405.21060, section 6; Yang et al. 2024, arXiv 2412.06464, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.graph import Operand, Operator, Setting
from perfmodel.workload.work import Data, Extent, OwnTraffic, Pass, Product, Stream, extent, halo_exchange

#: States are stored in float32.
_STATE_BYTES = 4.0


def causal_conv(
    name: str, x: Operand, weight: Operand, bias: Operand | None, output: Operand, dims: Mapping[str, int], *, taps: int
) -> Operator:
    """Return a depthwise convolution over the last `taps` positions (position 1), then silu: one kernel, which saves its input."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    entries = extent(dims, output.dims)
    read, written = Data(extent=entries, of=0), Data(extent=entries, of=len(inputs))
    positions, others = x.dims[1], tuple(dim for dim in x.dims if dim != x.dims[1])
    return Operator(
        name=name,
        kind="causal_conv",
        dims=dims,
        inputs=inputs,
        output=output,
        forward=(Stream(kernel="default", elements=entries, accesses=(read, written)),),
        backward=(Stream(kernel="default", elements=entries, accesses=(written.gradient, read, read.gradient)),),
        traffic=halo_exchange(positions, taps - 1, extent(dims, others)),
        saved=(read,),
        settings={"taps": taps},
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
) -> Operator:
    """Return the RMSNorm of `width` entries of x at a time, times silu(gate) before (`gates_first`) or after it, in one kernel.

    rows   extent of the separately normed rows. Saved: x and the statistics; the gate is saved with the tensor that it is a view of
    """
    entries = extent(dims, output.dims)
    x_data, gate_data, written = (Data(extent=entries, of=position) for position in (0, 1, 3))
    return Operator(
        name=name,
        kind="gated_norm",
        dims=dims,
        inputs=(x, gate, weight),
        output=output,
        forward=(Stream(kernel="rmsnorm", elements=entries, accesses=(x_data, gate_data, written)),),
        backward=(
            Stream(kernel="rmsnorm", elements=entries, accesses=(written.gradient, x_data, gate_data, x_data.gradient, gate_data.gradient)),
        ),
        saved=(x_data, Data(extent=rows, itemsize=4.0)),
        settings={"width": width, "gates_first": gates_first},
    )


class ScanChunks:
    """Chunks of the positions of x (b, s, ...): the batch of products over chunks, the length of a chunk, and half of it.

    num_chunks   0: by the number of positions
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
    chunks: ScanChunks,
    groups: Extent,
    heads: Extent,
    head_dim: int,
    state: int,
) -> Operator:
    """Return Mamba-2's scan of x[b,s,...], with inputs, B and C of each group and a step of each head: y[b,s,...].

    FLOP a token: Q G N + Q H P below the diagonal of a chunk, 2 H P N for its final state and 2 H P N for its initial state.
    """
    half, length = chunks.half, chunks.length
    scores = _product((*chunks.batch, *groups), length, half, state)
    within = _product((*chunks.batch, *heads), length, head_dim, half)
    left = _product((*chunks.batch, *heads), head_dim, state, length)
    entered = _product((*chunks.batch, *heads), length, head_dim, state)
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
    )


def delta_scan(
    name: str,
    x: Operand,
    strengths: Operand,
    parameters: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    *,
    chunks: ScanChunks,
    heads: Extent,
    key_dim: int,
    value_dim: int,
) -> Operator:
    """Return the gated delta rule on x[b,s,...], with queries, keys and values and a strength and a decay of each head: y[b,s,...].

    FLOP a token and head, d and v wide, below the diagonal of a chunk: key-key and query-key scores 2 Q d, an inverse of a triangle Q^2 /
    3, its products with keys and values Q (d + v), the weighted values Q v; and 6 d v with the state.
    """
    half, length, batch = chunks.half, chunks.length, (*chunks.batch, *heads)
    key_scores, query_scores = (_product(batch, length, half, key_dim),) * 2
    inverse = _product(batch, length, length, max(round(length / 6), 1))
    keys, values = _product(batch, length, key_dim, half), _product(batch, length, value_dim, half)
    within = _product(batch, length, value_dim, half)
    erased, entered = (_product(batch, length, value_dim, key_dim),) * 2
    left = _product(batch, key_dim, value_dim, length)
    key_products = (key_scores, inverse, keys, values)
    return _scan(
        "delta_scan",
        name,
        (x, strengths, *parameters),
        output,
        dims,
        chunks,
        forward=(*key_products, erased, left, entered, query_scores, within),
        again=(*key_products, erased, left),
        settings={"key_dim": key_dim, "value_dim": value_dim},
        states=(*batch, (key_dim * value_dim, "")),
        saved=(Data(extent=extent(dims, strengths.dims), of=1),),
    )


def _product(batch: Extent, m: int, n: int, k: int) -> Product:
    """Return a product of sizes that no axis shards."""
    return Product(batch=batch, m=((m, ""),), n=((n, ""),), k=((k, ""),))


def _scan(
    kind: str,
    name: str,
    inputs: tuple[Operand, ...],
    output: Operand,
    dims: Mapping[str, int],
    chunks: ScanChunks,
    *,
    forward: tuple[Product, ...],
    again: tuple[Product, ...],
    states: Extent,
    settings: Mapping[str, Setting],
    saved: tuple[Data, ...] = (),
) -> Operator:
    """Return a scan from its products.

    again    products that backward recomputes
    states   of all chunks: written and read, and in memory while backward runs
    saved    data that backward reads and that is no view of the convolution's saved data
    """
    x, steps, written = (
        Data(extent=extent(dims, operand.dims), of=position) for operand, position in ((inputs[0], 0), (inputs[1], 1), (output, -1))
    )
    written = replace(written, of=len(inputs))
    state = Data(extent=states, itemsize=_STATE_BYTES)
    gradients = tuple(data.gradient for data in (written, x, steps))
    passed: Extent = tuple(factor for factor in states if factor[1] != chunks.positions)
    backward = tuple(
        gradient
        for product in forward
        for gradient in (replace(product, n=product.k, k=product.n), replace(product, m=product.k, k=product.m))
    )
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
    )
