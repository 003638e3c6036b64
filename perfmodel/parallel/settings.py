"""What a run states of how it was set up, and what that changes about its framework's habits.

A setting that is read is worth more than a framework's name. `--profile NAME+compile+fused_rmsnorm=false` states them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import bad_field, one_line, suggest
from perfmodel.foundation.values import said_yes_or_no
from perfmodel.parallel.eager import EAGER_RMS_NORM

if TYPE_CHECKING:
    from perfmodel.parallel.profile import ExecutionProfile


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
    if value is True and framework_named(profile.name) in _KEEPS_FLOAT32_SOFTMAX:
        return replace(profile, logit_bytes=FUSED_LOGIT_BYTES)
    return replace(profile, fused_cross_entropy=True, logit_bytes=FUSED_LOGIT_BYTES, loss_peak_bytes=0.0) if value is True else profile


def _compile(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, fuses_elementwise=True, rms_norm_traffic=1.0, rotary_traffic=1.0) if value is True else profile


def _fused_norm(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, rms_norm_traffic=1.0 if value else EAGER_RMS_NORM) if isinstance(value, bool) else profile


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


def _tp_async(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Collectives of tensor parallelism in backward run beside the other gradient's product, or nothing does."""
    return replace(profile, tp_backward_overlap_fraction=TP_ASYNC_OVERLAP if value else 0.0) if isinstance(value, bool) else profile


def _attention_kernel(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """By generation: the first, the second, or the one that was written for the chip."""
    rates = ATTENTION_KERNELS.get(value) if isinstance(value, str) else None
    if rates is None:
        return profile
    before, since = rates
    return replace(profile, attention_rate_fraction=before, attention_rate_fraction_since_2022=since)


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

TP_ASYNC_OVERLAP = 0.8
"""Share of tensor-parallel communication in backward that hides beside the other gradient's product (Korthikanti et al. 2022, 4.2.2)."""

ATTENTION_KERNELS: Mapping[str, tuple[float, float]] = {
    "flash1": (0.69, 0.5),
    "flash2": (1.0, 0.8),
    "flash3": (1.0, 1.0),
    "cudnn": (1.0, 1.0),
}
"""Rate of a fused attention kernel over the calibrated one, on chips before 2022 (Ampere) and since (Hopper), as the profiles have it that
were fitted with them: Composer's first FlashAttention, nanotron's and torchtitan's second, NVIDIA's own."""

SEPARATOR = "+"
"""Between a profile's name and the settings that are stated with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSetting:
    """change: what it does to the profile. values: of one that people state, the words that it may have, or the least and the most of a
    number; empty: yes or no; None: runs of others say it in words of their own."""

    change: Callable[[ExecutionProfile, Any], ExecutionProfile]
    values: tuple[str, ...] | tuple[float, float] | None = ()


#: In the order in which they change a profile.
_SETTINGS: Mapping[str, StatedSetting] = {
    "megatron_args": StatedSetting(change=_megatron_arguments, values=None),
    "fused_cross_entropy": StatedSetting(change=_fused_cross_entropy),
    "fused_rmsnorm": StatedSetting(change=_fused_norm),
    "compile": StatedSetting(change=_compile),
    "gradient_bucket_mb": StatedSetting(change=_bucket, values=(1e-3, 1e6)),
    "gradient_bucketing": StatedSetting(change=_bucketing),
    "fp32_gradient_accumulation": StatedSetting(change=_accumulation),
    "async_tp": StatedSetting(change=_async_tp),
    "tp_async": StatedSetting(change=_tp_async),
    "attention_kernel": StatedSetting(change=_attention_kernel, values=tuple(ATTENTION_KERNELS)),
    "fp8_recipe": StatedSetting(change=_fp8_recipe, values=("tensorwise", "rowwise")),
    "mixed_precision_mode": StatedSetting(change=_mixed_precision, values=None),
}
_STATED = {name: setting.values for name, setting in _SETTINGS.items() if setting.values is not None}

#: Names that `settings` of a run may have: those that change its profile, and how FSDP cuts.
SETTINGS = frozenset({*_SETTINGS, "sharding"})


def framework_named(profile: str) -> str:
    """The name of a profile without the settings that are stated with it."""
    return profile.partition(SEPARATOR)[0]


def with_settings(profile: ExecutionProfile, settings: Mapping[str, Any]) -> ExecutionProfile:
    """The profile of a run with these `settings`; what means nothing to the model, or has a value that it does not know, is passed over."""
    for name, setting in _SETTINGS.items():
        if settings.get(name) is not None:
            profile = setting.change(profile, settings[name])
    return profile


def stated_settings(text: str) -> dict[str, bool | float | str]:
    """`compile+fused_rmsnorm=false` as settings. Raises InputError for one that is not known."""
    found: dict[str, bool | float | str] = {}
    for each in text.split(SEPARATOR):
        name, _, value = (part.strip() for part in each.partition("="))
        if name not in _STATED:
            raise bad_field("setting", one_line(name), f"is not known{suggest(one_line(name), _STATED)}", f"state {', '.join(_STATED)}")
        found[name] = _value(name, value)
    return found


def _value(name: str, value: str) -> bool | float | str:
    known = _STATED[name]
    if not known:
        return not value or said_yes_or_no(value, f"setting {name}")
    if isinstance(known[0], str):
        if value not in known:
            raise bad_field(f"setting {name}", one_line(value), f"must be one of {', '.join(map(str, known))}", "use one of them")
        return value
    least, most = known
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not float(least) <= number <= float(most):
        raise bad_field(f"setting {name}", one_line(value), f"must be a number from {least:g} to {most:g}", "correct it")
    return number
