"""Columns of files of measured runs: names, aliases and forms of values.

Names are compared in lower case, with `_` for every other character. Unknown names are skipped and reported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.units import QuantityKind, parse_quantity
from perfmodel.foundation.values import parsed_bool, read_integer
from perfmodel.parallel.framework_ref import SETTINGS
from perfmodel.validation.case_settings import settings_of_case

#: name -> aliases
_ALIASES: Mapping[str, str] = {
    "id": "name run run_id run_name",
    "framework": "trainer",
    "model": "model_name config architecture",
    "cluster": "",
    "chip": "gpu gpu_type gpu_name device_type accelerator hardware",
    "chips_per_node": "per_node gpus_per_node devices_per_node nproc_per_node",
    "chips": "num_chips gpus num_gpus ngpus n_gpus world_size devices num_devices",
    "nodes": "num_nodes nnodes n_nodes",
    "inter_node_gbit_per_s_per_node": "",
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tp_degree",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size pp_degree",
    "cp": "context_parallel context_parallel_size context_parallel_degree cp_size cp_degree",
    "dp": "data_parallel data_parallel_size data_parallel_degree dp_size dp_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "fsdp data_parallel_shard_degree",
    "zero": "zero_stage",
    "distributed_optimizer": "use_distributed_optimizer",
    "micro_batch": "mbs micro_batch_size per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "global_batch": "gbs global_batch_size train_batch_size",
    "accumulation": "gradient_accumulation_steps grad_accum gas gradient_accumulation accumulation_steps num_microbatches",
    "seq_len": "seq sequence_length seq_length sequence_len context_length max_seq_len max_seq_length block_size",
    "precision": "dtype",
    "recompute": "activation_checkpointing activation_recomputation recompute_granularity ac gradient_checkpointing",
    "virtual_stages": "vpp virtual_pipeline_model_parallel_size interleave",
    "sequence_parallel": "sp",
    "attention": "flash_attention attn attn_implementation",
    "optimizer": "",
    "train": "",
    "settings": "",
    "plan": "plan_file",
    "step_time": "step_time_s step_s step_seconds seconds_per_step time_per_step iteration_time iter_time s_per_step",
    "step_time_ms": "step_ms ms_per_step iteration_time_ms elapsed_time_per_iteration_ms iter_time_ms time_ms",
    "step_times": "",
    "tokens_per_s": "tokens_per_second tokens_per_sec tok_s throughput_tokens",
    "tokens_per_s_per_chip": "tokens_per_second_per_chip tokens_per_s_per_gpu tokens_per_sec_per_gpu tokens_per_second_per_gpu tps tgs",
    "samples_per_s": "samples_per_second samples_per_sec train_samples_per_second",
    "peak_memory": "peak_reserved max_reserved max_memory_reserved peak_memory_reserved",
    "peak_memory_gib": "peak_reserved_gib max_reserved_gib max_memory_reserved_gib memory_max_reserved_gib memory_max_memory_reserved_gib",
    "peak_allocated": "max_allocated max_memory_allocated peak_memory_allocated",
    "peak_allocated_gib": "max_allocated_gib max_memory_allocated_gib memory_max_allocated_gib memory_max_memory_allocated_gib",
    "measured": "",
    "outcome": "",
}  # fmt: skip
#: Columns that describe a run and are neither inputs nor measurements.
_EXTRA_COLUMNS = frozenset(
    (
        *("id", "source", "source_ref", "notes", "note", "comment", "inferred", "tier", "suspect", "date"),
        *("memory", "loss", "mfu", "hfu", "tflops", "kind", "ep"),
    )
)
_NAMES = {other: name for name, others in _ALIASES.items() for other in (name, *others.split())}
MEASURED = ("step_time", "step_time_ms", "step_times", "tokens_per_s", "tokens_per_s_per_chip", "samples_per_s")
#: Column of a peak of memory -> what it counts.
MEMORIES: Mapping[str, str] = {
    "peak_memory": "reserved",
    "peak_memory_gib": "reserved",
    "peak_allocated": "allocated",
    "peak_allocated_gib": "allocated",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of a file: values by name, as written. location: file and line, for messages."""

    location: str
    values: Mapping[str, Any]

    def over(self, defaults: Mapping[str, Any]) -> Row:
        """Return the row with missing values taken from `defaults`."""
        return Row(location=self.location, values={**defaults, **self.values})

    def integer(self, name: str, *, least: int = 1) -> int | None:
        """Return an integer, or None if it is not given. `8.0` is 8, `8k` 8192."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"\d+\.0+", value.strip()):
            value = value.strip().partition(".")[0]
        if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
            value = value.replace(",", "")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return read_integer(value, name, least=least)

    def flag(self, name: str) -> bool | None:
        return flag_of(self.values.get(name), name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise bad_field(name, shown(value), "must be a text", "correct it")
        return value.strip()

    def number(self, name: str) -> float | None:
        """Return a positive number; see `positive`."""
        value = self.values.get(name)
        if value is None:
            return None
        return positive(value, name)


GIB = 1024.0**3
_FEWEST_BYTES = 1e6
"""A smaller peak is not in bytes but in GiB or MiB."""

_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_DECIMAL_COMMA = re.compile(r"\d+,\d+")


def positive(value: object, name: str, *, is_time: bool = False) -> float:
    """Return a positive number. Commas before three digits separate thousands (`12,345.6`), any other is a decimal comma (`7,91`).

    is_time   a time in seconds, in which `7,912` is ambiguous: it is refused
    """
    number = math.nan
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.,]+(?:[eE][+-]?\d+)?\s*", value):
        value = value.strip()
        if is_time and re.fullmatch(r"\d{1,3},\d{3}", value):
            remedy = f"write {value.replace(',', '.')} or {value.replace(',', '')}"
            raise bad_field(name, value, "is a decimal comma or one between thousands", remedy)
        if _DECIMAL_COMMA.fullmatch(value) and not _THOUSANDS.fullmatch(value):
            value = value.replace(",", ".")
        value = re.sub(r",(?=\d{3}(?:\D|$))", "", value)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.nan
    if not (math.isfinite(number) and number > 0):
        raise bad_field(name, shown(value), "must be a positive number", "correct it")
    return number


def flag_of(value: object, name: str) -> bool | None:
    """Return a boolean from its usual spellings, or None if it is not given."""
    if value is None or isinstance(value, bool):
        return value
    return parsed_bool(str(value), name)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run: its `settings` object, and columns with the names of settings, which defaults may supply."""
    given = values.get("settings")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise bad_field("settings", given, "must be a JSON object", 'write {"compile": true}') from None
    if given is not None and not isinstance(given, Mapping):
        raise bad_field("settings", shown(given), "must be a mapping of names to values", 'write {"compile": true}')
    given = settings_of_case(given)
    columns = {name.partition(".")[2]: _typed(value) for name, value in values.items() if name.startswith("settings.")}
    return {**columns, **(given or {})}


def _typed(value: object) -> Any:
    """Return the value of a table cell in its JSON type."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        return word


def time_of(value: object, name: str) -> float:
    """Return a step time: `4.2`, `4.2 s` or `4200 ms`. [s]"""
    if isinstance(value, str) and re.search(r"[a-df-zµ]", value):
        digits, unit = re.match(r"\s*([\d.,]*)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
        if "," in digits:
            value = f"{positive(digits, name, is_time=unit.strip() == 's'):.15g}{unit}"
        seconds = parse_quantity(value, QuantityKind.TIME, field=name)
        if seconds > 0:
            return seconds
    return positive(value, name, is_time=True)


def size_of(value: object, name: str) -> float:
    """Return a peak of memory: with a unit (`42.8 GiB`), in GiB under a name with `_gib`, else in bytes as torch counts them. [byte]"""
    if name.endswith("_gib"):
        return positive(value, name) * GIB
    if isinstance(value, str) and not re.fullmatch(r"\s*[\d.,]+\s*", value):
        return parse_quantity(value.strip(), QuantityKind.BYTES, field=name)
    size = positive(value, name)
    if size < _FEWEST_BYTES:
        raise bad_field(name, shown(value), "needs its unit", f"write {size:g} GiB, or name the column {name}_gib")
    return size
