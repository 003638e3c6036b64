"""The kernels of serving, fitted for one chip, part by part."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.calibrate.fits import Array
from perfmodel.hardware.calibration import MatmulModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import load_cluster
from perfmodel.hardware.serving_kernels import (
    CACHED_KERNELS,
    EXPERT_EXCHANGES,
    FP8_CACHE,
    CachedAttentionModel,
    ExpertExchangeModel,
    GroupedWeightModel,
    ServingKernels,
    SmallAllReduceModel,
    WeightProductModel,
)
from perfmodel.lab.kernels.all_reduce import fit_small_all_reduce, read_small_all_reduces, small_all_reduce_errors
from perfmodel.lab.kernels.cached import cached_errors, fit_cached, read_cached
from perfmodel.lab.kernels.exchange import exchange_errors, fit_exchanges, has_exchanges, read_exchanges
from perfmodel.lab.kernels.grouped_weights import (
    fit_grouped_weights,
    grouped_weight_errors,
    measured_experts,
    read_grouped_weights,
)
from perfmodel.lab.kernels.held_out import sample
from perfmodel.lab.kernels.weight_products import fit_weight_products, measured_formats, read_weight_products, weight_product_errors

if TYPE_CHECKING:
    from perfmodel.lab.kernels.fit import ChipTables

MANY_ROWS = 128
"""Products of fewer rows are told apart: those of decoding."""

UNFIT = ("a100_sxm",)
"""Whose table of latent decoding is of a kernel that no engine would be run with: a quarter of the memory bandwidth, 47 % off any form."""

Note = Callable[[str, Array], None]


def fit_serving(folder: Path, tables: "ChipTables", plain: MatmulModel, *, say: Callable[[str], None] = print) -> ServingKernels:
    """From the tables in `folder`, beside the chip's products in 16 bits; `say` reports the held-out errors of each part."""
    cluster = load_cluster(tables.cluster, num_chips=16)
    points: dict[str, int] = {}
    errors: dict[str, float] = {}

    def note(part: str, found: Array) -> None:
        points[part], errors[part] = len(found), round(float(np.median(found)), 4)
        median, p90 = np.median(found), np.quantile(found, 0.9)
        say(f"{tables.chip} serving.{part}: {len(found)} points, held-out errors: median {median:.1%}, p90 {p90:.1%}")

    return ServingKernels(
        small_all_reduce=_fit_all_reduces(folder, tables, cluster, note),
        weight_product=_fit_weight_products(folder, tables, cluster, plain, note),
        grouped_weight=_fit_grouped_weights(folder, tables, cluster, plain, note),
        cached_attention=_fit_cached(folder, tables, cluster, note),
        expert_exchange=_fit_exchanges(folder, tables, cluster, note),
        points=points,
        errors=errors,
    )


def _fit_all_reduces(folder: Path, tables: "ChipTables", cluster: Cluster, note: Note) -> dict[str, SmallAllReduceModel]:
    table = read_small_all_reduces(folder, tables.folder, tables.gemm, tables.nccl)
    note("small_all_reduce", small_all_reduce_errors(table, cluster))
    return fit_small_all_reduce(table, cluster)


def _fit_weight_products(
    folder: Path, tables: "ChipTables", cluster: Cluster, plain: MatmulModel, note: Note
) -> dict[str, WeightProductModel]:
    models = {}
    for name in measured_formats(folder, tables.folder, tables.gemm):
        table = read_weight_products(folder, tables.folder, tables.gemm, name)
        found = weight_product_errors(table, name, plain, cluster)
        note(f"weight_product.{name}", found[table.m >= MANY_ROWS])
        note(f"weight_product.{name}.m<{MANY_ROWS}", found[table.m < MANY_ROWS])
        models[name] = fit_weight_products(table.rows(sample(len(table.time))), name, plain, cluster)
    return models


def _fit_cached(folder: Path, tables: "ChipTables", cluster: Cluster, note: Note) -> dict[str, CachedAttentionModel]:
    models = {}
    for kernel in CACHED_KERNELS:
        if kernel != FP8_CACHE and tables.folder in UNFIT:
            continue
        table = read_cached(folder, tables.folder, kernel, tables.attention if kernel == FP8_CACHE else tables.latent)
        if len(table.time):
            note(f"cached_attention.{kernel}", cached_errors(table, kernel, cluster))
            models[kernel] = fit_cached(table.rows(sample(len(table.time))), kernel, cluster)
    return models


def _fit_grouped_weights(
    folder: Path, tables: "ChipTables", cluster: Cluster, plain: MatmulModel, note: Note
) -> dict[str, GroupedWeightModel]:
    models = {}
    for name, theirs in measured_experts(folder, tables.folder, tables.gemm).items():
        table = read_grouped_weights(folder, tables.folder, tables.gemm, theirs)
        note(f"grouped_weight.{name}", grouped_weight_errors(table, name, plain, cluster))
        models.update(fit_grouped_weights(table.only(sample(len(table.time))), name, plain, cluster))
    return models


def _fit_exchanges(folder: Path, tables: "ChipTables", cluster: Cluster, note: Note) -> dict[str, ExpertExchangeModel]:
    models = {}
    for way in EXPERT_EXCHANGES if has_exchanges(folder, tables.folder) else ():
        table = read_exchanges(folder, tables.folder, way)
        note(f"expert_exchange.{way}", exchange_errors(table, way, cluster))
        models[way] = fit_exchanges(table, way, cluster)
    return models
