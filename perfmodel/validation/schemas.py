"""Schemas of the lines of a cases file: training runs and serving runs.

A prediction checks its inputs only (`cases.NOT_INPUTS`). Published runs come with more than perfmodel reads: unknown fields are ignored,
and a value of another type counts as not stated. Numbers out of range and unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from perfmodel.foundation.errors import bad_field, one_line
from perfmodel.foundation.schema import MAX_COUNT, OMITTED, FileModel, Number, OneOf, ReadBy, validated
from perfmodel.parallel.choices import ZERO_STAGES
from perfmodel.validation.fields import CACHES, PRECISIONS, SERVED_PRECISIONS, SERVING_KINDS

RECOMPUTATIONS = ("none", "selective", "full", "minimal_offloaded")
_CORRECT = "correct it in the case"


def _whole(least: int) -> ReadBy:
    """Return the annotation of an integer; 8.0 is 8, as tables with empty cells write it."""

    def read(value: object, field: str) -> None:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number < MAX_COUNT:
            raise bad_field(field, one_line(value, 40), f"must be a whole number from {least} to {MAX_COUNT - 1}", _CORRECT)

    return ReadBy(read, {"type": "integer", "minimum": least, "maximum": MAX_COUNT - 1})


def _known(names: Iterable[str], rule: str = "is not known") -> ReadBy:
    """Return the annotation of a name from a closed choice."""
    choices = tuple(names)

    def read(value: object, field: str) -> None:
        if value not in choices:
            raise bad_field(field, one_line(value, 40), rule, f"use one of {', '.join(choices)}")

    return ReadBy(read, {"enum": list(choices)})


def _read_targets(value: object, field: str) -> None:
    if not isinstance(value, str | list):
        raise bad_field(field, one_line(value, 40), "must be a text or a list of texts", _CORRECT)


def _read_rate(value: object, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise bad_field(field, one_line(value), "must be a positive number", _CORRECT)


def _read_stage(value: object, field: str) -> None:
    if isinstance(value, bool) or value not in ZERO_STAGES:
        raise bad_field(field, one_line(value), "must be 0, 1, 2 or 3", _CORRECT)


_Count = Annotated[int, _whole(1)]
_CountOrZero = Annotated[int, _whole(0)]
_Targets = Annotated[Any, ReadBy(_read_targets, {"type": ["string", "array"]})]
_Mean = Annotated[float, Field(ge=1, le=MAX_COUNT)]
_Rate = Annotated[float, ReadBy(_read_rate, {"type": "number", "exclusiveMinimum": 0})]


def _in(unit: str, description: str) -> Any:
    """Return an optional field with a number in this unit."""
    return Field(OMITTED, description=f"{description} [{unit}]", json_schema_extra={"unit": unit})


def _text(description: str) -> Any:
    return Field(OMITTED, description=description)


#: Errors of pydantic for a value of another type than that of the field.
_OTHER_TYPES = {"bool_type", "dict_type", "float_type", "list_type", "model_type", "string_type"}


class CaseModel(FileModel):
    """A mapping of a case, of which unknown fields and values of another type are ignored."""

    model_config = ConfigDict(extra="ignore")

    @field_validator("*", mode="wrap")
    @classmethod
    def another_type_is_not_stated(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if all(not fault["loc"] and fault["type"] in _OTHER_TYPES for fault in error.errors(include_url=False)):
                return None
            raise


def checked_inputs(model: type[CaseModel], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a case with None for values of another type. Raises InputError that names every fault."""
    return _with_unstated(inputs, validated(model, inputs).model_dump(exclude_unset=True))


def _with_unstated(given: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    unstated = {name: None for name, value in read.items() if value is None}
    nested = {name: _with_unstated(given[name], value) for name, value in read.items() if isinstance(value, dict)}
    return {**given, **unstated, **nested}


class CaseFile(CaseModel):
    """Description of a run: no prediction depends on these fields."""

    id: str | int | None = _text("name of the run; its first word, up to a dash, is the source in tables")
    source: str | None = _text("where the run was published")
    source_ref: str | None = _text("file, table or row of the source")
    notes: str | None = _text("free text; LoRA in it marks a run that states no training method")
    inferred: list[str] | None = _text("inputs that the source does not state in this form")
    tier: str | float | None = _text("class of the run: primary runs are scored")
    outcome: Annotated[str, OneOf(("ran", "out_of_memory"))] | None = _text("whether it ran or was out of memory")
    suspect: str | bool | None = _text("fault of the measurement: such a serving run is not scored")
    metric_note: str | None = _text("other parts of a measurement; a time to first token with `queue` or `start-up` is not scored")
    repeat_group: str | None = _text("name shared by runs that repeat one configuration")
    tokens_per_s_counts: str | None = _text("tokens that `measured.tokens_per_s` counts, such as output")


class MeasuredTraining(CaseModel):
    """Measurements of a training run."""

    step_time_s: Number | None = _in("s", "time of a step")
    tokens_per_s_per_chip: Number | None = _in("tokens/s", "tokens a second of one chip, if there is no step time")
    peak_memory_gib: Number | None = _in("GiB", "peak of the chip with the largest, as the framework counts it")
    peak_memory_gib_each: list[Number] | None = _in("GiB", "peak of each kind of chip; not read")
    reserved_gib: Number | None = _in("GiB", "memory that the allocator holds; not read")
    host_memory_gib: Number | None = _in("GiB", "memory of the host; not read")
    samples_per_s: Number | None = _in("samples/s", "sequences a second; not read")
    time_per_sample_s: Number | None = _in("s", "time of a sequence; not read")
    micro_step_time_s: Number | None = _in("s", "time of a micro-batch; not read")
    weight_write_s: Number | None = _in("s", "time to write adapters; not read")
    total_time_s: Number | None = _in("s", "time of the run; not read")
    mfu: Number | None = _in("-", "model FLOPs utilization; not read")
    hfu: Number | None = _in("-", "hardware FLOPs utilization; not read")
    tflops_per_chip: Number | None = _in("TFLOP/s", "work of a chip; not read")
    tflops_kind: str | None = _text("operations that `tflops_per_chip` counts; not read")


class TrainingModelFile(CaseModel):
    """Sizes of the model of a training run; without them it is the shipped model of its name."""

    name: str | None = _text("name; a shipped model of this name and these sizes has what a run leaves out")
    kind: str | None = _text("decoder, moe, moe-mla, or an architecture that is not predicted; default: decoder")
    num_hidden_layers: _Count | None = _text("layers")
    hidden_size: _Count | None = _text("width of the residual stream")
    num_attention_heads: _Count | None = _text("query heads")
    num_key_value_heads: _Count | None = _text("key-value heads; default: the number of query heads")
    head_dim: _Count | None = _text("width of a head; default: hidden_size / num_attention_heads")
    intermediate_size: _Count | None = _text("width of the MLP, or of an expert")
    gated_mlp: bool | None = _text("true: Llama's block; false: GPT's")
    vocab_size: _Count | None = _text("rows of the embedding; default: that of GPT-2, padded")
    tie_word_embeddings: bool | None = _text("embedding and head share weights; default: in GPT's block")
    sliding_window: _Count | None = _text("positions that a layer attends to; default: all")
    sliding_layers: str | None = _text("share of layers with the window, such as 3 of 4; default: all")
    num_experts: _CountOrZero | None = _text("experts of a layer")
    num_experts_per_tok: _CountOrZero | None = _text("experts that process a token")
    num_dense_layers: _CountOrZero | None = _text("layers before the first with experts")
    first_dense_layers: _CountOrZero | None = _text("other name of `num_dense_layers`")
    num_mtp_layers: _CountOrZero | None = _text("modules for multi-token prediction")
    parameters: Number | None = _text("number of parameters; not read")
    attention: str | None = _text("kind of attention; not read, as all sizes below: the shipped model has them")
    dense_intermediate_size: _Count | None = _text("width of the MLP of dense layers")
    shared_experts: _CountOrZero | None = _text("experts that process every token")
    q_lora_rank: _CountOrZero | None = _text("rank of latent queries")
    kv_lora_rank: _Count | None = _text("rank of latent keys and values")
    qk_nope_head_dim: _Count | None = _text("width of a key without positions")
    qk_rope_head_dim: _Count | None = _text("width of a key with positions")
    v_head_dim: _Count | None = _text("width of a value")


class AdaptersFile(CaseModel):
    """Adapters of a fine-tuning run."""

    r: _Count | None = _text("rank; default: 16")
    rank: _Count | None = _text("other name of `r`")
    targets: _Targets | None = _text("linear operators with adapters, such as `query, value` or `all linears`")
    adapters: _Count | None = _text("adapters that are trained together; default: 1")
    base_bits: _Count | None = _text("bits of a frozen weight: 4, 8 or 16")


class ChipKindFile(CaseModel):
    """One kind of chips of a run on several kinds."""

    chip: str = Field(description="name of a known chip")
    count: _Count = Field(description="number of such chips")
    nodes: _Count | None = _text("their nodes")
    network_gbit_s: _Rate | None = _in("Gbit/s", "network of a node")
    scale_up_gbit_s: _Rate | None = _in("Gbit/s", "link of a chip inside the node")
    nics: _Count | None = _text("NICs of a node")
    speed: _Rate | None = _in("-", "share of the chip's rates that it reaches; default: 1")


class StageFile(CaseModel):
    """One pipeline stage."""

    units: _Count = Field(description="modules of the stage: embedding, layers, norm and head")


class TrainingCaseFile(CaseFile):
    """A training run. A missing field or null takes the framework's default."""

    measured: MeasuredTraining | None = _text("measurements; no prediction depends on them")
    framework: str | None = _text("framework with its release; default: an unknown one")
    model: TrainingModelFile | None = _text("model, by its sizes")
    sequence_length: _Count | None = _text("tokens of a sequence; no default")
    global_batch: _Count | None = _text("sequences of a step over all replicas; no default")
    micro_batch: _Count | None = _text("sequences of a pass; default: that of the framework")
    gradient_accumulation: _CountOrZero | None = _text("passes of a step; not read, it follows from the batches")
    chip: str | None = _text("name of a known chip")
    chips: list[ChipKindFile] | None = Field(
        OMITTED, min_length=1, description="kinds of chips in the order of the ranks, in place of `chip`"
    )
    num_chips: _Count | None = _text("number of chips; no default unless `dp` is given")
    chips_per_node: _Count | None = _text("chips of a node; default: 8, or those of the chip")
    inter_node_gbit_per_s_per_node: _Rate | None = _in("Gbit/s", "network of a node; default: that of the chip's usual node")
    precision: Annotated[str, _known(PRECISIONS, "not known")] | None = _text("number format of the step; default: bf16")
    optimizer: str | None = _text("optimizer, as its source names it; default: Adam")
    dp: _Count | None = _text("data-parallel replicas; default: by the number of chips")
    tp: _Count | None = _text("tensor-parallel degree; default: 1")
    pp: _Count | None = _text("pipeline stages; default: 1")
    cp: _Count | None = _text("context-parallel degree; default: 1")
    ep: _Count | None = _text("expert-parallel degree; default: 1")
    etp: _Count | None = _text("tensor-parallel degree of an expert; default: that of the framework")
    dispatcher: str | None = _text("dispatcher of tokens to experts: alltoall, allgather or flex")
    virtual_stages: _Count | None = _text("model chunks of a pipeline stage")
    stages: list[StageFile] | None = _text("stages of the pipeline by their modules; default: even stages")
    sequence_parallel: bool | None = _text("sequence parallelism with tensor parallelism")
    zero_stage: Annotated[int, ReadBy(_read_stage, {"enum": list(ZERO_STAGES)})] | None = _text("ZeRO stage; FSDP is 3")
    distributed_optimizer: bool | None = _text("true is ZeRO 1, where `zero_stage` is missing")
    recompute: Annotated[str, _known(RECOMPUTATIONS, "not known")] | None = _text("activation checkpointing")
    flash_attention: bool | None = _text("fused attention kernel")
    method: str | None = _text("full, lora, qlora, dora or qdora; a word before it, as in `rl lora`, names the trainer's mode")
    lora: AdaptersFile | None = _text("adapters")
    train: str | None = _text("training method as in a plan, such as `lora:16`; in place of `method` and `lora`")
    modality: str | None = _text("text; others are not predicted")
    packed: bool | None = _text("false: sequences are shorter than `sequence_length`, so the time does not correspond to that length")
    settings: dict[str, Any] | None = _text("settings of the framework (docs/settings.md)")


class MeasuredServing(CaseModel):
    """Measurements of a serving run, of all chips together."""

    ttft_ms: Number | None = _in("ms", "mean time to first token")
    tpot_ms: Number | None = _in("ms", "mean time per output token")
    e2e_ms: Number | None = _in("ms", "mean latency of a request")
    tokens_per_s: Number | None = _in("tokens/s", "output tokens a second")


class ServedExpertsFile(CaseModel):
    """Experts of a layer."""

    experts: _CountOrZero | None = _text("number of experts; 0: none")
    top_k: _Count | None = _text("experts that process a token")
    expert_ffn: _Count | None = _text("width of an expert")
    shared: _CountOrZero | None = _text("experts that process every token")
    shared_ffn: _CountOrZero | None = _text("width of a shared expert")
    first_dense_layers: _CountOrZero | None = _text("layers before the first with experts")


class ServedMambaFile(CaseModel):
    """State-space layers."""

    heads: _Count = Field(description="heads")
    head_dim: _Count = Field(description="width of a head")
    groups: _Count = Field(description="groups that share input and output projections")
    state: _Count = Field(description="size of the state")
    conv_kernel: _Count | None = _text("width of the convolution; default: 4")


class ServedDeltaFile(CaseModel):
    """Linear attention with the delta rule."""

    key_heads: _Count = Field(description="key heads")
    value_heads: _Count = Field(description="value heads")
    key_head_dim: _Count = Field(description="width of a key")
    value_head_dim: _Count = Field(description="width of a value")
    conv_kernel: _Count | None = _text("width of the convolution; default: 4")


class ServedModelFile(CaseModel):
    """Sizes of the model of a serving run; a shipped model of these sizes has what a run leaves out."""

    name: str | None = _text("name in tables")
    layers: _Count | None = _text("layers; no default")
    hidden: _Count | None = _text("width of the residual stream; no default")
    heads: _Count | None = _text("query heads; no default")
    kv_heads: _Count | None = _text("key-value heads; default: the number of query heads")
    head_dim: _Count | None = _text("width of a head; default: hidden / heads")
    ffn: _Count | None = _text("width of the MLP; no default without experts")
    vocab: _Count | None = _text("rows of the embedding; no default")
    gated_mlp: bool | None = _text("Llama's block; default: true")
    attention: Annotated[str, _known(("gqa", "mla", "mla+dsa", "hybrid"))] | None = _text("kind of attention; default: gqa")
    sliding_window: _CountOrZero | None = _text("positions that a layer attends to; default: all")
    full_attention_interval: _CountOrZero | None = _text("period of the layers that attend to all positions")
    attention_output_gate: bool | None = _text("the output of attention is gated")
    moe: ServedExpertsFile | None = _text("experts")
    mamba: ServedMambaFile | None = _text("state-space layers")
    linear_attention: ServedDeltaFile | None = _text("linear-attention layers")
    layer_pattern: str | None = _text("a letter for each layer: M mamba, * attention, E experts, - MLP")
    q_lora_rank: _CountOrZero | None = _text("rank of latent queries")
    kv_lora_rank: _Count | None = _text("rank of latent keys and values; no default with mla")
    qk_nope_head_dim: _Count | None = _text("width of a key without positions; no default with mla")
    qk_rope_head_dim: _Count | None = _text("width of a key with positions; no default with mla")
    v_head_dim: _Count | None = _text("width of a value; no default with mla")
    index_heads: _CountOrZero | None = _text("heads of the indexer of sparse attention")
    index_head_dim: _CountOrZero | None = _text("width of a head of the indexer")
    index_topk: _CountOrZero | None = _text("positions that the indexer selects")


class ServedDegreesFile(CaseModel):
    """Degrees of attention and of experts."""

    attention_dp: _Count | None = _text("data-parallel degree of attention; default: 1")
    moe_ep: _Count | None = _text("expert-parallel degree")
    moe_tp: _Count | None = _text("tensor-parallel degree of an expert")


class WorkersFile(CaseModel):
    """Prefill and decode workers of disaggregated serving."""

    prefill_workers: _Count | None = _text("number of prefill workers; no default")
    chips_per_prefill_worker: _Count | None = _text("chips of a prefill worker; no default")
    decode_workers: _Count | None = _text("number of decode workers; no default")
    chips_per_decode_worker: _Count | None = _text("chips of a decode worker; no default")
    decode_attention_dp: bool | None = _text("attention of decode workers is data-parallel; default: false")


class ServingCaseFile(CaseFile):
    """A serving run. A missing field or null takes the engine's default."""

    measured: MeasuredServing | None = _text("measurements; no prediction depends on them")
    framework: str | None = _text("engine with its version; default: an unknown one")
    model: ServedModelFile | None = _text("model, by its sizes; no default")
    chip: str | None = _text("chip in the words of the source")
    chip_id: str | None = _text("name of a known chip")
    chips: _Count | None = _text("number of chips; default: those of one replica")
    tp: _Count | None = _text("tensor-parallel degree; default: by the number of chips")
    pp: _Count | None = _text("pipeline stages; default: 1")
    parallel: ServedDegreesFile | None = _text("degrees of attention and of experts")
    disaggregated: bool | None = _text("prefill and decode run on other chips")
    disagg: WorkersFile | None = _text("workers of disaggregated serving")
    prefill_chips: _Count | None = _text("chips of all prefill workers; not read")
    decode_chips: _Count | None = _text("chips of all decode workers; not read")
    precision: Annotated[str, _known(SERVED_PRECISIONS)] | None = _text("format of the weights; default: bf16")
    kv_precision: Annotated[str, _known(CACHES)] | None = _text("format of the KV cache; default: by the weights and the engine")
    kind: Annotated[str, _known(SERVING_KINDS)] | None = _text("what was measured; default: serving with a `batch`, else max_throughput")
    batch: _Count | None = _text("concurrent requests; no default, except for max_throughput")
    input_len: _Count | None = _text("longest prompt [tokens]; no default unless its mean is given")
    input_len_mean: _Mean | None = _in("tokens", "mean prompt")
    output_len: _Count | None = _text("longest answer [tokens]; no default unless its mean is given")
    output_len_mean: _Mean | None = _in("tokens", "mean answer")
    repeated_prompts: bool | None = _text("all requests have the same prompt; default: false")
    speculative: bool | None = _text("speculative decoding; default: false")
    draft_tokens: _Count | None = _text("drafted tokens of a step; default: 1 with speculative decoding")
