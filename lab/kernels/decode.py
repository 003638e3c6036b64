"""Decode attention (one new token a sequence against its cache): its tables, the fit to them, and its errors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.kernels.held_out import groups_of, unseen_errors
from lab.kernels.tables import read_perf
from perfmodel.calibrate.fits import Array, bare_machine, chosen_rows, fit_logarithm, rounded
from perfmodel.cost.compute import attention_decode_time
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.hardware.calibration import DecodeAttentionModel
from perfmodel.hardware.cluster import Cluster

LEAST_LENGTH, MOST_QUERIES, HEAD_DIMS = 128, 16, (64, 128)
"""What is fitted: caches of serving, query heads to a key-value head for which libraries have a tensor-core kernel, usual head dims."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeTable:
    """Measured decode attention: columns of one length; key_length counts the new token; kv_heads, head_dim mean nothing of a latent cache;
    time [s]."""

    batch: Array
    heads: Array
    kv_heads: Array
    key_length: Array
    head_dim: Array
    time: Array

    def rows(self, chosen: Any) -> "DecodeTable":
        return chosen_rows(self, chosen)


def read_decode(folder: Path, chip: str, version: str, *, cache: str = "bfloat16") -> DecodeTable:
    """aiconfigurator's generation attention in bf16 with a cache as it says (bfloat16, fp8), without a window."""
    frame = read_perf(folder, chip, "attention", version, "generation_attention_perf")
    frame = frame[(frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == cache)]
    if "window_size" in frame:
        frame = frame[frame.window_size == 0]
    return decode_table(frame)


def decode_table(frame: Any) -> DecodeTable:
    """Of aiconfigurator's columns; repeats of a shape become their median."""
    frame = frame.assign(key_length=frame.isl + frame.step)
    keys = ["batch_size", "num_heads", "num_key_value_heads", "key_length", "head_dim"]
    frame = frame.groupby(keys).latency.median().reset_index()
    batch, heads, kv_heads, key_length, head_dim = (np.asarray(frame[key], dtype=float) for key in keys)
    time = np.asarray(frame.latency, dtype=float) * 1e-3
    return DecodeTable(batch=batch, heads=heads, kv_heads=kv_heads, key_length=key_length, head_dim=head_dim, time=time)


def serving_decode(table: DecodeTable) -> DecodeTable:
    """The shapes that are fitted."""
    is_usual = (table.key_length >= LEAST_LENGTH) & (table.heads <= MOST_QUERIES * table.kv_heads) & np.isin(table.head_dim, HEAD_DIMS)
    return table.rows(is_usual)


def decode_groups(table: DecodeTable) -> NDArray[Any]:
    return groups_of(table.heads, table.kv_heads, table.head_dim)


def predict_decode(model: DecodeAttentionModel, table: DecodeTable, cluster: Cluster, dtype: Dtype) -> Array:
    machine = bare_machine(cluster, dtype, decode_attention={"flash": model})
    time = attention_decode_time(
        batch=table.batch,
        heads=table.heads,
        kv_heads=table.kv_heads,
        key_length=table.key_length,
        head_dim=table.head_dim,
        itemsize=itemsize(dtype),
        machine=machine,
    )
    return np.asarray(time)


READING_START, READING_LEAST, READING_MOST = (0.85, 10, 12, 60, 2), (0.1, 0.1, 0, 1, 0), (1.0, 100, 100, 1000, 50)
"""What a fit looks for in the reading of any cache, as `reading_parameters` takes it."""


def reading_parameters(x: Array) -> dict[str, float]:
    """Parameters of a decode kernel's model by name, of a fraction [-], a floor [us], a ramp [us], its bytes [MB] and a wave [us]."""
    return {
        "memory_fraction": rounded(x[0]),
        "floor_time": rounded(x[1] * 1e-6),
        "ramp_time": rounded(x[2] * 1e-6),
        "ramp_bytes": rounded(x[3] * 1e6),
        "wave_time": rounded(x[4] * 1e-6),
    }


def fit_decode(table: DecodeTable, cluster: Cluster, dtype: Dtype) -> DecodeAttentionModel:
    """The model of a decode kernel; the memory bandwidth cannot be exceeded."""

    def model(x: Array) -> DecodeAttentionModel:
        return DecodeAttentionModel(**reading_parameters(x))

    found = fit_logarithm(
        lambda x: predict_decode(model(x), table, cluster, dtype), table.time, start=READING_START, lower=READING_LEAST, upper=READING_MOST
    )
    return model(found)


def decode_errors(table: DecodeTable, cluster: Cluster) -> Array:
    """Of every shape, by a fit that saw its heads at no batch and no length. [-]"""
    return unseen_errors(
        decode_groups(table),
        table.time,
        table.rows,
        fit=lambda seen: fit_decode(seen, cluster, Dtype.BF16),
        predict=lambda model, unseen: predict_decode(model, unseen, cluster, Dtype.BF16),
    )
