"""Kernels of serving of one chip: fits to their tables, next to the chip's 16-bit products. A model here is a dict of models by name.

Small all-reduces run the engines' own kernels. Dense and expert products have quantized weights. Decode attention reads fp8 and latent
caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.kernels.chip_kernels import CACHE_READ, EXPERT_ROWS, FEW_ROWS, expert_weight, size_decades
from lab.kernels.chips import ChipTables
from lab.kernels.grouped import GATED_KERNELS, GroupedTable, tuned_grouped
from lab.kernels.kernel_fit import (
    DECODE_ROWS,
    EACH_GROUP,
    KernelFit,
    Parameter,
    PartErrors,
    bare_machine,
    chosen_rows,
    fit_parameters,
    groups_of,
    inverse,
    micro,
    octave_weight,
    sample,
)
from lab.kernels.tables import (
    CollectiveTable,
    DecodeTable,
    MatmulTable,
    read_collectives,
    read_decode,
    read_latent_decode,
    read_matmuls,
    read_perf,
    serving_decode,
)
from perfmodel.calibrate.fits import Array, relative_errors
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.kernels import (
    WIDE_ITEMSIZE,
    cached_attention_time,
    grouped_weight_time,
    latent_decode_time,
    small_all_reduce_time,
    weight_product_time,
)
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.grouping import grouped
from perfmodel.hardware.calibration import MatmulModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import (
    CACHED_KERNELS,
    FEW,
    FP8_CACHE,
    LATENT_CACHE,
    ONE_SHOT,
    TWO_SHOT,
    CachedAttentionModel,
    GroupedWeightModel,
    ServingKernels,
    SmallAllReduceModel,
    WeightProductModel,
)
from perfmodel.workload.quantization import QUANTIZATIONS

Models = Mapping[str, Any]
"""Models of one field of `ServingKernels` by name."""


def serving_kernels(folder: Path, tables: ChipTables, plain: MatmulModel) -> Iterator[KernelFit[Any, Models]]:
    """Yield the kernels of a chip whose 16-bit products are `plain`, each named FIELD or FIELD.NAME after its place in `ServingKernels`."""
    cluster = tables.cluster_of_fits()
    yield small_all_reduce_kernel(read_small_all_reduces(folder, tables.folder, tables.gemm, tables.nccl), cluster)
    for name in measured_formats(folder, tables.folder, tables.gemm):
        products = read_matmuls(folder, tables.folder, products_version(folder, tables, name), PRODUCT_NAMES[name])
        yield weight_product_kernel(products, name, plain, cluster)
    for name, theirs in measured_experts(folder, tables.folder, tables.gemm).items():
        yield grouped_weight_kernel(read_grouped_weights(folder, tables.folder, tables.gemm, theirs), name, plain, cluster)
    for kernel in CACHED_KERNELS:
        if kernel == FP8_CACHE or tables.decodes_latent:
            table = read_cached(folder, tables.folder, kernel, tables.attention if kernel == FP8_CACHE else tables.latent)
            if len(table.time):
                yield cached_kernel(table, kernel, cluster)


def fit_serving(folder: Path, tables: ChipTables, plain: MatmulModel, *, say: Callable[[str], None] = print) -> ServingKernels:
    """Fit the kernels of serving to the tables in `folder`; `say` reports the held-out errors of each part."""
    parts = PartErrors(label=f"{tables.chip} serving.", say=say)
    models: dict[str, dict[str, Any]] = {}
    for kernel in serving_kernels(folder, tables, plain):
        models.setdefault(kernel.name.partition(".")[0], {}).update(parts.noted(kernel).model())
    return ServingKernels(points=parts.points, errors=parts.errors, **models)


def serving_prior_errors(folder: Path, tables: ChipTables, plain: MatmulModel, prior: ServingKernels) -> Iterator[tuple[str, Array]]:
    """Yield the errors of each part for which `prior`, made of other chips, has a model."""
    for kernel in serving_kernels(folder, tables, plain):
        field, _, name = kernel.name.partition(".")
        known = {key: model for key, model in getattr(prior, field).items() if not name or key.removesuffix(FEW) == name}
        if known:
            yield from kernel.by_part(relative_errors(kernel.predict(known, kernel.table), kernel.table.time))


def _machine(cluster: Cluster, field: str, models: Models, plain: MatmulModel | None = None) -> Machine:
    parts = {} if plain is None else {"matmul": {Dtype.BF16: plain}}
    return bare_machine(cluster, Dtype.BF16, **parts, serving=ServingKernels(**{field: dict(models)}))


# ---------------------------------------------------------------------------------------------------------------------------------
# Small all-reduces
# ---------------------------------------------------------------------------------------------------------------------------------

NCCL_MARGIN = 0.9
"""Share of NCCL's time. A message that takes longer is assumed to use NCCL: these tables record the choice of the library."""

MOST_BYTES = 2.0**24
"""[byte] Larger messages use NCCL everywhere."""


def read_small_all_reduces(folder: Path, chip: str, version: str, nccl: str) -> CollectiveTable:
    """Read TensorRT-LLM's all-reduce in one node, where its custom kernels ran; sizes in the table count elements of bf16."""
    frame = read_perf(folder, chip, "comm", version, "custom_allreduce_perf")
    num_bytes, ranks = 2.0 * np.asarray(frame.message_size, dtype=float), np.asarray(frame.num_gpus, dtype=float)
    time = np.asarray(frame.latency, dtype=float) * 1e-3
    library = read_collectives(folder, chip, nccl, CollectiveKind.ALL_REDUCE)
    measured = grouped(zip(library.num_bytes, library.ranks, library.time, strict=True), lambda row: row[:2])
    sizes = np.maximum(num_bytes, library.num_bytes.min())
    nccl_times = [[seconds for *_, seconds in measured.get(key, ())] or [np.inf] for key in zip(sizes, ranks, strict=True)]
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=time)
    return chosen_rows(table, (time < NCCL_MARGIN * np.array([np.median(times) for times in nccl_times])) & (num_bytes <= MOST_BYTES))


def small_all_reduce_kernel(table: CollectiveTable, cluster: Cluster) -> KernelFit[CollectiveTable, Models]:
    """Return the joint fit of the one-shot and the two-shot kernel, because the tables do not state which ran.

    A barrier with one more peer costs the same in both. Each decade of message sizes is one fold.
    """

    def models(base_time: float, peer_time: float, fraction: float, second_base: float, second_fraction: float) -> Models:
        return {
            ONE_SHOT: SmallAllReduceModel(base_time=base_time, peer_time=peer_time, bandwidth_fraction=fraction),
            TWO_SHOT: SmallAllReduceModel(base_time=second_base, peer_time=peer_time, bandwidth_fraction=second_fraction),
        }

    def predict(fitted: Models, rows: CollectiveTable) -> Array:
        return np.asarray(small_all_reduce_time(rows.num_bytes, rows.ranks, _machine(cluster, "small_all_reduce", fitted)))

    def fit(seen: CollectiveTable) -> Models:
        candidates = []
        for second_base in (8.0, 20.0):  # where the two kernels change places has several local optima
            parameters = {
                "base_time": Parameter(4, 0.1, 50, micro),
                "peer_time": Parameter(0.1, 0, 5, micro),
                "fraction": Parameter(0.6, 0.05, 1),
                "second_base": Parameter(second_base, 0.1, 60, micro),
                "second_fraction": Parameter(0.6, 0.05, 1),
            }
            candidates.append(fit_parameters(models, parameters, lambda fitted: predict(fitted, seen), seen.time))
        return min(candidates, key=lambda candidate: float(relative_errors(predict(candidate, seen), seen.time).mean()))

    return KernelFit(
        name="small_all_reduce", table=table, groups=size_decades(table), fit=fit, predict=predict, num_folds=EACH_GROUP, uses_all=True
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# Products with quantized weights
# ---------------------------------------------------------------------------------------------------------------------------------

PRODUCT_NAMES = MappingProxyType(
    {"fp8": "fp8", "fp8-block": "fp8_block", "int8": "sq", "int8-weights": "int8_wo", "w4a16": "int4_wo", "nvfp4": "nvfp4"}
)
"""Names of the formats in the tables. Each time includes the pass that quantizes the activations, where there is one."""


def measured_formats(folder: Path, chip: str, version: str) -> list[str]:
    """Return the formats that the table of a chip has."""
    known = set(read_perf(folder, chip, "gemm", version, "gemm_perf").gemm_dtype.unique())
    return [name for name, theirs in PRODUCT_NAMES.items() if theirs in known]


def products_version(folder: Path, tables: ChipTables, name: str) -> str:
    """Return the version of the table of a format: that of autotuned kernels, where the folder has it."""
    tuned = tables.tuned.get(name, tables.gemm)
    has = (folder / "aiconfigurator" / tables.folder / "gemm" / tuned / "gemm_perf.parquet").is_file()
    return tuned if has else tables.gemm


def weight_product_kernel(table: MatmulTable, name: str, plain: MatmulModel, cluster: Cluster) -> KernelFit[MatmulTable, Models]:
    """Return the fit of the products of a format, with the floor of those in 16 bits; further time is the quantization pass.

    Weights that are widened inside the product have no such pass; for them `cast_time` is the floor of the kernel.
    """
    quantization = QUANTIZATIONS[name]
    is_widened = quantization.activation_bytes >= WIDE_ITEMSIZE
    parameters = {
        "rate_fraction": Parameter(0.8, 0.1, 2.0 / plain.peak_fraction),
        "memory_fraction": Parameter(0.9, 0.1, 1.0 / plain.memory_fraction),
        "depth_factor": Parameter(1.5, 0.1, 25),
        "waves_factor": Parameter(1.2, 0.2, 5),
        "split_factor": Parameter(1.5, 0.1, 25),
        "sharpness": Parameter(3, 1, 10),
        "cast_time": Parameter(5, 0, 30, micro),
        "cast_fraction": Parameter(2, 0.5, 60, inverse),
    }

    def predict(models: Models, rows: MatmulTable) -> Array:
        machine = _machine(cluster, "weight_product", {quantization.name: models[name]}, plain)
        time = weight_product_time(m=rows.m, n=rows.n, k=rows.k, quantization=quantization, machine=machine, casts=1.0)
        return np.asarray(time + (models[name].cast_time if is_widened else 0.0), dtype=float)

    def fit(seen: MatmulTable) -> Models:
        weight = octave_weight(seen.m, seen.n, seen.k)
        return fit_parameters(_named(name, WeightProductModel), parameters, lambda models: predict(models, seen), seen.time, weight=weight)

    is_decoding = table.m < DECODE_ROWS
    parts = {"": ~is_decoding, **({FEW_ROWS: is_decoding} if is_decoding.any() else {})}
    groups = groups_of(table.n, table.k)
    return KernelFit(name=f"weight_product.{name}", table=table, groups=groups, fit=fit, predict=predict, parts=parts)


def _named(name: str, model: Callable[..., Any]) -> Callable[..., Models]:
    return lambda **values: {name: model(**values)}


# ---------------------------------------------------------------------------------------------------------------------------------
# Experts with quantized weights
# ---------------------------------------------------------------------------------------------------------------------------------

EXPERT_NAMES = MappingProxyType({"fp8": ("fp8",), "fp8-block": ("fp8_block",), "mxfp4": ("w4a8_mxfp4_mxfp8",), "nvfp4": ("nvfp4",)})
"""Names of the formats in the tables; engines run the first that a table has. Hopper's widened mxfp4 (`w4a16_mxfp4`) is not among them:
its kernel has a floor of about 130 us, and steps of gpt-oss on H100 would be 28 % too slow."""

EXPERT_KERNELS = (*GATED_KERNELS, "deepgemm", "moe_torch_flow_min_latency")
"""Kernels of gated experts. Engines choose by the shape, so the fastest of the measured ones counts."""

MOST_FEW, LEAST_MANY = 8.0, 16.0
"""Rows per expert: the kernel for few rows is fitted up to the first, the kernel for many beyond the second."""


def measured_experts(folder: Path, chip: str, version: str) -> dict[str, str]:
    """Return the formats that the table of a chip has, with their names there."""
    frame = read_perf(folder, chip, "moe", version, "moe_perf")
    known = set(frame[frame.kernel_source.isin(EXPERT_KERNELS)].moe_dtype.unique())
    available = {name: [dtype for dtype in theirs if dtype in known] for name, theirs in EXPERT_NAMES.items()}
    return {name: theirs[0] for name, theirs in available.items() if theirs}


def read_grouped_weights(folder: Path, chip: str, version: str, name: str) -> GroupedTable:
    """Read the tuned layers of a format. name: of the format in the table."""
    return tuned_grouped(folder, chip, version, name, EXPERT_KERNELS)


def grouped_weight_kernel(table: GroupedTable, name: str, plain: MatmulModel, cluster: Cluster) -> KernelFit[GroupedTable, Models]:
    """Return the fit of the experts kernels of a format: one, or in 4 bits one for few rows per expert and one for many.

    The memory bandwidth cannot be exceeded.
    """
    parameters = {
        "rate_fraction": Parameter(0.9, 0.1, 6.0),
        "memory_fraction": Parameter(0.9, 0.1, 1.0 / plain.memory_fraction),
        **EXPERT_ROWS,
        "row_fraction": Parameter(2.0, 0.5, 20, inverse),
        "depth_factor": Parameter(1.5, 0.1, 25),
        "sharpness": Parameter(3, 1, 10),
    }

    def predict(models: Models, rows: GroupedTable) -> Array:
        machine = _machine(cluster, "grouped_weight", models, plain)
        return np.asarray(grouped_weight_time(**rows.shapes, quantization=QUANTIZATIONS[name], machine=machine))

    def fit_one(seen: GroupedTable) -> GroupedWeightModel:
        weight = expert_weight(seen)
        return fit_parameters(GroupedWeightModel, parameters, lambda model: predict({name: model}, seen), seen.time, weight=weight)

    def fit(seen: GroupedTable) -> Models:
        if QUANTIZATIONS[name].weight_bytes >= 1.0:
            return {name: fit_one(seen)}
        pairs = seen.pairs / seen.experts
        kernels = {name: chosen_rows(seen, pairs > LEAST_MANY), name + FEW: chosen_rows(seen, pairs <= MOST_FEW)}
        return {kernel: fit_one(chosen_rows(some, sample(len(some.time)))) for kernel, some in kernels.items()}

    return KernelFit(name=f"grouped_weight.{name}", table=table, groups=table.layer, fit=fit, predict=predict)


# ---------------------------------------------------------------------------------------------------------------------------------
# Decode attention with fp8 and latent caches
# ---------------------------------------------------------------------------------------------------------------------------------

LEAST_SHARED = 2
"""Query heads to a key-value head of 8 bits from which Hopper's tensor-core kernel runs; with one each it takes 1.3-1.6 times as long."""


def read_cached(folder: Path, chip: str, kernel: str, version: str) -> DecodeTable:
    """Read aiconfigurator's generation attention of one of `CACHED_KERNELS`, without a window, for serving shapes; may be empty."""
    if kernel == FP8_CACHE:
        table = serving_decode(read_decode(folder, chip, version, cache="fp8"))
        return chosen_rows(table, table.heads >= LEAST_SHARED * table.kv_heads)
    return read_latent_decode(folder, chip, version, cache="bfloat16" if kernel == LATENT_CACHE else "fp8")


def cached_kernel(table: DecodeTable, kernel: str, cluster: Cluster) -> KernelFit[DecodeTable, Models]:
    """Return the fit of one decode attention kernel.

    Neither the memory bandwidth nor the 16-bit peak (8-bit with an 8-bit cache) can be exceeded. No table of keys and values is
    compute-bound, so its rate is not fitted.
    """
    parameters = CACHE_READ | {
        "query_fraction": Parameter(0.5, 0.05, 1.0),
        "peak_fraction": Parameter(0.6, 0.05, 1.0 if kernel == LATENT_CACHE else 2.0),
    }

    def models(peak_fraction: float, **values: float) -> Models:
        return {kernel: CachedAttentionModel(**values, **({"peak_fraction": peak_fraction} if kernel != FP8_CACHE else {}))}

    def predict(fitted: Models, rows: DecodeTable) -> Array:
        machine = _machine(cluster, "cached_attention", fitted)
        if kernel == FP8_CACHE:
            return np.asarray(cached_attention_time(**rows.shapes, cache_itemsize=1.0, machine=machine))
        itemsize = 2.0 if kernel == LATENT_CACHE else 1.0
        shapes = {name: rows.shapes[name] for name in ("batch", "heads", "key_length")}
        return np.asarray(latent_decode_time(**shapes, cache_itemsize=itemsize, machine=machine))

    return KernelFit(
        name=f"cached_attention.{kernel}",
        table=table,
        groups=groups_of(table.heads, table.kv_heads, table.head_dim),
        fit=lambda seen: fit_parameters(models, parameters, lambda fitted: predict(fitted, seen), seen.time),
        predict=predict,
    )
