"""Kernels of training and of 16-bit decoding: their fits to a table, and to the tables of a chip."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from lab.kernels.chips import ChipTables, Tiles
from lab.kernels.grouped import GroupedTable, tuned_grouped
from lab.kernels.kernel_fit import (
    DECODE_ROWS,
    EACH_GROUP,
    KernelFit,
    Parameter,
    bare_machine,
    chosen_rows,
    fit_parameters,
    groups_of,
    inverse,
    joined,
    mega,
    micro,
    octave_weight,
)
from lab.kernels.tables import (
    LATENT_WIDTH,
    AttentionTable,
    CollectiveTable,
    DecodeTable,
    MatmulTable,
    read_attention,
    read_collectives,
    read_decode,
    read_latent_attention,
    read_matmuls,
    read_published_all_reduce,
    serving_decode,
)
from perfmodel.calibrate.fits import Array
from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_decode_time, attention_time, grouped_matmul_time, matmul_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.hardware.calibration import (
    GPU_TILES,
    LATENT_KERNEL,
    SCALE_UP,
    AttentionModel,
    CollectiveModel,
    DecodeAttentionModel,
    GroupedMatmulModel,
    MatmulModel,
)
from perfmodel.hardware.cluster import Cluster

MEASURED_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP8: "fp8"}
"""Names of the measured dtypes in the tables."""

FEW_ROWS = f".m<{DECODE_ROWS}"


LARGE_TIME = 1e-4
"""Time at peak rate of a large product. [s] In a fit it counts twice as much as a small one, larger ones up to three times, as they
dominate a step."""

#: Parameters of matrix multiplies: the start is the mean of four chips, the bounds are around it.
MATMUL = {
    "peak_fraction": Parameter(0.8, 0.3, 1.2),
    "depth_offset": Parameter(80, 0, 600),
    "wave_softness": Parameter(0.2, 0, 1, lambda value: value if value > 1e-3 else 0.0),  # 0 costs less to evaluate
    "memory_fraction": Parameter(0.9, 0.3, 1.2),
    "floor_time": Parameter(3, 0.1, 20, micro),
    "sharpness": Parameter(3, 1, 8),
    "small_tile_penalty": Parameter(0.1, 0, 1),
    "least_waves": Parameter(0.6, 0.05, 2),
    "split_depth": Parameter(8, 4, 11.5, np.exp),
}


def matmul_kernel(table: MatmulTable, cluster: Cluster, dtype: Dtype, *, tiles: Tiles = GPU_TILES) -> KernelFit[MatmulTable, MatmulModel]:
    """Return the fit of matrix multiplies: a group is one weight (n, k) with all its m."""

    def predict(model: MatmulModel, rows: MatmulTable) -> Array:
        machine = bare_machine(cluster, dtype, matmul={dtype: model})
        return np.asarray(matmul_time(batch=1.0, m=rows.m, n=rows.n, k=rows.k, itemsize=itemsize(dtype), machine=machine))

    def fit(seen: MatmulTable) -> MatmulModel:
        size = 2 * seen.m * seen.n * seen.k / (cluster.chip.flop_rate(dtype) * LARGE_TIME)
        weight = octave_weight(seen.m, seen.n, seen.k) * (1.0 + 2.0 * size / (1.0 + size))
        make = partial(MatmulModel, tiles=tiles)
        return fit_parameters(make, MATMUL, lambda model: predict(model, seen), seen.time, weight=weight / weight.mean())

    return KernelFit(
        name=f"matmul.{dtype}",
        table=table,
        groups=groups_of(table.n, table.k),
        fit=fit,
        predict=predict,
        parts={"": table.m >= DECODE_ROWS, ".m>=1024": table.m >= 1024, FEW_ROWS: table.m < DECODE_ROWS},
    )


def matmuls_of_chip(folder: Path, tables: ChipTables, dtype: Dtype) -> KernelFit[MatmulTable, MatmulModel]:
    table = read_matmuls(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    return matmul_kernel(table, tables.cluster_of_fits(), dtype, tiles=tables.tiles)


ATTENTION = {
    "peak_fraction": Parameter(0.6, 0.1, 0.9),
    "head_dim_offset": Parameter(20, 0, 200),
    "sequence_offset": Parameter(3, 0, 40, lambda value: value * 1e4),
    "floor_time": Parameter(14, 1, 60, micro),
    "wave_softness": Parameter(0.3, 0, 1),
    "memory_fraction": Parameter(0.5, 0.05, 2),
}


def attention_kernel(
    table: AttentionTable, cluster: Cluster, *, name: str = "flash", backward_rate: float = 1.0, head_dim_offset: float | None = None
) -> KernelFit[AttentionTable, AttentionModel]:
    """Return the fit of causal fused attention, forward: a group is one (heads, key-value heads, head dim) with all batches and lengths.

    With a single head dim in the table, its offset cannot be separated from the peak: pass `head_dim_offset`.
    """
    fixed = {"backward_rate": backward_rate, **({} if head_dim_offset is None else {"head_dim_offset": head_dim_offset})}

    def predict(model: AttentionModel, rows: AttentionTable) -> Array:
        time = attention_time(
            batch=rows.batch,
            heads=rows.heads,
            kv_heads=rows.kv_heads,
            query_length=rows.length,
            key_length=rows.length,
            head_dim=rows.head_dim,
            causal_fraction=0.5,
            itemsize=itemsize(Dtype.BF16),
            machine=bare_machine(cluster, Dtype.BF16, attention={"flash": model}),
        )
        return np.asarray(time)

    def make(**values: float) -> AttentionModel:
        return AttentionModel(**(values | fixed))

    return KernelFit(
        name=f"attention.{name}",
        table=table,
        groups=groups_of(table.heads, table.kv_heads, table.head_dim),
        fit=lambda seen: fit_parameters(make, ATTENTION, lambda model: predict(model, seen), seen.time),
        predict=predict,
        uses_all=True,
    )


def attention_of_chip(folder: Path, tables: ChipTables, *, backward_rate: float = 1.0) -> KernelFit[AttentionTable, AttentionModel]:
    table = training_attention(read_attention(folder, tables.folder, tables.attention))
    return attention_kernel(table, tables.cluster_of_fits(), backward_rate=backward_rate)


def latent_attention_of_chip(
    folder: Path, tables: ChipTables, flash: AttentionModel, *, backward_rate: float
) -> KernelFit[AttentionTable, AttentionModel]:
    """Return the fit of attention with narrower values than keys. One width is measured; the cost per score is that of `flash`."""
    table = training_attention(read_latent_attention(folder, tables.folder, tables.latent))
    offset = flash.head_dim_offset
    return attention_kernel(table, tables.cluster_of_fits(), name=LATENT_KERNEL, backward_rate=backward_rate, head_dim_offset=offset)


def training_attention(table: AttentionTable) -> AttentionTable:
    """Return the shapes of training: lengths from 512, head dims 64 and 128, and those of latent attention."""
    return chosen_rows(table, (table.length >= 512) & np.isin(table.head_dim, (64, 128, LATENT_WIDTH)))


RING_STEP_BYTES, EXCHANGE_STEP_BYTES, BULK_BYTES = 2.0**12, 2.0**14.5, 2.0**20
"""Chunk sizes at which NCCL's latency steps up (rings, all-to-alls) and from which transfers are bandwidth-bound. They are similar on A100,
H100 and B200 with 2, 4 and 8 ranks, so they are not fitted for each."""

REDUCE_RAMP_EXPONENT = 0.7
"""Exponent of the ramp of an all-reduce, which also changes its algorithm (tree, ring, in the switch), not only its protocol."""

COLLECTIVE = {
    "base_time": Parameter(8, 0.1, 60, micro),
    "hop_time": Parameter(1, 0, 30, micro),
    "bandwidth_fraction": Parameter(0.8, 0.5, 1.0),
    "own_share": Parameter(0.4, 0, 1.5),
    "step_share": Parameter(0.3, 0, 3),
    "bulk_time": Parameter(10, 0, 100, micro),
    "switch_fraction": Parameter(0.6, 0.5, 1.0),
    "ramp_time": Parameter(2, 0, 60, micro),
}


def collective_kernel(
    table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, *, reduces_in_switch: bool = False
) -> KernelFit[CollectiveTable, CollectiveModel]:
    """Return the fit of a collective in a node: each decade of message sizes is one fold.

    reduces_in_switch   the switch can add, so that all-reduce has a second bound
    """
    fixed = {
        "step_bytes": EXCHANGE_STEP_BYTES if kind is CollectiveKind.ALL_TO_ALL else RING_STEP_BYTES,
        "bulk_bytes": BULK_BYTES,
        "ramp_exponent": REDUCE_RAMP_EXPONENT,
        **({} if reduces_in_switch else {"switch_fraction": 0.0}),
        **({} if kind is CollectiveKind.ALL_REDUCE else {"ramp_time": 0.0}),
    }

    def predict(model: CollectiveModel, rows: CollectiveTable) -> Array:
        machine = bare_machine(cluster, next(iter(cluster.chip.peak_flop_rate)), collectives={SCALE_UP: {kind: model}})
        inside = [rows.ranks] * len(cluster.tiers)
        return np.asarray(collective_time(kind, rows.num_bytes, group_size=rows.ranks, inside=inside, machine=machine))

    def make(**values: float) -> CollectiveModel:
        return CollectiveModel(**(values | fixed))

    def fit(seen: CollectiveTable) -> CollectiveModel:
        weight = np.sqrt(seen.ranks / seen.ranks.mean())
        return fit_parameters(make, COLLECTIVE, lambda model: predict(model, seen), seen.time, weight=weight)

    return KernelFit(
        name=f"scale_up.{kind}",
        table=table,
        groups=size_decades(table),
        fit=fit,
        predict=predict,
        num_folds=EACH_GROUP,
        uses_all=True,
    )


def size_decades(table: CollectiveTable) -> Array:
    """Return the decade of each message size."""
    return np.floor(np.log10(table.num_bytes)).astype(int)


def collective_of_chip(
    folder: Path, tables: ChipTables, kind: CollectiveKind, cluster: Cluster | None = None
) -> KernelFit[CollectiveTable, CollectiveModel]:
    """Return the fit of a collective in a node."""
    cluster = cluster or tables.cluster_of_fits()
    table = read_collectives(folder, tables.folder, tables.nccl, kind)
    if kind is CollectiveKind.ALL_REDUCE and tables.large_all_reduces:
        published = read_published_all_reduce(folder, tables.large_all_reduces, nodes=1)
        table = joined(table, chosen_rows(published, published.num_bytes > 2**29))  # messages beyond the other table fix the asymptote
    return collective_kernel(table, kind, cluster, reduces_in_switch=kind is CollectiveKind.ALL_REDUCE and tables.reduces_in_switch)


#: Parameters of the read of a KV cache of any kind; the memory bandwidth cannot be exceeded.
CACHE_READ = {
    "memory_fraction": Parameter(0.85, 0.1, 1.0),
    "floor_time": Parameter(10, 0.1, 100, micro),
    "ramp_time": Parameter(12, 0, 100, micro),
    "ramp_bytes": Parameter(60, 1, 1000, mega),
    "wave_time": Parameter(2, 0, 50, micro),
}


def decode_kernel(table: DecodeTable, cluster: Cluster, dtype: Dtype = Dtype.BF16) -> KernelFit[DecodeTable, DecodeAttentionModel]:
    """Return the fit of decode attention: a group is one (heads, key-value heads, head dim) with all batch sizes and lengths."""

    def predict(model: DecodeAttentionModel, rows: DecodeTable) -> Array:
        machine = bare_machine(cluster, dtype, decode_attention={"flash": model})
        return np.asarray(attention_decode_time(**rows.shapes, itemsize=itemsize(dtype), machine=machine))

    return KernelFit(
        name="decode_attention.flash",
        table=table,
        groups=groups_of(table.heads, table.kv_heads, table.head_dim),
        fit=lambda seen: fit_parameters(DecodeAttentionModel, CACHE_READ, lambda model: predict(model, seen), seen.time),
        predict=predict,
    )


def decode_of_chip(folder: Path, tables: ChipTables) -> KernelFit[DecodeTable, DecodeAttentionModel]:
    return decode_kernel(serving_decode(read_decode(folder, tables.folder, tables.attention)), tables.cluster_of_fits())


def grouped_kernel(table: GroupedTable, plain: MatmulModel, cluster: Cluster, dtype: Dtype) -> KernelFit[GroupedTable, GroupedMatmulModel]:
    """Return the fit of the fused experts kernel: a group is one layer with all numbers of chips and tokens.

    Neither the peak nor the memory bandwidth can be exceeded. plain: model of the chip's matrix multiplies.
    """
    parameters = {
        "rate_fraction": Parameter(0.9, 0.1, 1.0 / plain.peak_fraction),
        "memory_fraction": Parameter(0.9, 0.1, 1.0 / plain.memory_fraction),
        **EXPERT_ROWS,
    }

    def predict(model: GroupedMatmulModel, rows: GroupedTable) -> Array:
        machine = bare_machine(cluster, dtype, matmul={dtype: plain}, grouped_matmul={dtype: model})
        return np.asarray(grouped_matmul_time(**rows.shapes, itemsize=itemsize(dtype), machine=machine))

    return KernelFit(
        name=f"grouped_matmul.{dtype}",
        table=table,
        groups=table.layer,
        fit=lambda seen: fit_parameters(
            GroupedMatmulModel, parameters, lambda model: predict(model, seen), seen.time, weight=expert_weight(seen)
        ),
        predict=predict,
    )


#: Parameters of experts kernels: rows per expert at half the rate, time per expert and per kernel.
EXPERT_ROWS = {
    "row_fraction": Parameter(2.0, 1.0, 20, inverse),
    "expert_time": Parameter(0.03, 0, 5, micro),
    "floor_time": Parameter(25, 1, 300, micro),
}


def expert_weight(table: GroupedTable) -> Array:
    """Return the weight of each row, so that each octave of the shapes counts once."""
    return octave_weight(table.pairs / table.experts, table.experts, table.hidden_size * table.intermediate_size)


def grouped_of_chip(folder: Path, tables: ChipTables, plain: MatmulModel, dtype: Dtype) -> KernelFit[GroupedTable, GroupedMatmulModel]:
    table = tuned_grouped(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    return grouped_kernel(table, plain, tables.cluster_of_fits(), dtype)
