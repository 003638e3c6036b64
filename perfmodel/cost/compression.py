"""Cost of gradient compression: messages of a bucket, passes over its gradients, and bytes that are kept between steps.

`parallel/compression.py` has the methods and their sources. Columns are [events, rows], of the local matrix of each gradient: a rows, c
columns, g bytes of an element. A gradient without rows is not compressed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.compute import streaming_time
from perfmodel.cost.machine import Machine
from perfmodel.hardware.calibration import KernelClass
from perfmodel.parallel.compression import Compression

Array = NDArray[np.float64]

CAST_BYTES = 2.0
"""Bytes of an element of a cast gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressionCost:
    """Cost of the compression of a region's gradients; a block counts once.

    time   passes over the gradients for one reduction                        [s]
    kept   error feedback and factors, kept between steps                     [byte]
    copy   largest temporary of one bucket: its cast, or its copy and error   [byte]
    """

    time: tuple[Any, ...]
    kept: tuple[Any, ...]
    copy: tuple[Any, ...]

    def map_columns(self, function: Callable[[Any], Any]) -> CompressionCost:
        """Return a copy with `function` applied to each column."""
        return CompressionCost(**{column.name: tuple(map(function, getattr(self, column.name))) for column in fields(self)})


def messages(compression: Compression, num_bytes: Array, rows: Array, columns: Array, itemsize: Array) -> tuple[Array, ...]:
    """Return the bytes of each message in place of the all-reduce of `num_bytes`, in the order in which they are sent. [byte]"""
    if compression.is_cast:
        return (num_bytes * np.where(rows > 0.0, np.minimum(itemsize, CAST_BYTES) / itemsize, 1.0),)
    if not compression.is_low_rank:
        return (num_bytes,)
    r = compression.factor_rank(rows, columns)
    return np.where(r > 0.0, 0.0, num_bytes), rows * r * itemsize, columns * r * itemsize


def kept_bytes(compression: Compression, rows: Array, columns: Array, itemsize: Array) -> Array:
    """Return the bytes of error feedback and of both factors. [byte]"""
    if not compression.is_low_rank:
        return 0.0 * rows
    return (rows * columns + (rows + columns) * compression.factor_rank(rows, columns)) * itemsize


def copied_bytes(compression: Compression, rows: Array, columns: Array, itemsize: Array) -> Array:
    """Return the bytes of the cast gradient, or of its copy from before compression, the new error and what is sent as it is. [byte]"""
    elements = rows * columns
    if compression.is_cast:
        return elements * np.minimum(itemsize, CAST_BYTES)
    return elements * itemsize * np.where(compression.factor_rank(rows, columns) > 0.0, 2.0, 3.0)


def passes_time(compression: Compression, rows: Array, columns: Array, itemsize: Array, machine: Machine) -> Array:
    """Return the time of the passes over one gradient. They run on the chip, and so take the time of other kernels. [s]

    cast      2 (g + 2) a c / B
    PowerSGD  (8 g a c + 6 g a c [sent as it is]) / B + max(3 g a c / B, 6 a c r / F) + 2 (a + c) r^2 / F + k t0

    B   memory bandwidth                                                                         [byte/s]
    F   rate of matrix multiplies                                                                [FLOP/s]
    t0  floor of a kernel                                                                        [s]
    k   kernels of a compressed matrix: 3 products, and 6 r - 4 to orthogonalise each factor     [-]

    8 g: the error is added (3 g), the sum is copied (2 g) and subtracted (3 g); 6 g: copied to a buffer, divided, copied back; 3 g: one
    read of M for P, one for Q, and one write of P Q^T. Gram-Schmidt divides a column by its norm, 2 kernels, and removes it from the
    later ones, 4 more. The QR that torch uses from r = 3 on is taken to be like it.
    """
    elements, bandwidth = rows * columns, machine.memory.bandwidth
    if compression.is_cast:
        return elements * (2.0 * (itemsize + np.minimum(itemsize, CAST_BYTES)) / bandwidth)
    r = compression.factor_rank(rows, columns)
    floor = streaming_time(num_bytes=0.0, num_elements=0.0, kernel_class=KernelClass.ADD, machine=machine)
    rate = machine.matmul.flop_rate
    products = np.maximum(3.0 * itemsize * elements / bandwidth, 6.0 * elements * r / rate)
    of_factors = products + 2.0 * (rows + columns) * r**2 / rate + (3.0 + 2.0 * (6.0 * r - 4.0)) * floor
    as_it_is = 6.0 * itemsize * elements / bandwidth
    time: Array = 8.0 * itemsize * elements / bandwidth + np.where(r > 0.0, of_factors, as_it_is)
    return time
