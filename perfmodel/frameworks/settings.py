"""Settings of a run, and the options of the framework that each of them changes.

A stated setting is more informative than the name of a framework. `parallel/framework_ref.py` has the notation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.choices import FUSED_LOSS, RING, ULYSSES, ULYSSES_RULES, UPCAST_LOSS, WHOLE_LOSS, ZERO_STAGES
from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_COMPLEX_ROTARY, EAGER_RMS_NORM
from perfmodel.parallel.framework_ref import (
    ASYNC_TP_OVERLAP,
    ROWWISE_FP8,
    SETTINGS,
    TP_ASYNC_OVERLAP,
    FrameworkRef,
    Value,
    setting_value,
    stated,
    unread,
)

if TYPE_CHECKING:
    from perfmodel.frameworks.profile import ExecutionProfile

#: Change of a profile by a value of a setting, which `setting_value` has checked.
Change = Callable[["ExecutionProfile", Any], "ExecutionProfile"]


def _megatron_arguments(profile: ExecutionProfile, value: list[object]) -> ExecutionProfile:
    """Apply Megatron-LM's own flags that affect time or memory."""
    flags = dict(flag.partition("=")[::2] for flag in value if isinstance(flag, str))
    if flags.get("cross-entropy-loss-fusion") == "True":
        profile = _fused_cross_entropy(profile, True)
    if flags.get("overlap-moe-expert-parallel-comm") == "True":
        # Megatron-LM refuses --delay-wgrad-compute without this flag
        profile = profile.having(hides_exchanges=True, delays_weight_gradients=flags.get("delay-wgrad-compute") == "True")
    if flags.get("moe-shared-expert-overlap") == "True":
        profile = profile.having(hides_shared_experts=True)
    if flags.get("fp8-param-gather") == "True":
        profile = profile.having(gathers_low_weights=True)
    if flags.get("deterministic-mode") == "True":
        profile = profile.having(keeps_added_rows=True)
    if flags.get("no-gradient-accumulation-fusion") == "True":
        profile = profile.having(fuses_gradient_accumulation=False)
    return profile


def _fused_cross_entropy(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    if value and profile.kernels.fused_loss_keeps_float32:
        return profile.having(logit_bytes=FUSED_LOGIT_BYTES)
    return profile.having(fused_cross_entropy=True, logit_bytes=FUSED_LOGIT_BYTES, loss_peak_bytes=0.0) if value else profile


def _compile(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    """Fuse chains of operators, launched by compiled code; or, if false, fuse nothing, if the framework may have unfused norms."""
    if value:
        launch = min(profile.timing.host_launch_time, COMPILED_LAUNCH)
        return profile.having(fuses_elementwise=True, rms_norm_traffic=1.0, rotary_traffic=1.0, host_launch_time=launch)
    if profile.kernels.rms_norm_traffic > 1.0:
        rotary = max(profile.kernels.rotary_traffic, EAGER_COMPLEX_ROTARY)
        return profile.having(fuses_elementwise=False, rms_norm_traffic=EAGER_RMS_NORM, rotary_traffic=rotary)
    return profile


def _cuda_graphs(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    """Launch a whole pass as one CUDA graph."""
    launch = min(profile.timing.host_launch_time, GRAPH_LAUNCH)
    return profile.having(host_launch_time=launch, host_layer_time_per_tp_across_nodes=0.0) if value else profile


def _fp8_recipe(profile: ExecutionProfile, value: str) -> ExecutionProfile:
    return profile.having(fp8_matmul_rate_fraction=profile.rates.fp8_matmul_rate_fraction * ROWWISE_FP8) if value == "rowwise" else profile


def _exchanges(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    return profile.having(hides_exchanges=value, delays_weight_gradients=value and profile.exchanges.delays_weight_gradients)


def _delayed_weight_gradients(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    if value and not profile.exchanges.hides_exchanges:
        rule = "needs moe_overlap: weight gradients wait for what another microbatch's experts exchange"
        raise bad_field("setting delayed_weight_gradients", "true", rule, "state moe_overlap too")
    return profile.having(delays_weight_gradients=value)


def _release(profile: ExecutionProfile, value: str) -> ExecutionProfile:
    return replace(profile, release=value)


def _kernels(profile: ExecutionProfile, value: list[object]) -> ExecutionProfile:
    """Apply the libraries of a run: Transformer Engine's norms, rotary embeddings and attention are one kernel each."""
    if "te" not in (str(name).lower() for name in value):
        return profile
    return profile.having(rms_norm_traffic=1.0, rotary_traffic=1.0, attention_kernel="flash3", attention_rate_fraction=1.0)


def _attention_kernel(profile: ExecutionProfile, value: str) -> ExecutionProfile:
    """Set the generation of the attention kernel, also for context parallelism.

    Releases with this setting support it with sharded queries too; the framework's own rate there is from earlier releases, which did not.
    """
    return profile.having(
        attention_kernel=value,
        attention_rate_fraction=1.0,
        context_attention_rate_fraction=1.0,
        query_gradient_bytes=QUERY_GRADIENT_BYTES,
    )


def _loss(profile: ExecutionProfile, value: str) -> ExecutionProfile:
    """Set the form of the loss: in pieces without saved logits, or whole as in torch's cross-entropy."""
    if value == WHOLE_LOSS:
        peak = max(profile.activations.loss_peak_bytes, EAGER_LOSS_PEAK)
        return profile.having(loss_form=value, fused_cross_entropy=False, loss_peak_bytes=peak)
    if value == UPCAST_LOSS:
        return profile.having(loss_form=value, fused_cross_entropy=True, loss_peak_bytes=FLOAT32_LOSS_PEAK)
    if value == FUSED_LOSS:
        return profile.having(loss_form=value, logit_bytes=min(profile.kernels.logit_bytes, FUSED_LOGIT_BYTES))
    return profile.having(loss_form=value)


def _float32_logits(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    if not value:
        return profile
    traffic = max(profile.kernels.logit_bytes, FLOAT32_LOGIT_BYTES)
    return profile.having(
        fused_cross_entropy=False, loss_peak_bytes=max(profile.activations.loss_peak_bytes, FLOAT32_LOSS_PEAK), logit_bytes=traffic
    )


def _loss_memory(profile: ExecutionProfile, value: float) -> ExecutionProfile:
    """Set the peak memory of the loss. Saved float32 log-probabilities and 16-bit logits count as activations."""
    return profile.having(fused_cross_entropy=False, loss_peak_bytes=max(value - _COUNTED_LOGIT_BYTES, 0.0))


def _options(of_values: Mapping[bool | str, Mapping[str, object]]) -> Change:
    """Return the change of a setting with fixed options for some of its values; other values change nothing."""
    return lambda profile, value: profile.having(**of_values[value]) if value in of_values else profile


def _switch(field: str, *, on: object = True, off: object = False) -> Change:
    """Return the change of a setting that selects one of two values of an option."""
    return _options({True: {field: on}, False: {field: off}})


def _parameter_offload(profile: ExecutionProfile, value: bool) -> ExecutionProfile:
    """Set the offload of parameters, which a framework has with some ZeRO stages only."""
    stages = profile.runs.sharding.zero_of_offload if value else ZERO_STAGES
    return profile.having(offloads_parameters=value, runs=profile.runs.having(zero_of_ranks=stages))


def _number(field: str, *, unit: float = 1.0) -> Change:
    """Return the change of a setting that is the number of an option in multiples of `unit`."""
    return lambda profile, value: profile.having(**{field: value * unit})


def _context_form(profile: ExecutionProfile, value: str) -> ExecutionProfile:
    """Set the form of context parallelism, and its rules where the framework names none.

    A framework without context parallelism has only its `context_forms`.
    """
    chunks = profile.communication.context_chunks if value == ULYSSES else "contiguous" if value == RING else "head_tail"
    runs = profile.runs
    adds = value == ULYSSES and runs.rules and not {*ULYSSES_RULES} & {*runs.rules}
    rules = (*runs.rules, *ULYSSES_RULES) if adds else runs.rules
    axes = (*runs.axes, "cp") if value in runs.context_forms else runs.axes
    runs = replace(runs, rules=rules, axes=tuple(dict.fromkeys(axes)))
    return profile.having(context_form=value, context_chunks=chunks, runs=runs)


QUERY_GRADIENT_BYTES = 4.0
"""[byte] Per element of queries: FlashAttention-2 and -3 and cuDNN accumulate their gradient in float32 (`dq_accum` in flash-attention 2.8,
`csrc/flash_attn/flash_api.cpp`)."""

EAGER_LOSS_PEAK = 8.0
"""[byte] Per logit, in addition to the logits and their softmax in float32: the float32 gradients of nll_loss and log_softmax."""

_COUNTED_LOGIT_BYTES = 6.0

FLOAT32_LOGIT_BYTES = 44.0
"""[byte] Traffic per logit of a loss on a float32 copy of the logits. The copy reads 2 and writes 4 bytes, log_softmax reads and writes 4.
Its gradient is filled, read and written, and cast back. Masks and shifted copies read and write 4 more (transformers 4.57,
loss_utils.py)."""

FLOAT32_LOSS_PEAK = 12.0
"""[byte] Peak memory per logit of that loss, in addition to saved log-probabilities and 16-bit logits: the float32 copy, the gradient of
the loss and that of log_softmax."""


FUSED_LOGIT_BYTES = 14.0
"""[byte] Traffic per logit of a fused loss: read once and overwritten by the gradient, in bf16, and its float32 intermediate."""

COMPILED_LAUNCH = 10e-6
"""[s] Host time of a kernel in compiled code: cudaLaunchKernel takes 3 to 6 us, its wrapper the rest."""

GRAPH_LAUNCH = 0.6e-6
"""[s] Host time of a kernel in a CUDA graph (0.58 us per node of a replayed chain on an RTX 5070 Ti, ahrefs/ocannl issue 488)."""


#: Setting -> change of the profile, in order of application.
CHANGES: Mapping[str, Change] = {
    "release": _release,
    "megatron_args": _megatron_arguments,
    "kernels": _kernels,
    "fused_cross_entropy": _fused_cross_entropy,
    "loss": _loss,
    "float32_logits": _float32_logits,
    "loss_traffic": _number("logit_bytes"),
    "loss_memory": _loss_memory,
    "allocator_factor": _number("reserve_factor"),
    "frozen_weights": _options({"float32": {"stores_frozen_float32": True}, "compute": {"stores_frozen_float32": False}}),
    "float32_norms": _switch("norms_keep_float32"),
    "adapter_dropout": _switch("adapter_dropout"),
    "float32_rest": _switch("quantized_rest_float32"),
    "optimizer_in_backward": _switch("steps_in_backward"),
    "batches_by_speed": _switch("batches_by_speed"),
    "tiled_mlp": _switch("tiles_mlp"),
    "checkpoint_offload": _switch("offloads_checkpoints"),
    "activation_offload": _switch("offloads_activations"),
    "optimizer_offload": _switch("offloads_optimizer"),
    "parameter_offload": _parameter_offload,
    "fused_rmsnorm": _switch("rms_norm_traffic", on=1.0, off=EAGER_RMS_NORM),
    "compile": _compile,
    "cuda_graphs": _cuda_graphs,
    "gradient_bucket_mb": _number("bucket_bytes", unit=2.0**20),
    "gradient_bucketing": _options({True: {"overlaps_gradients": ZERO_STAGES}, False: {"overlaps_gradients": (), "bucket_bytes": 0.0}}),
    "fused_optimizer": _options(
        {
            True: {"optimizer_bytes_factor": 1.0, "optimizer_copies": False},
            False: {"optimizer_bytes_factor": EAGER_ADAMW, "optimizer_copies": True},
        }
    ),
    "fp32_gradient_accumulation": _switch("accumulate_dtype", on="fp32", off="compute"),
    "fp32_gradient_reduction": _switch("reduce_dtype", on="fp32", off="compute"),
    "gradient_compression": lambda profile, value: profile.having(gradient_compression=value),
    "blocking_sends": _switch("pp_overlap", on=False, off=True),
    "whole_gradient_sends": _switch("sends_whole_gradients"),
    "mask_sends": _switch("sends_attention_mask"),
    "nccl_rings": _switch("flat_rings"),
    "async_tp": _options({True: {"tp_overlap_fraction": ASYNC_TP_OVERLAP}}),
    # collectives of backward overlap with the matrix multiply of the other gradient
    "tp_async": _switch("tp_backward_overlap_fraction", on=TP_ASYNC_OVERLAP, off=0.0),
    "moe_overlap": _exchanges,
    "delayed_weight_gradients": _delayed_weight_gradients,
    "hybridep": _switch("permutes_in_exchange"),
    "fused_experts": _switch("fuses_experts"),
    "moe_shared_overlap": _switch("hides_shared_experts"),
    "fp8_dispatch": _switch("sends_low_rows"),
    "fp8_params": _switch("gathers_low_weights"),
    "attention_kernel": _attention_kernel,
    "cp_form": _context_form,
    "fp8_recipe": _fp8_recipe,
    # Composer's modes: DEFAULT gathers bf16 and reduces fp32, PURE both in bf16 (`composer/distributed`, `get_mixed_precision`)
    "mixed_precision_mode": _options({"DEFAULT": {"reduce_dtype": "fp32"}}),
}


def with_settings(profile: ExecutionProfile, settings: Mapping[str, Any]) -> ExecutionProfile:
    """Return the profile of a run with these settings; unknown settings and unknown values are ignored."""
    for name, change in CHANGES.items():
        value = settings.get(name)
        if value is not None and not unread(name, value):
            profile = change(profile, value if SETTINGS[name].values is None else setting_value(name, value))
    return profile


def with_stated(profile: ExecutionProfile, settings: Mapping[str, Value]) -> ExecutionProfile:
    """Return the profile of a run with these stated settings, which are added to its name."""
    name = stated(profile.name, settings)
    if name == profile.name:
        return profile
    if FrameworkRef.parse(profile.name).settings:  # one setting may revert another
        raise bad_field("profile", profile.name, "has settings of its own", f"load it with all of them: {name}")
    return replace(with_settings(profile, settings), name=name)
