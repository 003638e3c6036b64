"""Compression of data-parallel gradients: what is sent in place of the all-reduce of a bucket (`--gradient-compression`).

For a matrix of a x c elements of g bytes, of which a plain all-reduce sends g a c:

| word | messages, one after another | compressed | kept between steps |
|---|---|---|---|
| fp16, bf16 | 2 a c | every gradient, cast and cast back | nothing |
| powersgd:q | the rest of the bucket; P: g a r; Q: g c r | a matrix with 2 (a + c) r < a c, r = min(a, c, q) | error: g a c; P and Q |

PowerSGD sends P = M Q and Q = M^T P, and P Q^T takes the place of M. torch starts it at iteration 1,000, with plain all-reduces before. Its
variant for a bucket as one square matrix (`batched_powerSGD_hook`) fails in torch 2.13: its orthogonalisation takes three dims only.

Sources: torch 2.13, torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (`fp16_compress_hook`, `bf16_compress_hook`) and
powerSGD_hook.py (`PowerSGDState`: rank 1, min_compression_rate 2, start_powerSGD_iter 1,000, error feedback, warm start); Vogels,
Karimireddy and Jaggi 2019 (PowerSGD, arXiv 1905.13727).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import bad_field, one_line, whole_number

FIRST_ITERATION = 1000
"""Iteration at which PowerSGD starts (torch's default, `start_powerSGD_iter`)."""

LEAST_RATE = 2.0
"""Least ratio of a gradient to its factors (torch's default, `min_compression_rate`)."""

_MOST_RANK = 2**15


class Compressor(StrEnum):
    """Method of gradient compression."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    POWERSGD = "powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A method of gradient compression. rank: of PowerSGD's factors"""

    method: Compressor = Compressor.NONE
    rank: int = 1

    def __str__(self) -> str:
        return f"{self.method}:{self.rank}" if self.is_low_rank else str(self.method)

    @property
    def is_low_rank(self) -> bool:
        return self.method is Compressor.POWERSGD

    @property
    def is_cast(self) -> bool:
        return self.method in (Compressor.FP16, Compressor.BF16)

    def factor_rank(self, rows: Column, columns: Column) -> Any:
        """Return the rank of the factors of a matrix: min(a, c, q); 0 for a matrix that is sent as it is. [-]"""
        a, c = rows, columns
        r = np.minimum(np.minimum(a, c), float(self.rank))
        return np.where((a + c) * r * LEAST_RATE < a * c, r, 0.0) if self.is_low_rank else np.zeros_like(r)


NO_COMPRESSION = Compression()
_NAMES = ", ".join([*(str(method) for method in Compressor if method is not Compressor.POWERSGD), "powersgd or powersgd:RANK"])


def compression_of(value: object, name: str = "gradient_compression") -> Compression:
    """Return the compression of a word such as `fp16` or `powersgd:4`. Raises InputError."""
    if isinstance(value, Compression):
        return value
    method, separator, rank = value.strip().lower().partition(":") if isinstance(value, str) else ("", "", "")
    if method not in [*Compressor]:
        raise bad_field(name, one_line(value), "is not known", f"use {_NAMES}")
    if not separator:
        return Compression(method=Compressor(method))
    number = whole_number(rank)
    if method != Compressor.POWERSGD or number is None or not 1 <= number <= _MOST_RANK:
        raise bad_field(name, one_line(value), "only powersgd has a rank, of at least 1", "write powersgd:4")
    return Compression(method=Compressor.POWERSGD, rank=number)


def read_compression(value: object, name: str = "gradient_compression") -> str:
    """Return the word of a compression, with the rank of PowerSGD. Raises InputError."""
    return str(compression_of(value, name))


def check_compression(compression: Compression, *, zero: int, has_experts: bool, has_rules: bool = True) -> None:
    """Raise InputError if gradients are not replicated, or if no hook compresses them as it is priced."""
    word = str(compression)
    if zero:
        rule = f"compresses gradients that replicas all-reduce, and zero={zero} reduce-scatters them to shards"
        raise bad_field("gradient_compression", word, rule, "use zero=0, or the setting fp32_gradient_reduction=false, which sends 16 bits")
    if not has_rules:
        rule = "is priced for plans with rules, not for a sharding of each operator"
        raise bad_field("gradient_compression", word, rule, "use none")
    if compression.is_low_rank and has_experts:
        rule = "is not priced for models with experts, whose stacked weights the hook takes as one matrix"
        raise bad_field("gradient_compression", word, rule, "use fp16 or bf16")


def compression_note(compression: Compression) -> str:
    """Return what a prediction of a step with this compression leaves out; "" if nothing."""
    if not compression.is_low_rank:
        return ""
    return (
        f"gradient_compression={compression}: a step from iteration {FIRST_ITERATION:,}, before which torch all-reduces gradients as they "
        "are; the loss may need more steps"
    )
