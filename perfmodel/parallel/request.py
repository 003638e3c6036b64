"""Requests of verbs: job or service, cluster and assumptions, as given in a program or on a command line.

The readers of values are imported when the first value is read: `perfmodel predict --help` reads none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from perfmodel.foundation.memory_headroom import DEFAULT_RISK
from perfmodel.foundation.values import several_numbers, share
from perfmodel.foundation.words import Read, Words, given_words, part, reader, size, word, words_of
from perfmodel.parallel.knobs import ServingKnobs


def _choice(value: str, name: str) -> Any:
    """Return the member of the closed choice with this name: a precision or an optimizer."""
    from perfmodel.foundation.values import choice_of
    from perfmodel.workload.job import Optimizer, Precision

    return choice_of(Precision if name == "precision" else Optimizer, value, name)


def _capacity(value: object, name: str) -> Any:
    from perfmodel.workload.routing import BALANCED

    return BALANCED.with_capacity(value, name).capacity_factor


#: Words that take several values; each combination of values gives one answer.
_several = partial(word, several=True)


_sizes = partial(size, several=True, split=several_numbers)
_A_MODEL = "a name from `perfmodel models` or the path of a config.json"
_A_CLUSTER = "a name from `perfmodel clusters` or the path of a cluster file"
_calibration = partial(
    word, "A calibration, spec-sheet for none, prior for its maker's other chips", otherwise="the best known if left out",
    metavar="NAME|PATH", takes="Name | Calibration",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Request:
    """Request for predictions. Each word has one value or several; None is the default, or the value of the plan."""

    model: Any = _several(
        "A model's name (`perfmodel models`), its Hugging Face hub id or a config.json", metavar="NAME|PATH",
        takes="Name | TransformerConfig",
        missing=_A_MODEL,
    )  # fmt: skip
    cluster: Any = _several(
        "A cluster's name (`perfmodel clusters`) or file; of several kinds of chips: 8@dgx-h100+8@dgx-a100",
        metavar="NAME|PATH", takes="Name | Cluster",
        missing=_A_CLUSTER,
    )  # fmt: skip
    chips: Any = _sizes(
        "Chips to use", aliases=("--gpus",), most=10**7, missing="how many chips the job runs on, for example 64 (or {nodes})"
    )  # fmt: skip
    nodes: Any = _sizes("In place of --chips: nodes of the cluster", most=10**7)
    global_batch: Any = _sizes(
        "Sequences in a step, on all chips together", aliases=("--gbs",),
        missing="the sequences of a step (or its tokens as {batch_tokens})",
    )  # fmt: skip
    batch_tokens: Any = _sizes("In place of --global-batch: tokens in a step, such as 4M (4194304)", most=2**60)
    seq_len: Any = _sizes("Tokens in a sequence, such as 8k (8192)", aliases=("--seq",), missing="the tokens of a sequence")
    precision: Any = _several(
        "fp32, bf16-mixed, fp16-mixed, bf16, or products in fewer bits: fp8-delayed, fp8-current, fp8-block, mxfp8, nvfp4",
        otherwise="bf16-mixed if left out", metavar="NAME", takes="str", read=_choice,
    )  # fmt: skip
    optimizer: Any = _several(
        "sgd, momentum, adam, adamw, lion, adafactor or muon; adamw-8bit, adamw-4bit, paged-adamw-8bit",
        otherwise="adamw if left out", metavar="NAME", takes="str", read=_choice,
    )  # fmt: skip
    routing: Any = _several(
        "How tokens spread over experts: balanced, skew:1.3 (the fullest rank has 1.3 times the mean), or a file of counts (.csv, .json: "
        "a row for each rank of ep, a number for each expert)",
        otherwise="balanced if left out", metavar="HOW|FILE", takes="str | Routing | Sequence[Sequence[int]] | Path",
        read=reader("workload.routing", "routing_of"),
        split=reader("workload.routing", "routings_in"),
    )  # fmt: skip
    capacity_factor: Any = _several(
        "Rows that an expert has room for, over the mean; the rest is dropped", otherwise="none is dropped if left out", metavar="X",
        takes="float | str", read=_capacity,
    )  # fmt: skip
    train: Any = _several(
        "What is trained: full, lora:RANK, qlora:RANK, dora:RANK or qdora:RANK (adapters on every linear of a layer; "
        "lora:16:q_proj+v_proj: on these; qlora:16:all-linear:int8: base in int8), galore:RANK (gradients of that rank)",
        otherwise="full if left out", metavar="HOW", takes="str | Training", read=reader("workload.training", "training_of"),
    )  # fmt: skip
    profile: Any = _several(
        "The framework that is assumed (`perfmodel profiles`); with settings: torch-fsdp2+compile",
        otherwise="generic, the mean of those known, if left out", metavar="NAME|PATH", takes="Name | ExecutionProfile",
        aliases=("--framework",),
    )  # fmt: skip
    settings: Any = word(
        "What is known of its setup, such as compile or attention_kernel=flash3 (docs/settings.md); again and again",
        metavar="NAME[=VALUE]", takes="Mapping[str, bool | float | str]", option="setting", repeats=True,
    )  # fmt: skip
    cp_form: Any = word(
        "How ranks of --cp share a sequence: all-gather, ring, zigzag or ulysses (the setting cp_form)",
        otherwise="as the framework does", metavar="NAME", takes="str", read=reader("parallel.choices", "read_context_form"),
    )  # fmt: skip
    offload: Any = word(
        "What lies in the host's memory: checkpoints (inputs of recomputed layers), activations, optimizer or parameters, with commas",
        otherwise="nothing", metavar="NAMES", takes="Sequence[str] | str", read=reader("parallel.choices", "read_offloads"),
    )  # fmt: skip
    gradient_compression: Any = word(
        "How replicas compress the gradients that they all-reduce: none, fp16, bf16 or powersgd:RANK (the setting gradient_compression)",
        otherwise="none", metavar="NAME", takes="str", read=reader("parallel.compression", "read_compression"),
    )  # fmt: skip
    calibration: Any = _calibration()
    memory_headroom: Any = word(
        "In place of --risk: share of the usable memory that a plan that fits leaves free; 0: none",
        metavar="SHARE", takes="float | str",
    )  # fmt: skip
    risk: Any = word(
        "Probability of running out of memory that a plan that fits may have", otherwise=f"{DEFAULT_RISK:.0%} if left out",
        metavar="SHARE", takes="float | str",
    )  # fmt: skip

    def having(self, **words: Any) -> Request:
        """Return the request with these words, after reading, in place of its own."""
        known = words_of(Request)
        for name, value in words.items():
            if (read := known[name].read) is not None and value is not None:
                words[name] = read(value, name)
        return replace(self, **words)

    def described(self) -> dict[str, Any]:
        """Return the given values as plain data, without those that were left out."""
        values: dict[str, Any] = {}
        for name, entry in words_of(type(self)).items():
            given = getattr(self, name)
            if entry.several and given is not None:
                value = getattr(given, "name", given)
                values[name] = str(value) if isinstance(value, Path) or name in ("train", "routing") else value
        if self.settings:
            from perfmodel.parallel.framework_ref import read_settings, settings_text

            values["settings"] = settings_text(read_settings(self.settings))
        return values


# --- Services --------------------------------------------------------------------------------------------------------

_lengths, _share = reader("workload.serving", "lengths_of"), share


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ServingRequest:
    """Model, load, formats and cluster of a service. None is the default: of the engine, or of the model's checkpoint."""

    model: Any = word(
        "A model's name (`perfmodel models`) or a config.json", metavar="NAME|PATH", takes="Name | TransformerConfig", missing=_A_MODEL
    )
    cluster: Any = word("A cluster's name (`perfmodel clusters`) or file", metavar="NAME|PATH", takes="Name | Cluster", missing=_A_CLUSTER)
    chips: Any = size(
        "Chips to use; with --search and a load the fewest that hold it if left out", aliases=("--gpus",), missing="how many chips serve"
    )
    input_len: Any = word(
        "Tokens of a prompt, such as 1k, or 800:1024 where they vary evenly", metavar="N|N:N", read=_lengths,
        takes="int | str | Lengths", missing="the tokens of a prompt",
    )  # fmt: skip
    output_len: Any = word(
        "Tokens of an answer, as --input-len", metavar="N|N:N", read=_lengths, takes="int | str | Lengths",
        missing="the tokens of an answer",
    )  # fmt: skip
    concurrency: Any = size("Requests in flight, of all replicas together; each answer is followed by the next request")
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
    draft_tokens: int | None = word("Tokens drafted a step (speculative decoding)", kind=int)
    acceptance: Any = word(
        "Of drafted tokens the share that is accepted, each given those before it", otherwise=".7 if left out", metavar="SHARE",
        read=_share, takes="float | str",
    )  # fmt: skip
    draft_model: Any = word(
        "The model that drafts", otherwise="the model's own module for further tokens if left out", metavar="NAME|PATH",
        takes="Name | TransformerConfig",
    )  # fmt: skip
    price: Any = word(
        "USD an hour for a chip, such as 2.5", otherwise="as `perfmodel chips NAME` has it if left out", metavar="USD",
        read=_positive("USD an hour for a chip", 1e6, before="$"), is_last=True,
        takes="float | str",
    )  # fmt: skip
    assume: Any = word(
        "A constant of energy and carbon (`perfmodel assumptions`), such as pue=1.1 or location=france", metavar="NAME=VALUE",
        takes="Mapping[str, float | str]", repeats=True, is_last=True,
    )  # fmt: skip
    calibration: Any = _calibration(is_last=True)

    def having(self, **words: Any) -> ServingRequest:
        """Return the request with these words in place of its own; the setting of the service reads them."""
        return replace(self, **words)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Service:
    """Request of a service, and the knobs of its layout."""

    request: ServingRequest = part(ServingRequest)
    knobs: ServingKnobs = part(ServingKnobs)

    def given(self) -> dict[str, Any]:
        """Return the words of both that were given."""
        return given_words(self)

    def having(self, words: Mapping[str, Any]) -> Service:
        """Return the service with these words in place of its own."""
        service: Service = Words(Service).make({**self.given(), **words})
        return service
