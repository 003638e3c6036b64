"""What a run states of how it was set up, and what that changes about its framework's habits.

A setting that is read is worth more than a framework's name. How people state them: `parallel/stated.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.foundation.values import said_yes_or_no
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_COMPLEX_ROTARY, EAGER_RMS_NORM
from perfmodel.parallel.layout import ZERO_STAGES

if TYPE_CHECKING:
    from perfmodel.parallel.profile import ExecutionProfile

Value: TypeAlias = bool | float | str


def _megatron_arguments(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Megatron-LM's own flags, as far as they concern time or memory."""
    flags = (
        {str(flag).partition("=")[0]: str(flag).partition("=")[2] for flag in value if isinstance(flag, str)}
        if isinstance(value, list)
        else {}
    )
    if flags.get("cross-entropy-loss-fusion") == "True":
        profile = _fused_cross_entropy(profile, True)
    if flags.get("overlap-moe-expert-parallel-comm") == "True":
        # without the other flag Megatron-LM refuses this one
        profile = replace(profile, hides_exchanges=True, delays_weight_gradients=flags.get("delay-wgrad-compute") == "True")
    if flags.get("moe-shared-expert-overlap") == "True":
        profile = replace(profile, hides_shared_experts=True)
    if flags.get("fp8-param-gather") == "True":
        profile = replace(profile, gathers_low_weights=True)
    if flags.get("deterministic-mode") == "True":
        profile = replace(profile, keeps_added_rows=True)
    if flags.get("no-gradient-accumulation-fusion") == "True":
        profile = replace(profile, fuses_gradient_accumulation=False)
    return profile


def _fused_cross_entropy(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if value is True and framework_named(profile.name) in _KEEPS_FLOAT32_SOFTMAX:
        return replace(profile, logit_bytes=FUSED_LOGIT_BYTES)
    return replace(profile, fused_cross_entropy=True, logit_bytes=FUSED_LOGIT_BYTES, loss_peak_bytes=0.0) if value is True else profile


def _compile(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Chains are one kernel, which no module launches. Or nothing fuses what the framework writes out, where it may write norms out."""
    if value is True:
        launch = min(profile.host_launch_time, COMPILED_LAUNCH)
        return replace(profile, fuses_elementwise=True, rms_norm_traffic=1.0, rotary_traffic=1.0, host_launch_time=launch)
    if value is False and profile.rms_norm_traffic > 1.0:
        rotary = max(profile.rotary_traffic, EAGER_COMPLEX_ROTARY)
        return replace(profile, fuses_elementwise=False, rms_norm_traffic=EAGER_RMS_NORM, rotary_traffic=rotary)
    return profile


def _cuda_graphs(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """A whole pass is launched at once."""
    launch = min(profile.host_launch_time, GRAPH_LAUNCH)
    return replace(profile, host_launch_time=launch, host_layer_time_per_tp_across_nodes=0.0) if value is True else profile


def _fused_norm(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, rms_norm_traffic=1.0 if value else EAGER_RMS_NORM) if isinstance(value, bool) else profile


def _bucket(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    is_size = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9
    return replace(profile, bucket_bytes=float(value) * 2**20) if is_size else profile


def _bucketing(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if value is True:
        return replace(profile, overlaps_gradients=ZERO_STAGES)
    return replace(profile, bucket_bytes=0.0, overlaps_gradients=()) if value is False else profile


def _fused_optimizer(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, optimizer_bytes_factor=1.0 if value else EAGER_ADAMW) if isinstance(value, bool) else profile


def _accumulation(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, accumulate_dtype="fp32" if value else "compute") if isinstance(value, bool) else profile


def _fp8_recipe(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, fp8_matmul_rate_fraction=profile.fp8_matmul_rate_fraction * ROWWISE_FP8) if value == "rowwise" else profile


def _exchanges(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if not isinstance(value, bool):
        return profile
    return replace(profile, hides_exchanges=value, delays_weight_gradients=value and profile.delays_weight_gradients)


def _delayed_weight_gradients(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if value is True and not profile.hides_exchanges:
        rule = "needs moe_overlap: weight gradients wait for what another microbatch's experts exchange"
        raise bad_field("setting delayed_weight_gradients", "true", rule, "state moe_overlap too")
    return replace(profile, delays_weight_gradients=value) if isinstance(value, bool) else profile


def _shared_experts(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, hides_shared_experts=value) if isinstance(value, bool) else profile


def _low_rows(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, sends_low_rows=value) if isinstance(value, bool) else profile


def _low_weights(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, gathers_low_weights=value) if isinstance(value, bool) else profile


def _mixed_precision(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Composer's modes: DEFAULT gathers bf16 and reduces fp32, PURE does both in bf16 (`composer/distributed`, `get_mixed_precision`)."""
    return replace(profile, reduce_dtype="fp32") if value == "DEFAULT" else profile


def _tp_async(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Collectives of tensor parallelism in backward run beside the other gradient's product, or nothing does."""
    return replace(profile, tp_backward_overlap_fraction=TP_ASYNC_OVERLAP if value else 0.0) if isinstance(value, bool) else profile


def _attention_kernel(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """By generation: the first, the second, or the one that was written for the chip."""
    return replace(profile, attention_kernel=value, attention_rate_fraction=1.0) if value in ATTENTION_KERNELS else profile


def _async_tp(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, tp_overlap_fraction=ASYNC_TP_OVERLAP) if value is True else profile


#: Their fused loss saves traffic, not memory: the softmax is kept in float32, its gradient made from it (Megatron-Core,
#: `fusions/fused_cross_entropy.py`).
_KEEPS_FLOAT32_SOFTMAX = ("megatron", "nemo")

FUSED_LOGIT_BYTES = 14.0
"""Traffic of a fused loss, a logit: read once and overwritten by the gradient, in bf16, and its float32 intermediate."""

COMPILED_LAUNCH = 10e-6
"""[s] Host time of a kernel in compiled code: cudaLaunchKernel takes 3 to 6 us, the rest is the wrapper's that calls it."""

GRAPH_LAUNCH = 0.6e-6
"""[s] The same of a kernel in a CUDA graph (0.58 us a node of a replayed chain on an RTX 5070 Ti, ahrefs/ocannl issue 488)."""

ROWWISE_FP8 = 0.6
"""Rate of products in fp8 with a scale for each row, over those with one for each tensor: torchtitan's runs of 2025-06, of which those
with rows are no faster than bf16."""

ASYNC_TP_OVERLAP = 0.5
"""Share of tensor-parallel communication that asynchronous tensor parallelism (micro-pipelined symmetric memory) hides."""

TP_ASYNC_OVERLAP = 0.8
"""Share of tensor-parallel communication in backward that hides beside the other gradient's product (Korthikanti et al. 2022, 4.2.2)."""

SEPARATOR = "+"
"""Between a profile's name and the settings that are stated with it."""


_FILE = re.compile(r"(.*\.ya?ml)(?=\+|$)", re.DOTALL)

#: How else the generations of FlashAttention and their like are called, without the signs between.
_SPELLINGS: Mapping[str, str] = {
    **{f"{name}{sign}{n}": f"flash{n}" for n in (1, 2, 3) for name in ("fa", "flash", "flashattn", "flashattention") for sign in ("", "v")},
    **dict.fromkeys(("cudnnattention", "cudnnfused", "fusedcudnn"), "cudnn"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSetting:
    """One thing that is known of a run's setup.

    says     what it changes, for people
    change   what it does to the profile; None: the plan says it in words of its own
    values   the words that it may have, or the least and the most of a number; empty: yes or no; None: a list of a framework's own flags
    """

    says: str
    change: Callable[[ExecutionProfile, Any], ExecutionProfile] | None
    values: tuple[str, ...] | tuple[float, float] | None = ()


#: In the order in which they change a profile.
_SETTINGS: Mapping[str, StatedSetting] = {
    "megatron_args": StatedSetting(says="Megatron-LM's own flags", change=_megatron_arguments, values=None),
    "fused_cross_entropy": StatedSetting(
        says="softmax, loss and gradient are one kernel: less traffic, and no float32 copy of the logits where the framework keeps none",
        change=_fused_cross_entropy,
    ),
    "fused_rmsnorm": StatedSetting(
        says=f"RMSNorm is one kernel; no: written out in float32, {EAGER_RMS_NORM:g} times its traffic", change=_fused_norm
    ),
    "compile": StatedSetting(
        says="norms, rotary embeddings and chains of elementwise operators are one kernel each, which keeps what is between in registers "
        "(torch.compile), and a launch takes the host 10 us at most; no: kernel by kernel, where the framework writes them out",
        change=_compile,
    ),
    "cuda_graphs": StatedSetting(
        says="a pass is launched as one graph: the host takes next to nothing for each kernel", change=_cuda_graphs
    ),
    "gradient_bucket_mb": StatedSetting(says="gradients are reduced in buckets of so many MiB", change=_bucket, values=(1e-3, 1e6)),
    "gradient_bucketing": StatedSetting(
        says="gradients are reduced in buckets under the last backward, whatever the ZeRO stage (DeepSpeed's overlap_comm); no: after it, "
        "beside nothing",
        change=_bucketing,
    ),
    "fused_optimizer": StatedSetting(
        says=f"the optimizer's step is one kernel (torch's fused=True); no: one for each line of its rule (foreach, torch's default), "
        f"{EAGER_ADAMW:.2g} times the traffic",
        change=_fused_optimizer,
    ),
    "fp32_gradient_accumulation": StatedSetting(
        says="gradients of microbatches are added up in float32; no: in the dtype of the computation", change=_accumulation
    ),
    "async_tp": StatedSetting(
        says=f"{ASYNC_TP_OVERLAP:.0%} of tensor-parallel communication hides under the products beside it (torch's asynchronous TP)",
        change=_async_tp,
    ),
    "tp_async": StatedSetting(
        says=f"{TP_ASYNC_OVERLAP:.0%} of tensor-parallel communication in backward hides beside the other gradient's product; no: nothing",
        change=_tp_async,
    ),
    "moe_overlap": StatedSetting(
        says="what tokens of one microbatch send to experts and back travels beside another one's passes, on a share of the compute units "
        "(Megatron-LM's --overlap-moe-expert-parallel-comm, DualPipe); no: nothing hides it",
        change=_exchanges,
    ),
    "delayed_weight_gradients": StatedSetting(
        says="with moe_overlap: weight gradients are computed apart from those of inputs, beside what backward sends, in a pipeline's ends "
        "too, and what they need is kept until then (Megatron-LM's --delay-wgrad-compute, DualPipe)",
        change=_delayed_weight_gradients,
    ),
    "moe_shared_overlap": StatedSetting(
        says="shared experts run beside what tokens send to the others and back (Megatron-LM's --moe-shared-expert-overlap)",
        change=_shared_experts,
    ),
    "fp8_dispatch": StatedSetting(
        says="rows go to experts as the recipe casts them, with their scales, and come back in 16 bits (DeepEP; fp8-block and mxfp8)",
        change=_low_rows,
    ),
    "fp8_params": StatedSetting(
        says="weights are gathered as the recipe casts them, and TransformerEngine keeps no others in 16 bits (--fp8-param-gather, "
        "torchao's float8 all-gather; not mxfp8, whose two copies have scales of their own)",
        change=_low_weights,
    ),
    "attention_kernel": StatedSetting(
        says="the rate of fused attention, by generation of its kernel; FlashAttention-2 is written as flash_attention_2 too",
        change=_attention_kernel,
        values=ATTENTION_KERNELS,
    ),
    "fp8_recipe": StatedSetting(
        says=f"scales of fp8 for each tensor, or for each row: {ROWWISE_FP8:g} of the rate",
        change=_fp8_recipe,
        values=("tensorwise", "rowwise"),
    ),
    "mixed_precision_mode": StatedSetting(
        says="Composer's modes: gradients are reduced in float32 (DEFAULT), or in the dtype of the computation (PURE)",
        change=_mixed_precision,
        values=("DEFAULT", "PURE"),
    ),
    "sharding": StatedSetting(
        says="how FSDP cuts", change=None, values=("FULL_SHARD", "FSDP", "HSDP", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "DDP")
    ),
    "tp_mode": StatedSetting(says="sequence parallelism, or not", change=None, values=("REDUCE_SCATTER", "ALL_REDUCE")),
}

#: What people state.
STATED: Mapping[str, StatedSetting] = {
    name: setting for name, setting in _SETTINGS.items() if setting.change is not None and setting.values is not None
}

#: Names that `settings` of a run that was measured may have.
SETTINGS = frozenset(_SETTINGS)


def framework_named(profile: str) -> str:
    """The name of a profile, or the path of its file, without the settings that are stated with it."""
    file = _FILE.match(profile)
    return file[0] if file else profile.partition(SEPARATOR)[0]


def with_settings(profile: ExecutionProfile, settings: Mapping[str, Any]) -> ExecutionProfile:
    """The profile of a run with these `settings`; what means nothing to the model, or has a value that it does not know, is passed over."""
    for name, setting in _SETTINGS.items():
        value = settings.get(name)
        if value is not None and setting.change is not None and not unread(name, value):
            profile = setting.change(profile, value if setting.values is None else setting_value(name, value))
    return profile


def unread(name: object, value: object) -> str:
    """How a message names a setting of a measured run that is not known, or whose value is not; empty where it is read."""
    setting = _SETTINGS.get(name) if isinstance(name, str) else None
    if setting is None:
        return one_line(name, 40)
    try:
        _read(str(name), setting, value)
    except InputError:
        return f"{one_line(name, 40)}={one_line(value, 40)}"
    return ""


def setting_value(name: object, value: object) -> Value:
    """The value of a setting as somebody stated it. Raises InputError for a setting, or a value, that is not known."""
    if not isinstance(name, str) or name not in STATED:
        raise bad_field("setting", one_line(name), f"is not known{suggest(one_line(name), STATED)}", f"state {', '.join(STATED)}")
    found: Value = _read(name, STATED[name], value)
    return found


def _read(name: str, setting: StatedSetting, value: object) -> Any:
    known, field = setting.values, f"setting {name}"
    if known is None:
        if not isinstance(value, list):
            raise bad_field(field, one_line(value), "must be a list of flags", "correct it")
        return value
    if not known:
        if isinstance(value, str):
            return said_yes_or_no(value, field)
        if value not in (True, False):
            raise bad_field(field, one_line(value), "must be true or false", "write one of them")
        return bool(value)
    if isinstance(known[0], str):
        said = value.lower() if isinstance(value, str) else ""
        word = _SPELLINGS.get(re.sub("[^a-z0-9]", "", said), next((each for each in known if str(each).lower() == said), ""))
        if word not in known:
            raise bad_field(field, one_line(value), f"must be one of {', '.join(map(str, known))}", "use one of them")
        return word
    least, most = known
    try:
        number = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not float(least) <= number <= float(most):
        raise bad_field(field, one_line(value), f"must be a number from {least:g} to {most:g}", "correct it")
    return number
