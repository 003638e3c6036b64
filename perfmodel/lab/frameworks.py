"""What the name of a training framework says of a published run that does not say it itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.config import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Defaults of one framework.

    pattern      what its name looks like (the first that matches wins)
    profile      execution profile
    attention    kernel, where the run states none
    zero         ZeRO stage, where the run states neither a stage nor a distributed optimizer
    recompute    where the run states none
    sequence_parallel   with every tensor parallelism, said or not
    selective    operators that "selective" recomputation runs again
    fills_memory one pass over the local batch where the run states no micro-batch (else micro-batches of one sequence)
    memory_kind  what its memory figures count: reserved (all that the allocator holds) or allocated (what is in tensors)
    memory_rank  the pipeline rank that they are of: first, last or the fullest
    borrows      the profile is that of its nearest relative: an interval is wider
    """

    pattern: str
    profile: str
    attention: str = "flash"
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    selective: tuple[str, ...] = ("attention_core",)
    fills_memory: bool = False
    memory_kind: str = "reserved"
    memory_rank: str = "fullest"
    borrows: bool = False


#: torch's selective activation checkpointing as torchtitan sets it: every second matrix multiply and everything elementwise runs
#: again, the outputs of attention and of the others are kept (torchtitan, parallelize_llama.py, `_save_list`). q is kept before the
#: rotary embedding, the output of the down projection in place of the sum that it enters: as large as what is kept here.
_TITAN_SELECTIVE = (
    "attention_norm",
    "mlp_norm",
    "k_rotary",
    "activation",
    "gate_product",
    "k_proj",
    "o_proj",
    "up_proj",
)

FRAMEWORKS = (
    Framework(pattern=r"deepspeed.*zero-?3", profile="deepspeed", attention="unfused", zero=3),
    Framework(pattern=r"megatron-?deepspeed|deepspeed", profile="deepspeed", attention="unfused"),
    Framework(pattern=r"megatron-lm (2020|\(sc21\)|\(ptd-p\))", profile="megatron-2020", attention="unfused"),
    Framework(pattern=r"megatron-lm \(2022\)", profile="megatron", attention="unfused"),
    Framework(pattern=r"megascale", profile="megatron", zero=2, borrows=True),
    # its continuous integration records the allocator's peak on the rank that logs, the last one
    Framework(pattern=r"megatron-lm dev", profile="megatron", memory_kind="allocated", memory_rank="last"),
    Framework(pattern=r"nemo|megatron-bridge", profile="nemo", zero=1, sequence_parallel=True),
    Framework(pattern=r"megatron|transformer engine", profile="megatron", zero=1, memory_kind="allocated"),
    Framework(pattern=r"nanotron", profile="nanotron", memory_rank="first"),
    Framework(pattern=r"llm-?foundry|composer|mosaic", profile="composer-fsdp", zero=3, fills_memory=True),
    Framework(pattern=r"torchtitan", profile="torchtitan", zero=3, sequence_parallel=True, selective=_TITAN_SELECTIVE, fills_memory=True),
    Framework(pattern=r"fsdp|pytorch|meta internal", profile="torch-fsdp2", zero=3, selective=_TITAN_SELECTIVE, fills_memory=True),
    Framework(pattern=r"maxtext|paxml|jax|maxdiffusion", profile="xla", zero=3, recompute="full", fills_memory=True, borrows=True),
    Framework(pattern=r"llm\.c", profile="llm-c"),
    Framework(pattern=r"colossal", profile="megatron", borrows=True),
    Framework(pattern=r".*", profile="megatron", borrows=True),
)


def framework_of(name: object) -> Framework:
    """The framework that a run names; an unknown or missing name is taken as Megatron's kin."""
    text = name.lower()[:200] if isinstance(name, str) else ""
    return next(framework for framework in FRAMEWORKS if re.match(f".*(?:{framework.pattern})", text, re.DOTALL))


def _megatron_arguments(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Megatron-LM's own flags, as far as they concern time or memory."""
    flags = (
        {str(flag).partition("=")[0]: str(flag).partition("=")[2] for flag in value if isinstance(flag, str)}
        if isinstance(value, list)
        else {}
    )
    if flags.get("cross-entropy-loss-fusion") == "True":
        profile = _fused_cross_entropy(profile, True)
    if flags.get("no-gradient-accumulation-fusion") == "True":
        profile = replace(profile, fuses_gradient_accumulation=False)
    return profile


def _fused_cross_entropy(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if value is True and profile.name in _KEEPS_FLOAT32_SOFTMAX:
        return replace(profile, logit_bytes=FUSED_LOGIT_BYTES)
    return replace(profile, fused_cross_entropy=True, logit_bytes=FUSED_LOGIT_BYTES, loss_peak_bytes=0.0) if value is True else profile


def _compile(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, fuses_elementwise=True, elementwise_traffic=1.0) if value is True else profile


def _bucket(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9
    return replace(profile, bucket_bytes=float(value) * 2**20) if is_size else profile


def _bucketing(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, bucket_bytes=0.0, overlaps_gradients=False) if value is False else profile


def _accumulation(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, accumulate_dtype="fp32" if value else "compute") if isinstance(value, bool) else profile


def _fp8_recipe(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, fp8_matmul_rate_fraction=profile.fp8_matmul_rate_fraction * ROWWISE_FP8) if value == "rowwise" else profile


def _mixed_precision(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Composer's modes: DEFAULT gathers bf16 and reduces fp32, PURE does both in bf16 (`composer/distributed`, `get_mixed_precision`)."""
    return replace(profile, reduce_dtype="fp32") if value == "DEFAULT" else profile


def _async_tp(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, tp_overlap_fraction=ASYNC_TP_OVERLAP) if value is True else profile


#: Their fused loss saves traffic, not memory: the softmax is kept in float32, its gradient made from it (Megatron-Core,
#: `fusions/fused_cross_entropy.py`).
_KEEPS_FLOAT32_SOFTMAX = ("megatron", "nemo")

FUSED_LOGIT_BYTES = 14.0
"""Traffic of a fused loss, a logit: read once and overwritten by the gradient, in bf16, and its float32 intermediate."""

ROWWISE_FP8 = 0.6
"""Rate of products in fp8 with a scale for each row, over those with one for each tensor: torchtitan's runs of 2025-06, of which those
with rows are no faster than bf16."""

ASYNC_TP_OVERLAP = 0.5
"""Share of tensor-parallel communication that asynchronous tensor parallelism (micro-pipelined symmetric memory) hides."""

#: What a stated setting changes about the profile.
_SETTINGS: Mapping[str, Callable[[ExecutionProfile, Any], ExecutionProfile]] = {
    "megatron_args": _megatron_arguments,
    "fused_cross_entropy": _fused_cross_entropy,
    "compile": _compile,
    "gradient_bucket_mb": _bucket,
    "gradient_bucketing": _bucketing,
    "fp32_gradient_accumulation": _accumulation,
    "async_tp": _async_tp,
    "fp8_recipe": _fp8_recipe,
    "mixed_precision_mode": _mixed_precision,
}


#: Names that `settings` of a run may have: those that change its profile, and how FSDP cuts.
SETTINGS = frozenset({*_SETTINGS, "sharding"})


def with_settings(profile: ExecutionProfile, settings: Mapping[str, Any]) -> ExecutionProfile:
    """The profile of a run with these `settings`; settings that mean nothing to the model are passed over."""
    for name, change in _SETTINGS.items():
        if settings.get(name) is not None:
            profile = change(profile, settings[name])
    return profile


def stage_layers_by_cost(model: TransformerConfig, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage where blocks are placed by their cumulative cost, as nanotron does.

    A block starts the next stage once the running sum of costs has reached k / p of the total; the head is a block too and ends on the
    last stage. Costs: a layer 4 h^2 + 3 h f, the head V h, all else nothing.

    Source: nanotron v0.5, `get_block_compute_costs` and the placement in `models/base.py`.
    """
    if num_stages > model.num_hidden_layers:
        raise InputError(f"pp={num_stages}: must not exceed num_hidden_layers={model.num_hidden_layers}; use fewer stages")
    h, f = model.hidden_size, model.intermediate_size
    layer = 4 * h * model.num_attention_heads * model.head_dim + 3 * h * f
    total = model.num_hidden_layers * layer + model.vocab_size * h
    layers, stage, running = [0] * num_stages, 0, 0
    for _ in range(model.num_hidden_layers):
        if stage < num_stages - 1 and running * num_stages >= total * (stage + 1):
            stage += 1
        layers[stage] += 1
        running += layer
    return tuple(layers)


def stage_layers_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the head count as a layer each, if that and only that makes the stages even.

    Source: Megatron-Core's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` (Llama 3.1 405B: 126 layers).
    """
    if num_stages < 2 or num_layers % num_stages == 0 or (num_layers + 2) % num_stages:
        return None
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)
