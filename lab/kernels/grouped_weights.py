"""The experts of a layer with narrow weights: their tables, the fit to them beside the chip's products in 16 bits, and its errors."""

from pathlib import Path
from types import MappingProxyType

import numpy as np

from lab.kernels.grouped import GATED_KERNELS, GroupedTable, tuned_grouped
from lab.kernels.held_out import sample, unseen_errors
from lab.kernels.tables import read_perf
from perfmodel.calibrate.fits import Array, bare_machine, fit_logarithm, octave_weight, rounded
from perfmodel.cost.serving.kernels import grouped_weight_time
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import MatmulModel
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import FEW, GroupedWeightModel, ServingKernels
from perfmodel.workload.quantization import QUANTIZATIONS

TABLE_NAMES = MappingProxyType({"fp8": ("fp8",), "fp8-block": ("fp8_block",), "mxfp4": ("w4a8_mxfp4_mxfp8",), "nvfp4": ("nvfp4",)})
"""What the tables call a format; the first that a table has is what engines run on the chip. Hopper's widened mxfp4 (`w4a16_mxfp4`) is not
among them: its kernel takes some 130 us however little there is to do, and steps of gpt-oss on H100 would be 28 % too slow."""

KERNELS = (*GATED_KERNELS, "deepgemm", "moe_torch_flow_min_latency")
"""Of gated experts: engines choose by the shape, so of those that were measured the quickest counts."""

MOST_FEW, LEAST_MANY = 8.0, 16.0
"""Rows an expert: the kernel for few is fitted up to the first, that for many beyond the second."""

Models = dict[str, GroupedWeightModel]


def measured_experts(folder: Path, chip: str, version: str) -> dict[str, str]:
    """The formats that a chip's table has, and what it calls them."""
    frame = read_perf(folder, chip, "moe", version, "moe_perf")
    known = set(frame[frame.kernel_source.isin(KERNELS)].moe_dtype.unique())
    found = {name: [each for each in theirs if each in known] for name, theirs in TABLE_NAMES.items()}
    return {name: theirs[0] for name, theirs in found.items() if theirs}


def read_grouped_weights(folder: Path, chip: str, version: str, name: str) -> GroupedTable:
    """`name` as the table calls it."""
    return tuned_grouped(folder, chip, version, name, KERNELS)


def predict_grouped_weights(models: Models, name: str, plain: MatmulModel, table: GroupedTable, cluster: Cluster) -> Array:
    machine = bare_machine(cluster, Dtype.BF16, matmul={Dtype.BF16: plain}, serving=ServingKernels(grouped_weight=models))
    time = grouped_weight_time(
        experts=table.experts,
        rows=table.rows,
        tokens=table.tokens,
        hidden_size=table.hidden_size,
        intermediate_size=table.intermediate_size,
        quantization=QUANTIZATIONS[name],
        machine=machine,
    )
    return np.asarray(time)


def fit_grouped_weights(table: GroupedTable, name: str, plain: MatmulModel, cluster: Cluster) -> Models:
    """The kernels of a format on a chip with these products in 16 bits: one, or in 4 bits one for few rows an expert and one for many."""
    if QUANTIZATIONS[name].weight_bytes >= 1.0:
        return {name: _fit_kernel(table, name, plain, cluster)}
    rows = table.rows / table.experts
    kernels = {name: table.only(rows > LEAST_MANY), name + FEW: table.only(rows <= MOST_FEW)}
    return {kernel: _fit_kernel(some.only(sample(len(some.time))), name, plain, cluster) for kernel, some in kernels.items()}


def _fit_kernel(table: GroupedTable, name: str, plain: MatmulModel, cluster: Cluster) -> GroupedWeightModel:
    """The memory bandwidth cannot be exceeded."""

    def model(x: Array) -> GroupedWeightModel:
        return GroupedWeightModel(
            rate_fraction=rounded(x[0]),
            memory_fraction=rounded(x[1]),
            row_fraction=rounded(1.0 / x[2]),
            expert_time=rounded(x[3] * 1e-6),
            floor_time=rounded(x[4] * 1e-6),
            depth_factor=rounded(x[5]),
            sharpness=rounded(x[6]),
        )

    found = fit_logarithm(
        lambda x: predict_grouped_weights({name: model(x)}, name, plain, table, cluster),
        table.time,
        start=(0.9, 0.9, 2.0, 0.03, 25, 1.5, 3),
        lower=(0.1, 0.1, 0.5, 0, 1, 0.1, 1),
        upper=(6.0, 1.0 / plain.memory_fraction, 20, 5, 300, 25, 10),
        weight=octave_weight(table.rows / table.experts, table.experts, table.hidden_size * table.intermediate_size),
    )
    return model(found)


def grouped_weight_errors(table: GroupedTable, name: str, plain: MatmulModel, cluster: Cluster) -> Array:
    """Of every run, by a fit that saw its layer on no number of chips and with no number of tokens. [-]"""
    return unseen_errors(
        table.layer,
        table.time,
        table.only,
        fit=lambda seen: fit_grouped_weights(seen, name, plain, cluster),
        predict=lambda models, unseen: predict_grouped_weights(models, name, plain, unseen, cluster),
    )
