"""Decode attention to narrow and to latent caches: their tables, the fit to them, and its errors."""

from pathlib import Path

import numpy as np

from lab.kernels.decode import (
    LEAST_LENGTH,
    READING_LEAST,
    READING_MOST,
    READING_START,
    DecodeTable,
    decode_groups,
    decode_table,
    read_decode,
    reading_parameters,
    serving_decode,
)
from lab.kernels.held_out import unseen_errors
from lab.kernels.tables import read_perf
from perfmodel.calibrate.fits import Array, bare_machine, fit_logarithm, rounded
from perfmodel.cost.serving.kernels import cached_attention_time, latent_decode_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import FP8_CACHE, LATENT_CACHE, CachedAttentionModel, ServingKernels

LEAST_SHARED = 2
"""Query heads to a key-value head of 8 bits from which Hopper's tensor-core kernel runs; with one each it takes 1.3-1.6 times as long."""


def read_cached(folder: Path, chip: str, kernel: str, version: str) -> DecodeTable:
    """aiconfigurator's generation attention of one of `CACHED_KERNELS`, without a window; serving's shapes. Empty where there is none."""
    if kernel == FP8_CACHE:
        table = serving_decode(read_decode(folder, chip, version, cache="fp8"))
        return table.rows(table.heads >= LEAST_SHARED * table.kv_heads)
    frame = read_perf(folder, chip, "mla", version, "generation_mla_perf")
    frame = frame[frame.kv_cache_dtype == ("bfloat16" if kernel == LATENT_CACHE else "fp8")]
    table = decode_table(frame.assign(num_key_value_heads=1, head_dim=1))
    return table.rows(table.key_length >= LEAST_LENGTH)


def predict_cached(model: CachedAttentionModel, kernel: str, table: DecodeTable, cluster: Cluster) -> Array:
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


def fit_cached(table: DecodeTable, kernel: str, cluster: Cluster) -> CachedAttentionModel:
    """The model of one kernel; neither the memory bandwidth nor the peak of 16 bits (of 8, with a cache of 8) can be exceeded. No table of
    keys and values is bound by computing: its rate there is not fitted."""

    def model(x: Array) -> CachedAttentionModel:
        return CachedAttentionModel(
            **reading_parameters(x),
            query_fraction=rounded(x[5]),
            peak_fraction=rounded(x[6]) if kernel != FP8_CACHE else CachedAttentionModel().peak_fraction,
        )

    peak = 1.0 if kernel == LATENT_CACHE else 2.0
    found = fit_logarithm(
        lambda x: predict_cached(model(x), kernel, table, cluster),
        table.time,
        start=(*READING_START, 0.5, 0.6),
        lower=(*READING_LEAST, 0.05, 0.05),
        upper=(*READING_MOST, 1.0, peak),
    )
    return model(found)


def cached_errors(table: DecodeTable, kernel: str, cluster: Cluster) -> Array:
    """Of every shape, by a fit that saw its heads at no batch and no length. [-]"""
    return unseen_errors(
        decode_groups(table),
        table.time,
        table.rows,
        fit=lambda seen: fit_cached(seen, kernel, cluster),
        predict=lambda model, unseen: predict_cached(model, kernel, unseen, cluster),
    )
