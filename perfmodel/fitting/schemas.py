"""Schema of measured runs: the columns of a table, or the fields of a JSON line.

Names are compared in lower case, with `_` for every other character. Unknown names are skipped and reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import Field

from perfmodel.fitting.columns import flag_of, integer_of, mapping_of, positive, size_of, time_of, times_of
from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.schema import OMITTED, FileModel, ReadBy
from perfmodel.parallel.framework_ref import SETTINGS
from perfmodel.parallel.plan import Plan
from perfmodel.workload.config import TransformerConfig


def _of(types: tuple[type, ...], words: str, schema: dict[str, Any]) -> ReadBy:
    """Return the annotation of a value of these types."""

    def read(value: object, field: str) -> None:
        if not isinstance(value, types):
            raise bad_field(field, shown(value), f"must be {words}", "correct it")

    return ReadBy(read, schema)


_Text = Annotated[Any, _of((str,), "a text", {"type": "string"})]
_Object = Annotated[Any, _of((str, Mapping, Plan, TransformerConfig), "a text or a mapping", {"type": ["string", "object"]})]
_Any = Annotated[Any, ReadBy(lambda value, field: value, {"type": ["string", "number", "boolean"]})]
_Count = Annotated[Any, ReadBy(lambda value, field: integer_of(value, field), {"type": ["integer", "string"], "minimum": 1})]
_Stage = Annotated[Any, ReadBy(lambda value, field: integer_of(value, field, least=0), {"type": ["integer", "string"], "minimum": 0})]
_Settings = Annotated[Any, ReadBy(mapping_of, {"type": ["string", "object"]})]
_Flag = Annotated[Any, ReadBy(flag_of, {"type": ["boolean", "string"]})]


def _measured(read: Callable[[Any, str], Any], unit: str) -> ReadBy:
    return ReadBy(read, {"type": ["number", "string"], "unit": unit})


_Seconds = Annotated[Any, _measured(time_of, "s")]
_Milliseconds = Annotated[Any, _measured(positive, "ms")]
_Rate = Annotated[Any, _measured(positive, "1/s")]
_Link = Annotated[Any, _measured(positive, "Gbit/s")]
_Size = Annotated[Any, _measured(size_of, "byte")]
_Gib = Annotated[Any, _measured(positive, "GiB")]


def _column(description: str, aliases: str = "") -> Any:
    """Return the field of a column with its other names."""
    also = f"; also `{'`, `'.join(aliases.split())}`" if aliases else ""
    return Field(OMITTED, description=description + also, json_schema_extra={"aliases": [*aliases.split()]})


class MeasuredRunFile(FileModel):
    """A measured run: its plan, and its step time or its peak of memory."""

    id: _Any = _column("name of the run", "name run run_id run_name")
    framework: _Text = _column("framework, with settings after +; default: an unknown one", "trainer")
    model: _Object = _column("name of a model, path of a config.json, or the sizes of a case", "model_name config architecture")
    cluster: _Text = _column("name or file of the cluster")
    chip: _Text = _column("name of the chip, in place of `cluster`", "gpu gpu_type gpu_name device_type accelerator hardware")
    chips_per_node: _Count = _column("chips of a node", "per_node gpus_per_node devices_per_node nproc_per_node")
    chips: _Count = _column("number of chips", "num_chips gpus num_gpus ngpus n_gpus world_size devices num_devices")
    nodes: _Count = _column("nodes, in place of `chips`", "num_nodes nnodes n_nodes")
    inter_node_gbit_per_s_per_node: _Link = _column("network of a node [Gbit/s]")
    tp: _Count = _column(
        "tensor-parallel degree; default: 1",
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tp_degree",
    )
    pp: _Count = _column(
        "pipeline stages; default: 1",
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size pp_degree",
    )
    cp: _Count = _column(
        "context-parallel degree; default: 1", "context_parallel context_parallel_size context_parallel_degree cp_size cp_degree"
    )
    dp: _Count = _column("data-parallel degree", "data_parallel data_parallel_size data_parallel_degree dp_size dp_degree")
    dp_replicate: _Count = _column("replicas of the sharded state", "data_parallel_replicate_degree")
    dp_shard: _Count = _column("ranks that shard the state", "fsdp data_parallel_shard_degree")
    zero: _Stage = _column("ZeRO stage; FSDP is 3", "zero_stage")
    distributed_optimizer: _Flag = _column("true is ZeRO 1", "use_distributed_optimizer")
    micro_batch: _Count = _column(
        "sequences of a pass", "mbs micro_batch_size per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu"
    )
    global_batch: _Count = _column("sequences of a step over all chips", "gbs global_batch_size train_batch_size")
    accumulation: _Count = _column(
        "passes of a step, in place of `global_batch`",
        "gradient_accumulation_steps grad_accum gas gradient_accumulation accumulation_steps num_microbatches",
    )
    seq_len: _Count = _column(
        "tokens of a sequence",
        "seq sequence_length seq_length sequence_len context_length max_seq_len max_seq_length block_size",
    )
    precision: _Text = _column("number format; default: bf16", "dtype")
    recompute: _Any = _column(
        "none, selective or full",
        "activation_checkpointing activation_recomputation recompute_granularity ac gradient_checkpointing",
    )
    virtual_stages: _Count = _column("model chunks of a stage", "vpp virtual_pipeline_model_parallel_size interleave")
    sequence_parallel: _Flag = _column("sequence parallelism; default: with tensor parallelism", "sp")
    attention: _Any = _column("kernel of attention, or whether it is fused", "flash_attention attn attn_implementation")
    optimizer: _Text = _column("optimizer; default: adamw")
    train: _Text = _column("training method, such as `lora:16`; default: full")
    settings: _Settings = _column("settings of the framework; each may also be a column")
    plan: _Object = _column("plan of the run: a file, or its fields; in place of the columns above", "plan_file")
    step_time: _Seconds = _column(
        "time of a step: seconds, or with a unit",
        "step_time_s step_s step_seconds seconds_per_step time_per_step iteration_time iter_time s_per_step",
    )
    step_time_ms: _Milliseconds = _column(
        "time of a step [ms]", "step_ms ms_per_step iteration_time_ms elapsed_time_per_iteration_ms iter_time_ms time_ms"
    )
    step_times: Annotated[Any, ReadBy(times_of, {"type": ["array", "string"], "unit": "s"})] = _column("times of consecutive steps [s]")
    tokens_per_s: _Rate = _column("tokens a second of all chips", "tokens_per_second tokens_per_sec tok_s throughput_tokens")
    tokens_per_s_per_chip: _Rate = _column(
        "tokens a second of one chip",
        "tokens_per_second_per_chip tokens_per_s_per_gpu tokens_per_sec_per_gpu tokens_per_second_per_gpu tps tgs",
    )
    samples_per_s: _Rate = _column("sequences a second of all chips", "samples_per_second samples_per_sec train_samples_per_second")
    peak_memory: _Size = _column(
        "peak of reserved memory: bytes, or with a unit", "peak_reserved max_reserved max_memory_reserved peak_memory_reserved"
    )
    peak_memory_gib: _Gib = _column(
        "peak of reserved memory [GiB]",
        "peak_reserved_gib max_reserved_gib max_memory_reserved_gib memory_max_reserved_gib memory_max_memory_reserved_gib",
    )
    peak_allocated: _Size = _column(
        "peak of allocated memory: bytes, or with a unit", "max_allocated max_memory_allocated peak_memory_allocated"
    )
    peak_allocated_gib: _Gib = _column(
        "peak of allocated memory [GiB]",
        "max_allocated_gib max_memory_allocated_gib memory_max_allocated_gib memory_max_memory_allocated_gib",
    )
    measured: Annotated[Any, ReadBy(lambda value, field: value, {"type": "object"})] = _column("measurements of a case")
    outcome: _Any = _column("whether it ran; not read")


#: Columns that describe a run and are neither inputs nor measurements.
_EXTRA_COLUMNS = frozenset(
    (
        *("id", "source", "source_ref", "notes", "note", "comment", "inferred", "tier", "suspect", "date"),
        *("memory", "loss", "mfu", "hfu", "tflops", "kind", "ep"),
    )
)
_NAMES = {
    alias: name
    for name, field in MeasuredRunFile.model_fields.items()
    for alias in (name, *cast(dict[str, Any], field.json_schema_extra)["aliases"])
}


def name_of(column: str) -> str:
    """Return the standard name of a column; empty for an unknown one."""
    plain = _plain(column)
    if plain in _NAMES:
        return _NAMES[plain]
    return f"settings.{plain}" if plain in SETTINGS else ""


def is_extra(column: str) -> bool:
    """Return whether a column is known and irrelevant for a fit."""
    return _plain(column) in _EXTRA_COLUMNS


def _plain(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")
