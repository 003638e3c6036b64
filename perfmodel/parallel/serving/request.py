"""Requests of `serve`: model, load, formats, cluster and the knobs of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from perfmodel.foundation.words import Read, reader, word


def _size(help: str, **more: Any) -> Any:
    def read(value: object, name: str) -> int:
        from perfmodel.foundation.values import read_integer

        return read_integer(value, name, most=2**31 - 1)

    return word(help, read=read, takes="int | str", **more)


def _positive(unit: str, below: float, *, before: str = "", after: str = "") -> Read:
    """Return the reader of a positive number, with or without the sign of its unit before or after it."""

    def read(value: object, name: str) -> float:
        from perfmodel.foundation.errors import bad_field

        try:
            number = float(str(value).strip().removeprefix(before).removesuffix(after))
        except ValueError:
            number = 0.0
        if not 0.0 < number < below:
            raise bad_field(name, value, f"must be a positive number of {unit}", "write 2.5")
        return number

    return read


_count = partial(word, kind=int)
_lengths, _share = reader("workload.serving", "lengths_of"), reader("foundation.values", "share")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ServingRequest:
    """Request of `serve`. None is the default: of the engine, of the model's checkpoint, or the smallest plan that fits."""

    model: Any = word("A model's name (`perfmodel models`) or a config.json", metavar="NAME|PATH", takes="Name | TransformerConfig")
    cluster: Any = word("A cluster's name (`perfmodel clusters`) or file", metavar="NAME|PATH", takes="Name | Cluster")
    chips: Any = _size("Chips to use; with --search and a load the fewest that hold it if left out", aliases=("--gpus",))
    input_len: Any = word(
        "Tokens of a prompt, such as 1k, or 800:1024 where they vary evenly", metavar="N|N:N", read=_lengths,
        takes="int | str | Lengths",
    )  # fmt: skip
    output_len: Any = word("Tokens of an answer, as --input-len", metavar="N|N:N", read=_lengths, takes="int | str | Lengths")
    concurrency: Any = _size("Requests in flight, of all replicas together; each answer is followed by the next request")
    rate: Any = word(
        "In place of --concurrency: requests a second, whenever they come",
        metavar="X",
        read=_positive("requests a second", 1e9, after="/s"),
        takes="float | str",
    )
    prefix_hit: Any = word(
        "Share of a prompt's tokens that the cache holds already", metavar="SHARE", read=_share, takes="float | str"
    )  # fmt: skip
    engine: Any = word(
        "The serving engine that is assumed: vllm, sglang, tensorrt-llm, or a file", otherwise="vllm if left out", metavar="NAME|PATH",
        takes="Name | Engine",
    )  # fmt: skip
    quantization: Any = word(
        "Format of weights: bf16, fp16, fp8, fp8-block, fp8-weights, int8, int8-weights, w4a16, w4a8, mxfp4, nvfp4, nvfp4-weights",
        otherwise="as the model is published if left out", metavar="NAME",
        read=reader("workload.quantization", "quantization_named"), takes="str | Quantization",
    )  # fmt: skip
    kv_precision: Any = word(
        "Format of the cache: bf16, fp16 or fp8", otherwise="bf16 if left out", metavar="NAME",
        read=reader("workload.serving", "cache_dtype"), takes="str | Dtype"
    )  # fmt: skip
    draft_tokens: int | None = _count("Tokens drafted a step (speculative decoding)")
    acceptance: Any = word(
        "Of drafted tokens the share that is accepted, each given those before it", otherwise=".7 if left out", metavar="SHARE",
        read=_share, takes="float | str",
    )  # fmt: skip
    draft_model: Any = word(
        "The model that drafts", otherwise="the model's own module for further tokens if left out", metavar="NAME|PATH",
        takes="Name | TransformerConfig",
    )  # fmt: skip
    tp: Any = _size("Tensor-parallel degree", otherwise="the smallest that leaves room for the requests if left out")
    pp: int | None = _count("Pipeline-parallel degree")
    ep: int | None = _count("Expert-parallel degree: chips of a replica that split the experts")
    attention_dp: int | None = _count("Attention ranks of a replica that have sequences of their own (data-parallel attention)")
    dcp: int | None = _count("Decode-context-parallel degree: ranks of tp that share the tokens of a cache which each would keep whole")
    pcp: int | None = _count("Prefill-context-parallel degree: chips in addition to tp that share the tokens of a prompt, zig-zag")
    replicas: int | None = _count("Independent copies", otherwise="all chips if left out")
    workers: Any = word(
        "Disaggregated serving: prefill and decode workers x chips of each, such as 3x4:1x8 or 1x8,tp=2,ep=8:1x8,tp=8; "
        "3x4@h20:1x8@h200 on chips of two kinds, in place of --cluster and --chips",
        metavar="XxN:YxN", read=reader("parallel.serving.plan", "parse_workers"),
        takes="str",
    )  # fmt: skip
    max_batch: Any = _size("Sequences that run at once, of an attention rank", otherwise="the engine's if left out")
    max_tokens: Any = _size("Tokens of a step: chunk size of prompts", otherwise="the engine's if left out")
    price: Any = word(
        "USD an hour for a chip, such as 2.5", otherwise="as `perfmodel chips NAME` has it if left out", metavar="USD",
        read=_positive("USD an hour for a chip", 1e6, before="$"),
        takes="float | str",
    )  # fmt: skip
    assume: Any = word(
        "A constant of energy and carbon (`perfmodel assumptions`), such as pue=1.1 or location=france", metavar="NAME=VALUE",
        takes="Mapping[str, float | str]", repeats=True,
    )  # fmt: skip
    calibration: Any = word(
        "A calibration, spec-sheet for none, prior for its maker's other chips", otherwise="the best known if left out",
        metavar="NAME|PATH", takes="Name | Calibration",
    )  # fmt: skip
