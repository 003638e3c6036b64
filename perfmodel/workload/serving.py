"""A serving job: model, request lengths, load, and formats of weights and cache."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field, plain_text
from perfmodel.foundation.values import read_integer
from perfmodel.workload.config import MAX_SIZE, TransformerConfig
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization

CACHE_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompt or output tokens, uniform on [least, most].

    InferenceMAX draws from [.8 L, L]; a constant length has least == most.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        for value in (self.least, self.most):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
                raise bad_field("lengths", f"{self.least}:{self.most}", "must be whole numbers of at least 1", "write 1024 or 800:1024")
        if self.least > self.most:
            raise bad_field("lengths", f"{self.least}:{self.most}", "the first must not exceed the second", "exchange them")

    def __str__(self) -> str:
        """Return the text that `lengths_of` reads: 1024 or 800:1024."""
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"

    @property
    def mean(self) -> float:
        return 0.5 * (self.least + self.most)

    @property
    def variance(self) -> float:
        """Variance of equally likely integers: (n^2 - 1) / 12 of n values. [token^2]"""
        return ((self.most - self.least + 1) ** 2 - 1) / 12.0


def constant(length: int) -> Lengths:
    return Lengths(least=length, most=length)


def lengths_of(value: object, field: str) -> Lengths:
    """Return the lengths of 1024, 8k, or 800:1024 for a uniform range. Raises InputError."""
    if isinstance(value, Lengths):
        return value
    parts = str(value).split(":")
    if len(parts) > 2:
        raise bad_field(field, value, "must be a number of tokens or two with a colon between them", "write 1024 or 800:1024")
    numbers = [read_integer(part, field, most=MAX_SIZE) for part in parts]
    return Lengths(least=numbers[0], most=numbers[-1])


def cache_dtype(value: object, field: str) -> Dtype:
    """Return a cache format by name. Raises InputError."""
    dtype = next((dtype for dtype in CACHE_DTYPES if str(dtype) == plain_text(value)), None)
    if dtype is None:
        raise bad_field(field, value, "is no format of a cache", f"use one of {', '.join(CACHE_DTYPES)}")
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: tokens drafted in each step and verified in the next.

    draft_tokens  drafted per step (gamma)
    acceptance    probability that a drafted token is accepted if its predecessors were
    draft         the draft model; None: the model's own modules (MTP, EAGLE: one layer and the head each)
    """

    draft_tokens: int
    acceptance: float
    draft: TransformerConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.draft_tokens, int) or isinstance(self.draft_tokens, bool) or not 1 <= self.draft_tokens <= 64:
            raise bad_field("draft_tokens", self.draft_tokens, "must be a whole number from 1 to 64", "1 to 4 are usual")
        if not 0.0 < self.acceptance < 1.0:
            raise bad_field("acceptance", self.acceptance, "must lie between 0 and 1", ".6 to .9 are usual")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """A serving load, independent of cluster and plan.

    concurrency  requests in flight over all replicas (closed loop: each answer is followed by the next request)
    rate         requests per second over all replicas (open loop, Poisson); neither: the largest batch that fits
    prefix_hit   share of a prompt's tokens that is in the prefix cache
    kv_precision of the KV cache
    is_static    all requests start together and run to the end (offline benchmarks); the batch is `concurrency`
    """

    model: TransformerConfig
    input_len: Lengths
    output_len: Lengths
    concurrency: int | None = None
    rate: float | None = None
    prefix_hit: float = 0.0
    quantization: Quantization = QUANTIZATIONS["bf16"]
    kv_precision: Dtype = Dtype.BF16
    speculation: Speculation | None = None
    is_static: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, TransformerConfig):
            raise bad_field("model", type(self.model).__name__, "must be a TransformerConfig", "load_model reads one")
        if self.concurrency is not None and self.rate is not None:
            raise bad_field("rate", self.rate, "cannot be given with a concurrency: load is either open or closed", "give one")
        if self.is_static and self.concurrency is None:
            raise bad_field("concurrency", None, "a static batch needs the number of its requests", "give a concurrency")
        if self.concurrency is not None and (
            not isinstance(self.concurrency, int) or isinstance(self.concurrency, bool) or not 1 <= self.concurrency <= MAX_SIZE
        ):
            raise bad_field("concurrency", self.concurrency, "must be a whole number of at least 1", "it counts requests in flight")
        if self.rate is not None and not 0.0 < self.rate < 1e9:
            raise bad_field("rate", self.rate, "must be positive", "it counts requests a second")
        if not 0.0 <= self.prefix_hit < 1.0:
            raise bad_field("prefix_hit", self.prefix_hit, "must be a share from 0 to below 1", "0 is none")
        if self.kv_precision not in CACHE_DTYPES:
            raise bad_field("kv_precision", self.kv_precision, "is no format of a cache", f"use one of {', '.join(CACHE_DTYPES)}")
        longest = self.input_len.most + self.output_len.most
        if (most := self.model.positions.max_position_embeddings) < longest:
            rule = f"prompt and answer ({self.output_len.most} tokens) share the {most} positions of {self.model.name}"
            allowed = most - self.output_len.most
            raise bad_field("input_len", self.input_len.most, rule, f"use at most {allowed}" if allowed > 0 else "use shorter answers too")

    @property
    def new_tokens(self) -> float:
        """Mean prompt tokens that are computed."""
        return self.input_len.mean * (1.0 - self.prefix_hit)

    @property
    def mean_context(self) -> float:
        """Mean context in the cache halfway through the output."""
        return self.input_len.mean + 0.5 * self.output_len.mean
