"""Kernels of training and of 16-bit decoding: their fits to a table, and to the tables of a chip."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.kernels.fits import (
    AttentionTable,
    CollectiveTable,
    MatmulTable,
    Tiles,
    bare_machine,
    fit_attention,
    fit_collective,
    fit_matmul,
    octave_weight,
    predict_attention,
    predict_collective,
    predict_matmul,
)
from lab.kernels.grouped import GroupedTable, tuned_grouped
from lab.kernels.kernel_fit import DECODE_ROWS, MEGA, MICRO, KernelFit, Parameter, fit_parameters, groups_of
from lab.kernels.tables import (
    LATENT_WIDTH,
    DecodeTable,
    read_attention,
    read_collectives,
    read_decode,
    read_latent_attention,
    read_matmuls,
    read_published_all_reduce,
    serving_decode,
)
from perfmodel.calibrate.fits import Array
from perfmodel.cost.compute import attention_decode_time, grouped_matmul_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.hardware.calibration import (
    GPU_TILES,
    LATENT_KERNEL,
    AttentionModel,
    CollectiveModel,
    DecodeAttentionModel,
    GroupedMatmulModel,
    MatmulModel,
)
from perfmodel.hardware.cluster import Cluster

if TYPE_CHECKING:
    from lab.kernels.fit import ChipTables

MEASURED_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP8: "fp8"}
"""Names of the measured dtypes in the tables."""

FEW_ROWS = f".m<{DECODE_ROWS}"


def matmul_kernel(table: MatmulTable, cluster: Cluster, dtype: Dtype, *, tiles: Tiles = GPU_TILES) -> KernelFit[MatmulTable, MatmulModel]:
    """Return the fit of matrix multiplies: a group is one weight (n, k) with all its m."""
    return KernelFit(
        name=f"matmul.{dtype}",
        table=table,
        groups=groups_of(table.n, table.k),
        fit=lambda seen: fit_matmul(seen, cluster, dtype, tiles=tiles),
        predict=lambda model, rows: predict_matmul(model, rows, cluster, dtype),
        parts={"": table.m >= DECODE_ROWS, ".m>=1024": table.m >= 1024, FEW_ROWS: table.m < DECODE_ROWS},
    )


def matmuls_of_chip(folder: Path, tables: ChipTables, dtype: Dtype) -> KernelFit[MatmulTable, MatmulModel]:
    table = read_matmuls(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    return matmul_kernel(table, tables.cluster_of_fits(), dtype, tiles=tables.tiles)


def attention_kernel(
    table: AttentionTable, cluster: Cluster, *, name: str = "flash", backward_rate: float = 1.0, head_dim_offset: float | None = None
) -> KernelFit[AttentionTable, AttentionModel]:
    """Return the fit of causal fused attention: a group is one (heads, key-value heads, head dim) with all batch sizes and lengths."""
    return KernelFit(
        name=f"attention.{name}",
        table=table,
        groups=groups_of(table.heads, table.kv_heads, table.head_dim),
        fit=lambda seen: fit_attention(seen, cluster, Dtype.BF16, backward_rate=backward_rate, head_dim_offset=head_dim_offset),
        predict=lambda model, rows: predict_attention(model, rows, cluster, Dtype.BF16),
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
    return table.rows((table.length >= 512) & np.isin(table.head_dim, (64, 128, LATENT_WIDTH)))


def collective_kernel(
    table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, *, reduces_in_switch: bool = False
) -> KernelFit[CollectiveTable, CollectiveModel]:
    """Return the fit of a collective in a node: each decade of message sizes is one fold."""
    decades = size_decades(table)
    return KernelFit(
        name=f"scale_up.{kind}",
        table=table,
        groups=decades,
        fit=lambda seen: fit_collective(seen, kind, cluster, reduces_in_switch=reduces_in_switch),
        predict=lambda model, rows: predict_collective(model, kind, rows, cluster),
        num_folds=len(np.unique(decades)),
        uses_all=True,
    )


def size_decades(table: CollectiveTable) -> Array:
    """Return the decade of each message size."""
    return np.floor(np.log10(table.num_bytes)).astype(int)


def collective_of_chip(
    folder: Path, tables: ChipTables, kind: CollectiveKind, cluster: Cluster | None = None
) -> KernelFit[CollectiveTable, CollectiveModel]:
    """Return the fit of a collective in a node; from the H100 on, NVLink SHARP reduces in the switch."""
    cluster = cluster or tables.cluster_of_fits()
    table = read_collectives(folder, tables.folder, tables.nccl, kind)
    if kind is CollectiveKind.ALL_REDUCE and tables.folder == "h100_sxm":
        published = read_published_all_reduce(folder, "H100", nodes=1)
        table = joined(table, published.rows(published.num_bytes > 2**29))  # messages beyond the other table fix the asymptote
    in_switch = kind is CollectiveKind.ALL_REDUCE and cluster.name != "dgx-a100"
    return collective_kernel(table, kind, cluster, reduces_in_switch=in_switch)


def joined(first: CollectiveTable, second: CollectiveTable) -> CollectiveTable:
    """Return the rows of both tables."""
    return CollectiveTable(
        **{
            name: np.concatenate([getattr(table, name) for table in (first, second)])
            for name in ("num_bytes", "ranks", "ranks_per_node", "time")
        },
        link_scale=np.concatenate([first.link_scales, second.link_scales]),
    )


#: Parameters of the read of a KV cache of any kind; the memory bandwidth cannot be exceeded.
CACHE_READ = {
    "memory_fraction": Parameter(0.85, 0.1, 1.0),
    "floor_time": Parameter(10, 0.1, 100, MICRO),
    "ramp_time": Parameter(12, 0, 100, MICRO),
    "ramp_bytes": Parameter(60, 1, 1000, MEGA),
    "wave_time": Parameter(2, 0, 50, MICRO),
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
    "row_fraction": Parameter(2.0, 1.0, 20, is_inverse=True),
    "expert_time": Parameter(0.03, 0, 5, MICRO),
    "floor_time": Parameter(25, 1, 300, MICRO),
}


def expert_weight(table: GroupedTable) -> Array:
    """Return the weight of each row, so that each octave of the shapes counts once."""
    return octave_weight(table.pairs / table.experts, table.experts, table.hidden_size * table.intermediate_size)


def grouped_of_chip(folder: Path, tables: ChipTables, plain: MatmulModel, dtype: Dtype) -> KernelFit[GroupedTable, GroupedMatmulModel]:
    table = tuned_grouped(folder, tables.folder, tables.gemm, MEASURED_DTYPES[dtype])
    return grouped_kernel(table, plain, tables.cluster_of_fits(), dtype)
