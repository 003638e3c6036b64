"""Reads published kernel tables: aiconfigurator (Apache-2.0), LLMCompass (BSD-3), SimuMax (Apache-2.0), SimAI (Apache-2.0), vidur (MIT).

`folder` is the user's copy of the tables. Only parameters fitted to them are shipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lab.kernels.kernel_fit import chosen_rows
from perfmodel.calibrate.fits import Array
from perfmodel.cost.compute import head_width
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError

AICONFIGURATOR_KINDS = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "alltoall",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulTable:
    """Measured matrix multiplies: columns of equal length; time [s]."""

    m: Array
    n: Array
    k: Array
    time: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """Measured causal fused attention, forward; time [s]."""

    batch: Array
    heads: Array
    kv_heads: Array
    length: Array
    head_dim: Array
    time: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveTable:
    """Measured collectives of one kind; ranks_per_node = ranks if all are in one node; time [s].

    link_scale  bandwidth of its links over those of the cluster that the table is fitted for  [-]
    """

    num_bytes: Array
    ranks: Array
    ranks_per_node: Array
    time: Array
    link_scale: Array | float = 1.0


_Table = TypeVar("_Table")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"data={path}: no such table; give the folder that holds the kernel tables, with aiconfigurator/ in it")
    return path


def read_frame(path: Path) -> Any:
    import pandas as pd

    _existing(path)
    try:
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"data={path}: cannot be read ({str(error).splitlines()[0]}); Parquet files need the package pyarrow") from error


def read_perf(folder: Path, chip: str, kind: str, version: str, name: str) -> Any:
    """Read a table of aiconfigurator: of a chip, a kind of kernels, and a version of the measured library."""
    return read_frame(folder / "aiconfigurator" / chip / kind / version / f"{name}.parquet")


def _column(frame: Any, name: str) -> Array:
    return np.asarray(frame[name], dtype=float)


def _medians(table: Callable[..., _Table], frame: Any, **names: str) -> _Table:
    """Return a table of the shapes, each with the median time of its repeats [s]. names: column of the table -> column of the frame."""
    frame = frame.groupby([*names.values()]).latency.median().reset_index()
    return table(**{column: _column(frame, name) for column, name in names.items()}, time=_column(frame, "latency") * 1e-3)


def read_matmuls(folder: Path, chip: str, version: str, dtype: str) -> MatmulTable:
    """Read aiconfigurator's GEMM table. `dtype` is named as in the table (bfloat16, fp8); repeats of a shape become their median."""
    frame = read_perf(folder, chip, "gemm", version, "gemm_perf")
    return _medians(MatmulTable, frame[frame.gemm_dtype == dtype], m="m", n="n", k="k")


def read_attention(folder: Path, chip: str, version: str) -> AttentionTable:
    """Read aiconfigurator's prefill attention: bf16, causal, without a window."""
    frame = read_perf(folder, chip, "attention", version, "context_attention_perf")
    frame = _without_window(frame[(frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == "bfloat16")])
    return _medians(
        AttentionTable, frame, batch="batch_size", length="isl", heads="num_heads", kv_heads="num_key_value_heads", head_dim="head_dim"
    )


def _without_window(frame: Any) -> Any:
    return frame[frame.window_size == 0] if "window_size" in frame else frame


#: Width of the tables of latent attention, DeepSeek's: queries and keys of 192 entries, values of 128.
LATENT_WIDTH = float(head_width(192.0, 128.0))


def read_latent_attention(folder: Path, chip: str, version: str) -> AttentionTable:
    """Read aiconfigurator's prefill of latent attention, bf16, causal, in its plain form: keys and values for every head."""
    frame = read_perf(folder, chip, "mla", version, "context_mla_perf")
    frame = frame[(frame.mla_dtype == "bfloat16") & (frame.kv_cache_dtype == "bfloat16")].assign(
        kv_heads=frame.num_heads, width=LATENT_WIDTH
    )
    return _medians(AttentionTable, frame, batch="batch_size", length="isl", heads="num_heads", kv_heads="kv_heads", head_dim="width")


LEAST_LENGTH, MOST_QUERIES, HEAD_DIMS = 128, 16, (64, 128)
"""Decode shapes that are fitted: cached tokens of serving, query heads to a key-value head for which libraries have a tensor-core kernel,
usual head dims."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeTable:
    """Measured decode attention; key_length counts the new token; kv_heads and head_dim are 1 for latent caches; time [s]."""

    batch: Array
    heads: Array
    kv_heads: Array
    key_length: Array
    head_dim: Array
    time: Array

    @property
    def shapes(self) -> dict[str, Any]:
        """Return the shapes as arguments of `attention_decode_time`."""
        return {name: getattr(self, name) for name in ("batch", "heads", "kv_heads", "key_length", "head_dim")}


def read_decode(folder: Path, chip: str, version: str, *, cache: str = "bfloat16") -> DecodeTable:
    """Read aiconfigurator's generation attention in bf16 without a window. cache: its dtype in the table (bfloat16, fp8)."""
    frame = read_perf(folder, chip, "attention", version, "generation_attention_perf")
    return _decode_table(_without_window(frame[(frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == cache)]))


def read_latent_decode(folder: Path, chip: str, version: str, *, cache: str) -> DecodeTable:
    """Read aiconfigurator's generation attention with a latent cache, for cache lengths of serving."""
    frame = read_perf(folder, chip, "mla", version, "generation_mla_perf")
    table = _decode_table(frame[frame.kv_cache_dtype == cache].assign(num_key_value_heads=1, head_dim=1))
    return chosen_rows(table, table.key_length >= LEAST_LENGTH)


def _decode_table(frame: Any) -> DecodeTable:
    names = {"batch": "batch_size", "heads": "num_heads", "kv_heads": "num_key_value_heads", "key_length": "key_length"}
    return _medians(DecodeTable, frame.assign(key_length=frame.isl + frame.step), **names, head_dim="head_dim")


def serving_decode(table: DecodeTable) -> DecodeTable:
    """Return the shapes that are fitted."""
    is_usual = (table.key_length >= LEAST_LENGTH) & (table.heads <= MOST_QUERIES * table.kv_heads) & np.isin(table.head_dim, HEAD_DIMS)
    return chosen_rows(table, is_usual)


def read_collectives(folder: Path, chip: str, version: str, kind: CollectiveKind) -> CollectiveTable:
    """Read aiconfigurator's NCCL table inside one node; message sizes are elements of half (2 bytes) or int8."""
    frame = read_perf(folder, chip, "comm/nccl", version, "nccl_perf")
    frame = frame[frame.op_name == AICONFIGURATOR_KINDS[kind]]
    ranks = _column(frame, "num_gpus")
    num_bytes = _column(frame, "message_size") * np.where(frame.nccl_dtype == "half", 2.0, 1.0)
    return CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=_column(frame, "latency") * 1e-3)


def read_published_all_reduce(folder: Path, chip: str, *, nodes: int) -> CollectiveTable:
    """Read published nccl-tests runs whose chip starts with `chip`, on `nodes` nodes of 8."""
    return _published_all_reduce(folder, lambda frame: frame.chip.str.startswith(chip) & (frame.nodes == nodes), nodes=nodes)


def read_many_nodes_all_reduce(folder: Path) -> CollectiveTable:
    """Read the one published all-reduce of more than two nodes: 128 ranks in nodes of 8. Its page names no hardware.

    Its largest messages reach 684 GB/s of bus bandwidth, which needs NICs of twice the usual 400 Gbit/s (Blackwell's).
    """
    return replace(_published_all_reduce(folder, lambda frame: frame.ranks == 128, nodes=16), link_scale=2.0)


def _published_all_reduce(folder: Path, chosen: Callable[[Any], Any], *, nodes: int) -> CollectiveTable:
    frame = read_frame(folder / "nccl_published_allreduce.csv")
    frame = frame[chosen(frame) & (frame.time_us > 0)]
    ranks, time = _column(frame, "ranks"), _column(frame, "time_us") * 1e-6
    return CollectiveTable(num_bytes=_column(frame, "size_bytes"), ranks=ranks, ranks_per_node=ranks / nodes, time=time)


def read_simai(folder: Path, table: str, *, nic_bandwidth: float) -> CollectiveTable:
    """Read SimAI's bus bandwidth over line rate between nodes of 8, as times.

    `table`: nic_ratio (one ring pass) or ata_ratio (all-to-all).
    """
    frame = read_frame(folder / "simai" / f"{table}.csv")
    rows = []
    for column in frame.columns[1:9]:
        nodes = int(re.findall(r"\d+", str(column))[0])
        for size, ratio in zip(frame["Size"], frame[column], strict=True):
            if nodes > 1 and np.isfinite(ratio):
                rows.append((float(size), 8.0 * nodes, float(ratio)))
    num_bytes, ranks, ratio_column = np.array(rows).T
    line_rate = nic_bandwidth * (8.0 if table == "nic_ratio" else 1.0)
    time = num_bytes * (ranks - 1) / ranks / (ratio_column * line_rate)
    return CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=np.full_like(ranks, 8.0), time=time)


def published_all_to_all() -> CollectiveTable:
    """Return NCCL's all-to-all over 2, 4 and 8 nodes of eight H100, dispatch and combine.

    Each rank sends 4,096 tokens of 7,168 entries in bf16 to 8 experts each.

    Source: Megatron-Core's report on mixtures of experts, arXiv 2603.07685, table 7.
    """
    ranks = np.array([16.0, 16.0, 32.0, 32.0, 64.0, 64.0])
    return CollectiveTable(
        num_bytes=np.full_like(ranks, 4096 * 8 * 7168 * 2.0),
        ranks=ranks,
        ranks_per_node=np.full_like(ranks, 8.0),
        time=np.array([5774.0, 5628.0, 8059.0, 7815.0, 9164.0, 8727.0]) * 1e-6,
    )


def read_vidur_sends(folder: Path, cluster: str, *, per_node: int) -> tuple[Array, Array]:
    """Read vidur's send-receive of two ranks, `per_node` of them in a node: bytes and the slower rank's median time [s]."""
    frame = read_frame(folder / "vidur" / "network" / cluster / "send_recv.csv")
    frame = frame[(frame.num_workers == 2) & (frame.devices_per_node == per_node)]
    slower = frame.groupby("size")["time_stats.send_recv.median"].max()
    return np.asarray(slower.index, dtype=float), np.asarray(slower, dtype=float) * 1e-3


def read_llmcompass(folder: Path, kernel: str) -> tuple[Array, Array]:
    """Read LLMCompass's softmax, layernorm or gelu on an A100, fp16: elements and seconds (the table gives 1e9 elements a second)."""
    *shapes, rates = np.loadtxt(_existing(folder / "llmcompass" / f"{kernel}_A100.csv"), delimiter=",", unpack=True)
    elements = np.prod(shapes, axis=0)
    return elements, elements / (rates * 1e9)


def read_simumax(folder: Path, name: str) -> dict[str, Any]:
    """Read SimuMax's system file: efficiencies of exact shapes and of classes of kernels."""
    system: dict[str, Any] = json.loads(_existing(folder / "simumax" / f"{name}.json").read_text(encoding="utf-8"))
    return system


def simumax_matmuls(system: dict[str, Any]) -> MatmulTable:
    """Return SimuMax's matrix multiplies; accumulating weight gradients are left out."""
    entry = system["accelerator"]["op"]["matmul"]
    rows = []
    for key, fraction in entry["accurate_efficient_factor"].items():
        shape = {name: int(value) for name, value in re.findall(r"\b([mnkb])=(\d+)", key)}
        if "accumulate=False" in key and shape["b"] == 1:
            rows.append((shape["m"], shape["n"], shape["k"], fraction))
    m, n, k, fractions = np.array(rows, dtype=float).T
    return MatmulTable(m=m, n=n, k=k, time=2 * m * n * k / (fractions * entry["tflops"] * 1e12))


def simumax_backward_rate(system: dict[str, Any], *, least_heads: int = 64, key_dim: int = 128) -> float:
    """Return the backward rate of the attention kernel over its forward rate: median over a head dim of keys, many heads. [-]"""
    forward = system["accelerator"]["op"]["sdp_fwd"]["accurate_efficient_factor"]
    backward = system["accelerator"]["op"]["sdp_bwd"]["accurate_efficient_factor"]
    ratios = []
    for key, rate in forward.items():
        heads, head_dim = (int(re.findall(rf"\b{name}=(\d+)", key)[0]) for name in ("head_num", "qk_head_dim"))
        if key in backward and heads >= least_heads and head_dim == key_dim:
            ratios.append(backward[key] / rate)
    return round(float(np.median(ratios)), 3)
