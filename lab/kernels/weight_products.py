"""Products with narrow weights: their tables, the fit to them beside the chip's products in 16 bits, and its errors."""

from pathlib import Path
from types import MappingProxyType

import numpy as np

from lab.kernels.held_out import matmul_groups, unseen_errors
from lab.kernels.tables import read_matmuls, read_perf
from perfmodel.calibrate.fits import Array, MatmulTable, bare_machine, fit_logarithm, octave_weight, rounded
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.kernels import WIDE_ITEMSIZE, weight_product_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import MatmulModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import ServingKernels, WeightProductModel
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization

TABLE_NAMES = MappingProxyType(
    {"fp8": "fp8", "fp8-block": "fp8_block", "int8": "sq", "int8-weights": "int8_wo", "w4a16": "int4_wo", "nvfp4": "nvfp4"}
)
"""What the tables call a format. Each time holds the pass that narrows the activations, where there is one."""


def measured_formats(folder: Path, chip: str, version: str) -> list[str]:
    """The formats that a chip's table has."""
    frame = read_perf(folder, chip, "gemm", version, "gemm_perf")
    known = set(frame.gemm_dtype.unique())
    return [name for name, theirs in TABLE_NAMES.items() if theirs in known]


def read_weight_products(folder: Path, chip: str, version: str, name: str) -> MatmulTable:
    return read_matmuls(folder, chip, version, TABLE_NAMES[name])


def predict_weight_products(
    model: WeightProductModel, quantization: Quantization, plain: MatmulModel, table: MatmulTable, cluster: Cluster
) -> Array:
    """As a table has it: with the pass before the product. Weights that are widened inside the product have no such pass; theirs were
    run in an engine whose own floor they show, and `cast_time` is that."""
    serving = ServingKernels(weight_product={quantization.name: model})
    machine: Machine = bare_machine(cluster, Dtype.BF16, matmul={Dtype.BF16: plain}, serving=serving)
    time = weight_product_time(m=table.m, n=table.n, k=table.k, quantization=quantization, machine=machine, casts=1.0)
    return np.asarray(time + (model.cast_time if is_widened(quantization) else 0.0), dtype=float)


def is_widened(quantization: Quantization) -> bool:
    return quantization.activation_bytes >= WIDE_ITEMSIZE


def fit_weight_products(table: MatmulTable, name: str, plain: MatmulModel, cluster: Cluster) -> WeightProductModel:
    """Of a format whose products start as those in 16 bits do: what a table shows beyond is the pass before."""

    def model(x: Array) -> WeightProductModel:
        return WeightProductModel(
            rate_fraction=rounded(x[0]),
            memory_fraction=rounded(x[1]),
            depth_factor=rounded(x[2]),
            waves_factor=rounded(x[3]),
            split_factor=rounded(x[4]),
            sharpness=rounded(x[5]),
            cast_time=rounded(x[6] * 1e-6),
            cast_fraction=rounded(1.0 / x[7]),
        )

    quantization = QUANTIZATIONS[name]
    found = fit_logarithm(
        lambda x: predict_weight_products(model(x), quantization, plain, table, cluster),
        table.time,
        start=(0.8, 0.9, 1.5, 1.2, 1.5, 3, 5, 2),
        lower=(0.1, 0.1, 0.1, 0.2, 0.1, 1, 0, 0.5),
        upper=(2.0 / plain.peak_fraction, 1.0 / plain.memory_fraction, 25, 5, 25, 10, 30, 60),
        weight=octave_weight(table.m, table.n, table.k),
    )
    return model(found)


def weight_product_errors(table: MatmulTable, name: str, plain: MatmulModel, cluster: Cluster) -> Array:
    """Of every shape, by a fit that saw its (n, k) at no m. [-]"""
    return unseen_errors(
        matmul_groups(table),
        table.time,
        table.rows,
        fit=lambda seen: fit_weight_products(seen, name, plain, cluster),
        predict=lambda model, unseen: predict_weight_products(model, QUANTIZATIONS[name], plain, unseen, cluster),
    )
