"""Decode attention to narrow and to latent caches: their tables, the fit to them, and its errors."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.fits import Array, bare_machine, fit_logarithm, rounded
from perfmodel.cost.serving.kernels import cached_attention_time, latent_decode_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import FP8_CACHE, LATENT_CACHE, CachedAttentionModel, ServingKernels
from perfmodel.lab.kernels.decode import HEAD_DIMS, LEAST_LENGTH, MOST_QUERIES
from perfmodel.lab.kernels.held_out import groups_of, unseen_errors
from perfmodel.lab.kernels.tables import read_frame

LEAST_SHARED = 2
"""Query heads to a key-value head of 8 bits from which Hopper's tensor-core kernel runs; with one each it takes 1.3-1.6 times as long."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedTable:
    """Measured decode attention: columns of one length; key_length counts the new token; kv_heads, head_dim mean nothing of a latent cache;
    time [s]."""

    batch: Array
    heads: Array
    kv_heads: Array
    key_length: Array
    head_dim: Array
    time: Array

    def rows(self, chosen: Any) -> "CachedTable":
        return CachedTable(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})


def read_cached(folder: Path, chip: str, kernel: str, version: str) -> CachedTable:
    """aiconfigurator's generation attention of one of `CACHED_KERNELS`, without a window; serving's shapes. Empty where there is none."""
    if kernel == FP8_CACHE:
        frame = read_frame(folder / "aiconfigurator" / chip / "attention" / version / "generation_attention_perf.parquet")
        frame = frame[frame.attn_dtype == "bfloat16"]
        if "window_size" in frame:
            frame = frame[frame.window_size == 0]
    else:
        frame = read_frame(folder / "aiconfigurator" / chip / "mla" / version / "generation_mla_perf.parquet")
        frame = frame.assign(num_key_value_heads=1, head_dim=HEAD_DIMS[0])
    frame = frame[frame.kv_cache_dtype == ("bfloat16" if kernel == LATENT_CACHE else "fp8")]
    frame = frame.assign(key_length=frame.isl + frame.step)
    keys = ["batch_size", "num_heads", "num_key_value_heads", "key_length", "head_dim"]
    frame = frame.groupby(keys).latency.median().reset_index()
    batch, heads, kv_heads, key_length, head_dim = (np.asarray(frame[key], dtype=float) for key in keys)
    time = np.asarray(frame.latency, dtype=float) * 1e-3
    table = CachedTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=time)
    is_usual = (key_length >= LEAST_LENGTH) & np.isin(head_dim, HEAD_DIMS)
    shares = (heads >= LEAST_SHARED * kv_heads) & (heads <= MOST_QUERIES * kv_heads)
    return table.rows(is_usual & (shares | (kernel != FP8_CACHE)))


def predict_cached(model: CachedAttentionModel, kernel: str, table: CachedTable, cluster: Cluster) -> Array:
    machine = bare_machine(cluster, Dtype.BF16, serving=ServingKernels(cached_attention={kernel: model}))
    if kernel == FP8_CACHE:
        time = cached_attention_time(
            batch=table.batch,
            heads=table.heads,
            kv_heads=table.kv_heads,
            key_length=table.key_length,
            head_dim=table.head_dim,
            cache_itemsize=1.0,
            machine=machine,
        )
    else:
        itemsize = 2.0 if kernel == LATENT_CACHE else 1.0
        time = latent_decode_time(
            batch=table.batch, heads=table.heads, key_length=table.key_length, cache_itemsize=itemsize, machine=machine
        )
    return np.asarray(time)


def fit_cached(table: CachedTable, kernel: str, cluster: Cluster) -> CachedAttentionModel:
    """The model of one kernel; neither the memory bandwidth nor the peak of 16 bits (of 8, with a cache of 8) can be exceeded. No table of
    keys and values is bound by computing: its rate there is not fitted."""

    def model(x: Array) -> CachedAttentionModel:
        return CachedAttentionModel(
            memory_fraction=rounded(x[0]),
            floor_time=rounded(x[1] * 1e-6),
            ramp_time=rounded(x[2] * 1e-6),
            ramp_bytes=rounded(x[3] * 1e6),
            wave_time=rounded(x[4] * 1e-6),
            query_fraction=rounded(x[5]),
            peak_fraction=rounded(x[6]) if kernel != FP8_CACHE else CachedAttentionModel().peak_fraction,
        )

    peak = 1.0 if kernel == LATENT_CACHE else 2.0
    found = fit_logarithm(
        lambda x: predict_cached(model(x), kernel, table, cluster),
        table.time,
        start=(0.85, 10, 12, 60, 2, 0.5, 0.6),
        lower=(0.1, 0.1, 0, 1, 0, 0.05, 0.05),
        upper=(1.0, 100, 100, 1000, 50, 1.0, peak),
    )
    return model(found)


def cached_errors(table: CachedTable, kernel: str, cluster: Cluster) -> Array:
    """Of every shape, by a fit that saw its heads at no batch and no length. [-]"""
    return unseen_errors(
        groups_of(table.heads, table.kv_heads, table.head_dim),
        table.time,
        table.rows,
        fit=lambda seen: fit_cached(seen, kernel, cluster),
        predict=lambda model, unseen: predict_cached(model, kernel, unseen, cluster),
    )
