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
from perfmodel.parallel.context_forms import CONTEXT_FORMS, RING, ULYSSES, ULYSSES_RULES
from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_COMPLEX_ROTARY, EAGER_RMS_NORM
from perfmodel.parallel.layout import ZERO_STAGES
from perfmodel.parallel.loss_forms import FUSED_LOSS, LOSS_FORMS, UPCAST_LOSS, WHOLE_LOSS

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
    if not isinstance(value, bool):
        return profile
    return replace(profile, optimizer_bytes_factor=1.0 if value else EAGER_ADAMW, optimizer_copies=not value)


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


def _release(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, release=str(value))


def _permutes(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, permutes_in_exchange=value) if isinstance(value, bool) else profile


def _fused_experts(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, fuses_experts=value) if isinstance(value, bool) else profile


def _shared_experts(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, hides_shared_experts=value) if isinstance(value, bool) else profile


def _low_rows(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, sends_low_rows=value) if isinstance(value, bool) else profile


def _low_weights(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, gathers_low_weights=value) if isinstance(value, bool) else profile


def _mixed_precision(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Composer's modes: DEFAULT gathers bf16 and reduces fp32, PURE does both in bf16 (`composer/distributed`, `get_mixed_precision`)."""
    return replace(profile, reduce_dtype="fp32") if value == "DEFAULT" else profile


def _kernels(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Libraries that a run names: Transformer Engine's norms, rotary embeddings and attention are one kernel each."""
    names = {str(name).lower() for name in value} if isinstance(value, list) else set()
    if "te" not in names:
        return profile
    return replace(profile, rms_norm_traffic=1.0, rotary_traffic=1.0, attention_kernel="flash3", attention_rate_fraction=1.0)


def _tp_async(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Collectives of tensor parallelism in backward run beside the other gradient's product, or nothing does."""
    return replace(profile, tp_backward_overlap_fraction=TP_ASYNC_OVERLAP if value else 0.0) if isinstance(value, bool) else profile


def _attention_kernel(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """By generation: the first, the second, or the one that was written for the chip; of a release that lets one choose it where ranks
    share queries too, which those did not that the framework's own rate there comes from."""
    if value not in ATTENTION_KERNELS:
        return profile
    return replace(
        profile,
        attention_kernel=value,
        attention_rate_fraction=1.0,
        context_attention_rate_fraction=1.0,
        query_gradient_bytes=QUERY_GRADIENT_BYTES,
    )


def _loss(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """In pieces, of which none of the logits are kept; or whole, as torch's cross-entropy has them."""
    if value == WHOLE_LOSS:
        peak = max(profile.loss_peak_bytes, EAGER_LOSS_PEAK)
        return replace(profile, loss_form=value, fused_cross_entropy=False, loss_peak_bytes=peak)
    if value == UPCAST_LOSS:
        return replace(profile, loss_form=value, fused_cross_entropy=True, loss_peak_bytes=FLOAT32_LOSS_PEAK)
    if value == FUSED_LOSS:
        return replace(profile, loss_form=value, logit_bytes=min(profile.logit_bytes, FUSED_LOGIT_BYTES))
    return replace(profile, loss_form=value) if value in LOSS_FORMS else profile


def _float32_logits(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    if value is not True:
        return profile
    traffic = max(profile.logit_bytes, FLOAT32_LOGIT_BYTES)
    return replace(profile, fused_cross_entropy=False, loss_peak_bytes=max(profile.loss_peak_bytes, FLOAT32_LOSS_PEAK), logit_bytes=traffic)


def _loss_traffic(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, logit_bytes=float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else profile


def _loss_memory(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """Of which the saved float32 log-probabilities and the 16-bit logits are counted with the activations."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return profile
    return replace(profile, fused_cross_entropy=False, loss_peak_bytes=max(float(value) - _COUNTED_LOGIT_BYTES, 0.0))


def _allocator(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, reserve_factor=float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else profile


def _frozen_weights(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, stores_frozen_float32=value == "float32")


def _switch(field: str) -> Callable[[ExecutionProfile, Any], ExecutionProfile]:
    """A setting that is a field of the profile."""

    def change(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
        changed: dict[str, Any] = {field: value}
        return replace(profile, **changed) if isinstance(value, bool) else profile

    return change


def _context_form(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    """With a framework that can run it."""
    if value not in CONTEXT_FORMS:
        return profile
    chunks = profile.context_chunks if value == ULYSSES else "contiguous" if value == RING else "head_tail"
    runs = profile.runs
    rules = (*runs.rules, *ULYSSES_RULES) if value == ULYSSES and runs.rules else runs.rules
    runs = replace(runs, rules=tuple(dict.fromkeys(rules)), axes=tuple(dict.fromkeys((*runs.axes, "cp"))))
    return replace(profile, context_form=value, context_chunks=chunks, runs=runs)


def _async_tp(profile: ExecutionProfile, value: Any) -> ExecutionProfile:
    return replace(profile, tp_overlap_fraction=ASYNC_TP_OVERLAP) if value is True else profile


QUERY_GRADIENT_BYTES = 4.0
"""Of an element of queries: FlashAttention-2 and -3 and cuDNN add up their gradient in float32 (`dq_accum` in flash-attention 2.8,
`csrc/flash_attn/flash_api.cpp`)."""

EAGER_LOSS_PEAK = 8.0
"""Of a logit, in addition to the logits and their softmax in float32: the gradients that nll_loss and log_softmax make, in float32."""

#: Their fused loss saves traffic, not memory: the softmax is kept in float32, its gradient made from it (Megatron-Core,
#: `fusions/fused_cross_entropy.py`).
_KEEPS_FLOAT32_SOFTMAX = ("megatron", "nemo")

_COUNTED_LOGIT_BYTES = 6.0

FLOAT32_LOGIT_BYTES = 44.0
"""Traffic of a loss on a float32 copy of the logits, a logit: the copy reads 2 and writes 4 bytes, log_softmax reads and writes 4, its
gradient is filled, read and written, and cast back; masks and shifted copies read and write 4 more (transformers 4.57, loss_utils.py)."""

FLOAT32_LOSS_PEAK = 12.0
"""Memory at the peak of that loss beyond saved log-probabilities and 16-bit logits, a logit: the float32 copy, the gradient that the
loss hands back and the one that log_softmax makes of it. [byte]"""

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
"""Share of tensor-parallel communication in backward that overlaps with the other gradient's product (Korthikanti et al. 2022, 4.2.2)."""

SEPARATOR = "+"
"""Between a profile's name and the settings that are stated with it."""


_FILE = re.compile(r"(.*\.ya?ml)(?=\+|$)", re.DOTALL)

#: How else the generations of FlashAttention and their like are called, without the signs between.
_SPELLINGS: Mapping[str, str] = {
    **{f"{name}{sign}{n}": f"flash{n}" for n in (1, 2, 3) for name in ("fa", "flash", "flashattn", "flashattention") for sign in ("", "v")},
    **dict.fromkeys(
        ("fa4", "flash4", "flashattn4", "flashattention4", "flashattentionv4"), "flash3"
    ),  # the chip's own, as the third on Hopper
    **dict.fromkeys(("cudnnattention", "cudnnfused", "fusedcudnn"), "cudnn"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSetting:
    """One thing that is known of a run's setup.

    says     what it changes, for people
    change   what it does to the profile; None: the plan says it in words of its own
    values   the words that it may have, a pattern of them, or the least and the most of a number; empty: yes or no; None: a list of a
             framework's own flags
    """

    says: str
    change: Callable[[ExecutionProfile, Any], ExecutionProfile] | None
    values: tuple[str, ...] | tuple[float, float] | re.Pattern[str] | None = ()


RELEASE = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}", re.ASCII)
"""How a release is written: 26.02 or 26.02.01."""

#: In the order in which they change a profile.
_SETTINGS: Mapping[str, StatedSetting] = {
    "release": StatedSetting(
        says="the framework's release, whose recipes define how MoE models run on these chips (CUDA graphs, HybridEP, overlap, fused "
        "experts: strategies/releases); NAME@26.06 is equivalent",
        change=_release,
        values=RELEASE,
    ),
    "megatron_args": StatedSetting(says="Megatron-LM's own flags", change=_megatron_arguments, values=None),
    "kernels": StatedSetting(
        says="libraries of kernels: te (Transformer Engine), deepep (experts are reached by `flex`)", change=_kernels, values=None
    ),
    "fused_cross_entropy": StatedSetting(
        says="softmax, loss and gradient are one kernel: less traffic, and no float32 copy of the logits if the framework keeps none",
        change=_fused_cross_entropy,
    ),
    "loss": StatedSetting(
        says="how the logits are stored: whole, with torch's cross-entropy in float32. Or whole in 16 bits, copied to float32 an eighth at "
        "a time (upcast: torchtune's CEWithChunkedOutputLoss). Or in chunks of a few hundred tokens that backward recomputes (TRL's "
        "chunked_nll, torchtune's chunked loss). Or fused with the output matrix multiply (Liger's and "
        "Unsloth's fused linear cross-entropy)",
        change=_loss,
        values=LOSS_FORMS,
    ),
    "float32_logits": StatedSetting(
        says="the loss uses a float32 copy of all logits, which stays in memory through its backward (Hugging Face's models)",
        change=_float32_logits,
    ),
    "loss_traffic": StatedSetting(
        says="memory traffic of the loss per logit, forward plus backward, in bytes", change=_loss_traffic, values=(1.0, 1000.0)
    ),
    "loss_memory": StatedSetting(
        says="peak memory of the loss per logit, in bytes: the logits, their copies and their gradients",
        change=_loss_memory,
        values=(2.0, 100.0),
    ),
    "allocator_factor": StatedSetting(
        says="reserved memory / allocated memory, for tensors allocated and freed within a step",
        change=_allocator,
        values=(1.0, 4.0),
    ),
    "frozen_weights": StatedSetting(
        says="with adapters: dtype of frozen sharded weights, the compute dtype or float32; float32 units are cast after the all-gather",
        change=_frozen_weights,
        values=("compute", "float32"),
    ),
    "float32_norms": StatedSetting(
        says="unfused RMSNorm saves a float32 copy of its input for backward (Hugging Face's models, LitGPT)",
        change=_switch("norms_keep_float32"),
    ),
    "adapter_dropout": StatedSetting(
        says="adapters apply dropout to their input (lora_dropout above 0): a copy and a mask are saved",
        change=_switch("adapter_dropout"),
    ),
    "float32_rest": StatedSetting(
        says="with a quantised base: embeddings, norms and the output matrix are cast to float32 (PEFT's prepare_model_for_kbit_training)",
        change=_switch("quantized_rest_float32"),
    ),
    "optimizer_in_backward": StatedSetting(
        says="each parameter is updated as soon as its gradient is computed, so not all gradients are in memory at once",
        change=_switch("steps_in_backward"),
    ),
    "tiled_mlp": StatedSetting(
        says="dense feed-forwards run over tiles of the sequence, so intermediate tensors are never complete in memory; backward "
        "recomputes them (ALST's TiledMLP)",
        change=_switch("tiles_mlp"),
    ),
    "checkpoint_offload": StatedSetting(
        says="with recompute full: layer inputs saved for backward are offloaded to host memory",
        change=_switch("offloads_checkpoints"),
    ),
    "activation_offload": StatedSetting(
        says="all activations saved for backward are offloaded to host memory, with any recomputation",
        change=_switch("offloads_activations"),
    ),
    "optimizer_offload": StatedSetting(
        says="optimizer states are in host memory, gradients are sent there and the host runs the optimizer step (ZeRO-Offload)",
        change=_switch("offloads_optimizer"),
    ),
    "parameter_offload": StatedSetting(
        says="weights are in host memory and are loaded when their layer runs (DeepSpeed's offload_param)",
        change=_switch("offloads_parameters"),
    ),
    "fused_rmsnorm": StatedSetting(
        says=f"RMSNorm is one kernel; no: unfused in float32, {EAGER_RMS_NORM:g} times the traffic", change=_fused_norm
    ),
    "compile": StatedSetting(
        says="norms, rotary embeddings and chains of elementwise operators are fused into one kernel each (torch.compile), and a launch "
        "takes at most 10 us of host time; no: separate kernels, unless the framework fuses them",
        change=_compile,
    ),
    "cuda_graphs": StatedSetting(says="a pass is launched as one CUDA graph: almost no host time per kernel", change=_cuda_graphs),
    "gradient_bucket_mb": StatedSetting(says="size of a gradient bucket, in MiB", change=_bucket, values=(1e-3, 1e6)),
    "gradient_bucketing": StatedSetting(
        says="gradients are reduced in buckets, overlapped with the last backward, for any ZeRO stage (DeepSpeed's overlap_comm); no: "
        "after backward, exposed",
        change=_bucketing,
    ),
    "fused_optimizer": StatedSetting(
        says=f"the optimizer's step is one kernel (torch's fused=True); no: one per operation (foreach, torch's default), "
        f"{EAGER_ADAMW:.2g} times the traffic",
        change=_fused_optimizer,
    ),
    "fp32_gradient_accumulation": StatedSetting(
        says="gradients of microbatches are accumulated in float32; no: in the compute dtype", change=_accumulation
    ),
    "async_tp": StatedSetting(
        says=f"{ASYNC_TP_OVERLAP:.0%} of tensor-parallel communication overlaps with matrix multiplies (torch's asynchronous TP)",
        change=_async_tp,
    ),
    "tp_async": StatedSetting(
        says=f"{TP_ASYNC_OVERLAP:.0%} of tensor-parallel communication in backward overlaps with the matrix multiply of the other "
        "gradient; no: nothing",
        change=_tp_async,
    ),
    "moe_overlap": StatedSetting(
        says="the all-to-all of one microbatch overlaps with the passes of another, on a share of the compute units "
        "(Megatron-LM's --overlap-moe-expert-parallel-comm, DualPipe); no: it is exposed",
        change=_exchanges,
    ),
    "delayed_weight_gradients": StatedSetting(
        says="with moe_overlap: weight gradients are computed during the communication of backward, including pipeline warm-up and "
        "cool-down, and their inputs are kept until then (Megatron-LM's --delay-wgrad-compute, DualPipe)",
        change=_delayed_weight_gradients,
    ),
    "hybridep": StatedSetting(
        says="the dispatch kernels of `flex` sort rows by expert (HybridEP); no: a separate pass does (DeepEP)",
        change=_permutes,
    ),
    "fused_experts": StatedSetting(
        says="matrix multiplies of experts, their activation and casts are one kernel (Megatron-LM's --use-transformer-engine-op-fuser)",
        change=_fused_experts,
    ),
    "moe_shared_overlap": StatedSetting(
        says="shared experts overlap with the all-to-all of the other experts (Megatron-LM's --moe-shared-expert-overlap)",
        change=_shared_experts,
    ),
    "fp8_dispatch": StatedSetting(
        says="rows are dispatched to experts in the cast format, with their scales, and combined in 16 bits (DeepEP; fp8-block and mxfp8)",
        change=_low_rows,
    ),
    "fp8_params": StatedSetting(
        says="weights are gathered in the cast format, and TransformerEngine keeps no 16-bit weights (--fp8-param-gather, torchao's float8 "
        "all-gather; not mxfp8, whose two copies have separate scales)",
        change=_low_weights,
    ),
    "attention_kernel": StatedSetting(
        says="generation of the fused attention kernel: its rate and its buffer for query gradients; flash_attention_2 is "
        "a synonym of flash2",
        change=_attention_kernel,
        values=ATTENTION_KERNELS,
    ),
    "cp_form": StatedSetting(
        says="context parallelism of --cp: keys and values gathered, passed around a ring (contiguous or balanced chunks: zigzag), or "
        "heads exchanged (Ulysses)",
        change=_context_form,
        values=CONTEXT_FORMS,
    ),
    "fp8_recipe": StatedSetting(
        says=f"fp8 scales per tensor, or per row: {ROWWISE_FP8:g} of the rate",
        change=_fp8_recipe,
        values=("tensorwise", "rowwise"),
    ),
    "mixed_precision_mode": StatedSetting(
        says="Composer's modes: gradients are reduced in float32 (DEFAULT), or in the compute dtype (PURE)",
        change=_mixed_precision,
        values=("DEFAULT", "PURE"),
    ),
    "sharding": StatedSetting(
        says="how FSDP cuts", change=None, values=("FULL_SHARD", "FSDP", "HSDP", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "DDP")
    ),
    "reshard_after_forward": StatedSetting(
        says="no: FSDP keeps gathered parameters until the last microbatch's backward (ZeRO 2 of a run that states 3)", change=None
    ),
    "zero_group": StatedSetting(
        says="ranks over which ZeRO shards; the rest of the data ranks are replicas", change=None, values=(1.0, 1e6)
    ),
    "balanced_routing": StatedSetting(
        says="tokens are forced to spread evenly over experts (where: as the framework's code does it)", change=None, values=("forced",)
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
        raise bad_field("setting", one_line(name), f"is not known{suggest(one_line(name), STATED)}")
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
    if isinstance(known, re.Pattern):
        text = f"{value:.2f}" if isinstance(value, float) else value
        if not isinstance(text, str) or not known.fullmatch(text):
            raise bad_field(field, one_line(value), "must be a release such as 26.02 or 26.02.01", "write one in quotes")
        return text
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
