"""Scopes of the microbenchmarks on CPUs and GPUs. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.foundation.dtypes import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Shapes of the microbenchmarks, and their time budget.

    budget            time for one kernel [s]
    matmuls           (rows, outputs, inputs) of a linear layer: its forward and both backward products are measured
    batched_matmuls   (batch, rows, columns, depth)
    half_matmuls      `matmuls` in half_dtype
    elements          sizes of streaming kernels
    attentions        (batch, heads, kv heads, length, head dim), causal
    decodes           (batch, heads, kv heads, cached tokens, head dim), one new token per sequence
    weights           (outputs, inputs) of weights that are multiplied with a few rows
    states            (sequences, new positions, groups of heads) of layers with a recurrent state
    message_bytes     sizes of collectives
    logit_bytes       memory traffic of the loss per logit, forward and backward together (execution profile)
    dtype             of activations
    """

    budget: float
    matmuls: tuple[tuple[int, int, int], ...]
    batched_matmuls: tuple[tuple[int, int, int, int], ...]
    half_matmuls: tuple[tuple[int, int, int], ...]
    elements: tuple[int, ...]
    attentions: tuple[tuple[int, int, int, int, int], ...]
    message_bytes: tuple[int, ...]
    logit_bytes: float
    dtype: Dtype
    half_dtype: Dtype
    decodes: tuple[tuple[int, int, int, int, int], ...] = ()
    weights: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[int, int, int], ...] = ()


_CPU_MATMULS = (
    # few rows with a weight that no cache holds: its bytes dominate
    (12, 3072, 4096), (24, 2560, 5120), (48, 3072, 3072), (96, 4096, 2560),
    (32, 128, 128), (128, 256, 256), (128, 768, 768), (256, 384, 384), (256, 1536, 384), (512, 512, 512), (512, 4096, 384),
    (1024, 384, 1536), (1024, 384, 384), (1024, 768, 192), (1024, 1536, 384), (2048, 192, 384),
)  # fmt: skip
_GPU_MATMULS = (
    (512, 1024, 1024), (1024, 4096, 1024), (2048, 2048, 2048), (2048, 8192, 2048), (4096, 4096, 4096), (4096, 1024, 4096),
    (4096, 11008, 4096),
    (4096, 4096, 11008), (8192, 8192, 8192), (8192, 32000, 4096), (16384, 5120, 5120), (16384, 1280, 5120),
)  # fmt: skip


def make_scope(device: str, *, brief: bool, logit_bytes: float) -> Scope:
    if device == "cuda":
        return Scope(
            budget=0.02 if brief else 0.05,
            matmuls=_GPU_MATMULS,
            batched_matmuls=((64, 1024, 1024, 64), (64, 1024, 64, 1024), (32, 2048, 2048, 128)),
            half_matmuls=_GPU_MATMULS[4:8],
            elements=tuple(2**exponent for exponent in range(14, 28, 3 if brief else 2)),
            attentions=(
                (1, 16, 16, 1024, 64), (8, 16, 16, 1024, 64), (4, 16, 16, 2048, 128), (1, 32, 32, 4096, 128), (1, 32, 8, 8192, 128),
                (4, 32, 8, 4096, 128), (16, 12, 12, 1024, 64), (2, 16, 16, 8192, 64),
            ),
            decodes=((1, 32, 8, 4096, 128), (8, 32, 8, 1024, 128), (32, 32, 8, 1024, 128), (64, 32, 8, 4096, 128), (64, 64, 8, 512, 64)),
            message_bytes=tuple(2**exponent for exponent in range(10, 29, 3 if brief else 2)),
            logit_bytes=logit_bytes,
            dtype=Dtype.BF16,
            half_dtype=Dtype.FP32,
        )  # fmt: skip
    return Scope(
        budget=0.03 if brief else 0.06,
        matmuls=_CPU_MATMULS,
        batched_matmuls=((24, 128, 128, 64), (24, 128, 64, 128), (24, 256, 256, 64)),
        half_matmuls=((64, 256, 256), (256, 1536, 384), (512, 512, 512), (1024, 384, 1536), (2048, 768, 768)),
        elements=tuple(2**exponent for exponent in range(12, 23 if brief else 25, 2)),
        attentions=(
            (1, 4, 4, 64, 32), (2, 6, 6, 128, 64), (4, 3, 3, 128, 64), (4, 6, 6, 128, 64), (2, 6, 6, 256, 64), (4, 8, 2, 256, 32),
            (4, 6, 6, 256, 64), (1, 12, 12, 512, 64), (1, 8, 8, 512, 128), (1, 6, 6, 1024, 64),
        ),
        decodes=(
            (1, 8, 8, 128, 64), (1, 16, 4, 512, 64), (4, 8, 2, 256, 64), (8, 12, 12, 128, 64), (8, 16, 4, 512, 64), (16, 16, 4, 128, 128),
            (2, 16, 4, 2048, 64), (16, 8, 8, 512, 64),
        ),
        weights=((2816, 1024), (1024, 1024)),
        states=(
            (1, 1, 1), (1, 1, 4), (1, 1, 16), (4, 1, 4), (8, 1, 4), (8, 1, 16), (1, 16, 4), (1, 64, 2), (1, 64, 8), (1, 128, 4),
            (1, 256, 4),
        ),
        message_bytes=tuple(2**exponent for exponent in range(8, 24 if brief else 27, 3 if brief else 2)),
        logit_bytes=logit_bytes,
        dtype=Dtype.FP32,
        half_dtype=Dtype.BF16,
    )  # fmt: skip
