"""Shipped files of a framework: `strategies/frameworks/NAME/habits.yaml` and `fitted.yaml` in the same folder.

`habits.yaml`   behaviour from its source code, in groups by kind, each with its source; `base:` inherits another framework's file
`fitted.yaml`   constants fitted to its runs, written only by `python -m lab.fitted`; no other framework inherits them

A constant in neither file is unknown for this framework. It has a neutral value, or that of the framework named by `unknown_as:`
(`generic`: the mean of all families). A framework with one file, `NAME.yaml`, is a profile in the users' form (`generic`, which
`python -m lab.generic` writes).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.resources import resource_dir

PLAIN_TORCH_LAUNCH = 15e-6
"""[s] Host time of a kernel in backward, for a framework without measurements: modules of torch 2.13 take 11 us on a core of an EPYC, and
cudaLaunchKernel 3 to 6 us."""

#: Constants that do not follow from source code -> value if unknown, without effect on the prediction except for the launch time.
NEUTRAL: Mapping[str, float] = MappingProxyType(
    {
        "attention_rate_fraction": 1.0,
        "matmul_rate_fraction": 1.0,
        "fp8_matmul_rate_fraction": 1.0,
        "context_attention_rate_fraction": 1.0,
        "optimizer_bytes_factor": 1.0,
        "exposed_gradient_fraction": 0.0,
        "exposed_scatter_fraction": 0.0,
        "publish_factor": 1.0,
        "tp_overlap_fraction": 0.0,
        "tp_backward_overlap_fraction": 0.0,
        "compute_slowdown_under_communication": 0.0,
        "uneven_stage_weight": 1.0,
        "host_launch_time": PLAIN_TORCH_LAUNCH,
        "host_layer_time_per_tp_across_nodes": 0.0,
        "step_time_constant": 0.0,
        "reserve_factor": 1.0,
        "delayed_collectives": 0.0,
        "waiting_gradient_fraction": 0.0,
        "workspace_bytes": 0.0,
        "framework_bytes": 0.0,
    }
)

#: Group of `habits.yaml` -> its fields.
FILE_GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "memory": frozenset(
            {
                "saved_input_layout", "loss_peak_bytes", "accumulate_dtype", "stores_master_weights", "gradient_copy_bytes",
                "zero2_stores_shards", "softmax_keeps_float32", "keeps_unrotated_qk", "keeps_low_copies", "keeps_added_rows",
                "pipeline_keeps_boundaries", "pipeline_keeps_parameters", "recompute_stops_early",
                "query_gradient_bytes", "loss_form", "tiles_mlp", "recomputes_gated_product",
                "offloads_checkpoints", "offloads_activations", "offloads_optimizer", "offloads_parameters",
                "stores_frozen_float32", "steps_in_backward", "optimizer_copies", "norms_keep_float32", "adapter_dropout",
                "quantized_rest_float32",
                "waiting_gradient_fraction", "reserve_factor", "delayed_collectives", "workspace_bytes", "framework_bytes",
            }
        ),
        "kernels": frozenset(
            {
                "dropout", "fused_cross_entropy", "fused_loss_keeps_float32", "logit_bytes", "fuses_elementwise",
                "rms_norm_traffic", "rotary_traffic",
                "fuses_gradient_accumulation", "fuses_experts", "adds_expert_bias_apart", "pads_expert_rows",
                "redistribution_copies", "default_attention", "optimizer_bytes_factor",
                "gradient_pass_bytes", "gradient_scaling_bytes",
                "attention_kernel", "attention_rate_fraction", "matmul_rate_fraction",
                "fp8_matmul_rate_fraction", "context_attention_rate_fraction",
            }
        ),
        "communication": frozenset(
            {
                "reduce_dtype", "reduces_each_microbatch", "pipeline_reduces_each_microbatch", "bucket_bytes", "parameter_unit",
                "overlaps_gradients", "exposed_scatter_fraction", "exposed_gradient_fraction", "publish_factor",
                "prefetches_parameters",
                "tp_overlap_fraction", "tp_backward_overlap_fraction", "context_chunks", "pp_overlap", "scatters_pipeline_sends",
                "hides_exchanges", "delays_weight_gradients", "permutes_in_exchange",
                "hides_shared_experts", "sends_low_rows", "gathers_low_weights",
                "reduces_tp_gradients_first", "gathers_row_bias_gradients", "compute_slowdown_under_communication",
                "context_form",
            }
        ),
        "stages": frozenset({"places_layers_by_cost", "uneven_stage_weight"}),
        "host": frozenset(
            {
                "host_launch_time", "host_layer_time_per_tp_across_nodes", "step_time_constant", "graph_scope",
            }
        ),
    }
)  # fmt: skip

BEHAVIOURS, FITTED = "habits.yaml", "fitted.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedNumber:
    """A constant fitted to runs.

    value, spread   posterior mean and standard deviation
    n, models       number of runs, and of their models
    chips           chips of these runs
    date            date of the last change of the value
    how             data of the fit
    is_lent         fitted to runs of other frameworks, because its own do not determine it; it does not count for generic
    """

    value: float
    spread: float
    n: int
    models: int
    chips: tuple[str, ...]
    date: str
    how: str
    is_lent: bool = False


def frameworks_dir() -> Path:
    return resource_dir("strategies") / "frameworks"


def framework_names() -> list[str]:
    folder = frameworks_dir()
    return sorted({path.parent.name for path in folder.glob(f"*/{BEHAVIOURS}")} | {path.stem for path in folder.glob("*.yaml")})


def shipped_fields(name: str) -> dict[str, Any] | None:
    """Return the fields of a shipped profile, as in a file without `base:`; None if there is none with that name."""
    from perfmodel.foundation.files import read_yaml

    if not is_name(name):
        return None
    single = frameworks_dir() / f"{name}.yaml"
    if os.path.exists(single):
        return read_yaml(single)
    behaviours = shipped_behaviour(name)
    if behaviours is None:
        return None
    fitted = _fitted_data(name)
    known = behaviours | {constant: number["value"] for constant, number in fitted.items()}
    others = shipped_fields(known.pop("unknown_as", "")) or {}
    neutral = {constant: others.get(constant, value) for constant, value in NEUTRAL.items() if constant not in known}
    lent = [constant for constant, number in fitted.items() if number.get("lent")]
    return {**neutral, **known, "unknown": [*behaviours.get("unknown", ()), *neutral, *lent]}


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a framework, not a path."""
    return bool(text) and len(text) < 200 and not set(text) & {"/", "\\", "\0"} and text not in (".", "..")


def shipped_behaviour(name: str, below: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Return the behaviour of a framework merged over that of its base; None if it has no file."""
    from perfmodel.foundation.files import read_yaml

    path = frameworks_dir() / name / BEHAVIOURS
    if not os.path.exists(path):
        return None
    data = flattened(read_yaml(path), where=str(path))
    base = data.pop("base", "")
    if not base:
        return data
    under = shipped_behaviour(base, (*below, name)) if isinstance(base, str) and is_name(base) and base not in (*below, name) else None
    if under is None:
        raise bad_field("base", shown(base), "must be the name of another framework with `habits.yaml`", f"correct {path}")
    return {key: value for key, value in under.items() if key not in ("name", "source", "unknown")} | data


@lru_cache(maxsize=64)
def with_bases(name: str) -> tuple[str, ...]:
    """Return the framework and the bases that it inherits from, the nearest first."""
    from perfmodel.foundation.files import read_yaml

    path = frameworks_dir() / name / BEHAVIOURS
    if not is_name(name) or not os.path.exists(path):
        return (name,)
    base = read_yaml(path).get("base", "")
    return (name, *with_bases(base)) if base else (name,)


def flattened(data: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the fields of a profile's file without groups. Raises InputError for a field in a wrong group."""
    fields: dict[str, Any] = {}
    for key, value in data.items():
        if key not in FILE_GROUPS:
            fields[key] = value
            continue
        if not isinstance(value, dict):
            raise InputError(f"{where}: {key}={shown(value)}: must be a group of fields; write them below it")
        for name, item in value.items():
            if name == "source":
                continue
            if name not in FILE_GROUPS[key]:
                raise InputError(f"{where}: {key}.{one_line(name)}: is no field of this group{suggest(one_line(name), FILE_GROUPS[key])}")
            if name in data:
                raise InputError(f"{where}: {name}: stands both in the group {key} and outside; leave one of them out")
            fields[name] = item
    return fields


def unit_of(constant: str) -> str:
    """Return the kind of quantity of a number in a profile's file: bytes or time."""
    return "bytes" if constant.endswith("bytes") else "time"


def fitted_numbers(name: str) -> dict[str, FittedNumber]:
    """Return the constants fitted to the framework's runs, by name; empty if no runs are known."""
    from perfmodel.foundation.units import parse_quantity

    def number(constant: str, value: Any) -> float:
        return parse_quantity(value, unit_of(constant), field=constant) if isinstance(value, str) else float(value)

    return {
        constant: FittedNumber(
            value=number(constant, entry["value"]),
            spread=number(constant, entry["spread"]),
            n=entry["n"],
            models=entry["models"],
            chips=tuple(entry["chips"]),
            date=entry["date"],
            how=entry["how"],
            is_lent=entry.get("lent", False),
        )
        for constant, entry in _fitted_data(name).items()
    }


def _fitted_data(name: str) -> dict[str, dict[str, Any]]:
    from perfmodel.foundation.files import read_yaml

    path = frameworks_dir() / name / FITTED
    return read_yaml(path) if os.path.exists(path) else {}
