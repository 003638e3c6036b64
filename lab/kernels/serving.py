"""The kernels of serving of one chip, part by part: their tables, the fits to them, and how far these are from what they did not see."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lab.kernels.all_reduce import (
    fit_small_all_reduce,
    predict_small_all_reduce,
    read_small_all_reduces,
    small_all_reduce_errors,
)
from lab.kernels.cached import cached_errors, fit_cached, predict_cached, read_cached
from lab.kernels.grouped_weights import (
    fit_grouped_weights,
    grouped_weight_errors,
    measured_experts,
    predict_grouped_weights,
    read_grouped_weights,
)
from lab.kernels.held_out import DECODE_ROWS, sample
from lab.kernels.weight_products import (
    fit_weight_products,
    measured_formats,
    predict_weight_products,
    read_weight_products,
    weight_product_errors,
)
from perfmodel.calibrate.fits import Array, relative_errors
from perfmodel.hardware.calibration import MatmulModel
from perfmodel.hardware.serving_kernels import CACHED_KERNELS, FEW, FP8_CACHE, ServingKernels
from perfmodel.workload.quantization import QUANTIZATIONS

if TYPE_CHECKING:
    from lab.kernels.fit import ChipTables

UNFIT = ("a100_sxm",)
"""Whose table of latent decoding is of a kernel that no engine would be run with: a quarter of the memory bandwidth, 47 % off any form."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingPart:
    """One kernel, or the kernels of one choice, with its table.

    field      of `ServingKernels`     name  in it, with `field` what the part is called
    fit        the models of the table by their names in `field`
    held_out   errors of every point by a fit that did not see its group
    predict    times by such models
    few_rows   products that are told apart, those of decoding; None of other kernels
    """

    field: str
    name: str
    time: Array
    fit: Callable[[], Mapping[str, Any]]
    held_out: Callable[[], Array]
    predict: Callable[[Mapping[str, Any]], Array]
    few_rows: NDArray[np.bool_] | None = None

    def by_rows(self, errors: Array) -> Iterator[tuple[str, Array]]:
        """The part's name with its errors, those of few rows apart."""
        called = f"{self.field}.{self.name}" if self.name else self.field
        if self.few_rows is None:
            yield called, errors
            return
        yield called, errors[~self.few_rows]
        if self.few_rows.any():
            yield f"{called}.m<{DECODE_ROWS}", errors[self.few_rows]


def serving_parts(folder: Path, tables: "ChipTables", plain: MatmulModel) -> Iterator[ServingPart]:
    """Of a chip whose products in 16 bits are `plain`."""
    yield _all_reduces(folder, tables)
    for name in measured_formats(folder, tables.folder, tables.gemm):
        yield _weight_products(folder, tables, plain, name)
    for name, theirs in measured_experts(folder, tables.folder, tables.gemm).items():
        yield _grouped_weights(folder, tables, plain, name, theirs)
    for kernel in CACHED_KERNELS:
        if kernel == FP8_CACHE or tables.folder not in UNFIT:
            part = _cached(folder, tables, kernel)
            if len(part.time):
                yield part


def fit_serving(folder: Path, tables: "ChipTables", plain: MatmulModel, *, say: Callable[[str], None] = print) -> ServingKernels:
    """From the tables in `folder`, beside the chip's products in 16 bits; `say` reports the held-out errors of each part."""
    points: dict[str, int] = {}
    errors: dict[str, float] = {}
    models: dict[str, dict[str, Any]] = {}
    for part in serving_parts(folder, tables, plain):
        for called, found in part.by_rows(part.held_out()):
            points[called], errors[called] = len(found), round(float(np.median(found)), 4)
            median, p90 = np.median(found), np.quantile(found, 0.9)
            say(f"{tables.chip} serving.{called}: {len(found)} points, held-out errors: median {median:.1%}, p90 {p90:.1%}")
        models.setdefault(part.field, {}).update(part.fit())
    return ServingKernels(points=points, errors=errors, **models)


def serving_prior_errors(folder: Path, tables: "ChipTables", plain: MatmulModel, prior: ServingKernels) -> Iterator[tuple[str, Array]]:
    """Of every part that `prior`, made of other chips, has figures of."""
    for part in serving_parts(folder, tables, plain):
        models = getattr(prior, part.field)
        known = {name: models[name] for name in models if not part.name or name.removesuffix(FEW) == part.name}
        if known:
            yield from part.by_rows(relative_errors(part.predict(known), part.time))


def _all_reduces(folder: Path, tables: "ChipTables") -> ServingPart:
    cluster = tables.cluster_of_fits()
    table = read_small_all_reduces(folder, tables.folder, tables.gemm, tables.nccl)
    return ServingPart(
        field="small_all_reduce",
        name="",
        time=table.time,
        fit=lambda: fit_small_all_reduce(table, cluster),
        held_out=lambda: small_all_reduce_errors(table, cluster),
        predict=lambda models: predict_small_all_reduce(dict(models), table, cluster),
    )


def products_version(folder: Path, tables: "ChipTables", name: str) -> str:
    """The table of products in a format: that of kernels which were chosen by trying, where the folder has it."""
    tuned = tables.tuned.get(name, tables.gemm)
    has = (folder / "aiconfigurator" / tables.folder / "gemm" / tuned / "gemm_perf.parquet").is_file()
    return tuned if has else tables.gemm


def _weight_products(folder: Path, tables: "ChipTables", plain: MatmulModel, name: str) -> ServingPart:
    cluster = tables.cluster_of_fits()
    table = read_weight_products(folder, tables.folder, products_version(folder, tables, name), name)
    return ServingPart(
        field="weight_product",
        name=name,
        time=table.time,
        few_rows=table.m < DECODE_ROWS,
        fit=lambda: {name: fit_weight_products(table.rows(sample(len(table.time))), name, plain, cluster)},
        held_out=lambda: weight_product_errors(table, name, plain, cluster),
        predict=lambda models: predict_weight_products(models[name], QUANTIZATIONS[name], plain, table, cluster),
    )


def _grouped_weights(folder: Path, tables: "ChipTables", plain: MatmulModel, name: str, theirs: str) -> ServingPart:
    cluster = tables.cluster_of_fits()
    table = read_grouped_weights(folder, tables.folder, tables.gemm, theirs)
    return ServingPart(
        field="grouped_weight",
        name=name,
        time=table.time,
        fit=lambda: fit_grouped_weights(table.only(sample(len(table.time))), name, plain, cluster),
        held_out=lambda: grouped_weight_errors(table, name, plain, cluster),
        predict=lambda models: predict_grouped_weights(dict(models), name, plain, table, cluster),
    )


def _cached(folder: Path, tables: "ChipTables", kernel: str) -> ServingPart:
    cluster = tables.cluster_of_fits()
    table = read_cached(folder, tables.folder, kernel, tables.attention if kernel == FP8_CACHE else tables.latent)
    return ServingPart(
        field="cached_attention",
        name=kernel,
        time=table.time,
        fit=lambda: {kernel: fit_cached(table.rows(sample(len(table.time))), kernel, cluster)},
        held_out=lambda: cached_errors(table, kernel, cluster),
        predict=lambda models: predict_cached(models[kernel], kernel, table, cluster),
    )
