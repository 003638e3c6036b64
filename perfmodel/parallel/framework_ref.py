"""A framework by name with its stated settings: `generic+compile+attention_kernel=flash3`.

A plan stores this as one text, so the name of its profile always includes the settings. Options, arguments and plan files write the two
separately. `frameworks/settings.py` has the effect of each setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import parsed_bool
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.parallel.choices import CONTEXT_FORMS, LOSS_FORMS
from perfmodel.parallel.compression import NO_COMPRESSION, Compressor, read_compression
from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_RMS_NORM

Value: TypeAlias = bool | float | str
SettingValues: TypeAlias = "Mapping[str, Value] | list[str] | str | None"

ROWWISE_FP8 = 0.6
"""Rate of fp8 products with a scale per row, over that with a scale per tensor. Source: torchtitan's runs of 2025-06, of which those with
row scales are no faster than bf16."""

ASYNC_TP_OVERLAP = 0.5
"""Share of tensor-parallel communication that asynchronous tensor parallelism (micro-pipelined symmetric memory) overlaps."""

TP_ASYNC_OVERLAP = 0.8
"""Share of tensor-parallel communication in backward that overlaps with the other gradient's product (Korthikanti et al. 2022, 4.2.2)."""

SEPARATOR = "+"
"""Separator between a profile's name and its stated settings."""


_FILE = re.compile(r"(.*\.ya?ml)(?=\+|$)", re.DOTALL)

#: Synonyms of attention kernels, without punctuation.
_SPELLINGS: Mapping[str, str] = {
    **{f"{name}{sign}{n}": f"flash{n}" for n in (1, 2, 3) for name in ("fa", "flash", "flashattn", "flashattention") for sign in ("", "v")},
    **dict.fromkeys(
        ("fa4", "flash4", "flashattn4", "flashattention4", "flashattentionv4"), "flash3"
    ),  # written for its chip, as the third was for Hopper
    **dict.fromkeys(("cudnnattention", "cudnnfused", "fusedcudnn"), "cudnn"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSetting:
    """A setting of a run that a user can state.

    says     its effect, for users
    values   allowed words, a pattern, or the bounds of a number; empty: true or false; None: a list of a framework's own flags
    in_plan  a knob of the plan covers it: read in files of measured runs, not stated with a framework
    read     reader of a value and its field, for words with parts; `values` are then its forms
    """

    says: str
    values: tuple[str, ...] | tuple[float, float] | re.Pattern[str] | None = ()
    in_plan: bool = False
    read: Callable[[object, str], str] | None = None


RELEASE = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}", re.ASCII)
"""Pattern of a release: 26.02 or 26.02.01."""

SETTINGS: Mapping[str, StatedSetting] = {
    "release": StatedSetting(
        says="the framework's release, whose recipes define how MoE models run on these chips (CUDA graphs, HybridEP, overlap, fused "
        "experts: strategies/releases); NAME@26.06 is equivalent",
        values=RELEASE,
    ),
    "megatron_args": StatedSetting(says="Megatron-LM's own flags", values=None),
    "kernels": StatedSetting(says="libraries of kernels: te (Transformer Engine), deepep (experts are reached by `flex`)", values=None),
    "fused_cross_entropy": StatedSetting(
        says="softmax, loss and gradient are one kernel: less traffic, and no float32 copy of the logits if the framework keeps none",
    ),
    "loss": StatedSetting(
        says="how the logits are stored: whole, with torch's cross-entropy in float32. Or whole in 16 bits, copied to float32 an eighth at "
        "a time (upcast: torchtune's CEWithChunkedOutputLoss). Or in chunks of a few hundred tokens that backward recomputes (TRL's "
        "chunked_nll, torchtune's chunked loss). Or fused with the output matrix multiply (Liger's and "
        "Unsloth's fused linear cross-entropy)",
        values=LOSS_FORMS,
    ),
    "float32_logits": StatedSetting(
        says="the loss uses a float32 copy of all logits, which stays in memory through its backward (Hugging Face's models)",
    ),
    "loss_traffic": StatedSetting(says="memory traffic of the loss per logit, forward plus backward, in bytes", values=(1.0, 1000.0)),
    "loss_memory": StatedSetting(
        says="peak memory of the loss per logit, in bytes: the logits, their copies and their gradients",
        values=(2.0, 100.0),
    ),
    "allocator_factor": StatedSetting(
        says="reserved memory / allocated memory, for tensors allocated and freed within a step",
        values=(1.0, 4.0),
    ),
    "frozen_weights": StatedSetting(
        says="with adapters: dtype of frozen sharded weights, the compute dtype or float32; float32 units are cast after the all-gather",
        values=("compute", "float32"),
    ),
    "float32_norms": StatedSetting(
        says="unfused RMSNorm saves a float32 copy of its input for backward (Hugging Face's models, LitGPT)",
    ),
    "adapter_dropout": StatedSetting(
        says="adapters apply dropout to their input (lora_dropout above 0): a copy and a mask are saved",
    ),
    "float32_rest": StatedSetting(
        says="with a quantised base: embeddings, norms and the output matrix are cast to float32 (PEFT's prepare_model_for_kbit_training)",
    ),
    "optimizer_in_backward": StatedSetting(
        says="each parameter is updated as soon as its gradient is computed, so not all gradients are in memory at once",
    ),
    "batches_by_speed": StatedSetting(
        says="on several kinds of chips: replicas on faster chips run more microbatches of a step; no: all run the same number",
    ),
    "tiled_mlp": StatedSetting(
        says="dense feed-forwards run over tiles of the sequence, so intermediate tensors are never complete in memory; backward "
        "recomputes them (ALST's TiledMLP)",
    ),
    "checkpoint_offload": StatedSetting(
        says="with recompute full: layer inputs saved for backward are offloaded to host memory",
    ),
    "activation_offload": StatedSetting(
        says="all activations saved for backward are offloaded to host memory, with any recomputation",
    ),
    "optimizer_offload": StatedSetting(
        says="optimizer states are in host memory, gradients are sent there and the host runs the optimizer step (ZeRO-Offload)",
    ),
    "parameter_offload": StatedSetting(
        says="weights are in host memory and are loaded when their layer runs (DeepSpeed's offload_param)",
    ),
    "fused_rmsnorm": StatedSetting(says=f"RMSNorm is one kernel; no: unfused in float32, {EAGER_RMS_NORM:g} times the traffic"),
    "compile": StatedSetting(
        says="norms, rotary embeddings and chains of elementwise operators are fused into one kernel each (torch.compile), and a launch "
        "takes at most 10 us of host time; no: separate kernels, unless the framework fuses them",
    ),
    "cuda_graphs": StatedSetting(says="a pass is launched as one CUDA graph: almost no host time per kernel"),
    "gradient_bucket_mb": StatedSetting(says="size of a gradient bucket, in MiB", values=(1e-3, 1e6)),
    "gradient_bucketing": StatedSetting(
        says="gradients are reduced in buckets, overlapped with the last backward, for any ZeRO stage (DeepSpeed's overlap_comm); no: "
        "after backward, exposed",
    ),
    "fused_optimizer": StatedSetting(
        says=f"the optimizer's step is one kernel (torch's fused=True); no: one per operation (foreach, torch's default), "
        f"{EAGER_ADAMW:.2g} times the traffic",
    ),
    "fp32_gradient_accumulation": StatedSetting(says="gradients of microbatches are accumulated in float32; no: in the compute dtype"),
    "fp32_gradient_reduction": StatedSetting(
        says="gradients are reduced over the data-parallel ranks in float32 (DeepSpeed's fp32_allreduce); no: in the compute dtype",
    ),
    "gradient_compression": StatedSetting(
        says="gradients that replicas all-reduce are cast, or replaced by factors of a low rank (torch's DDP communication hooks)",
        values=tuple(f"{method}:RANK" if method is Compressor.POWERSGD else str(method) for method in Compressor),
        read=read_compression,
    ),
    "blocking_sends": StatedSetting(
        says="a pipeline stage waits for each of its sends (DeepSpeed's engine); no: sends overlap with the compute of other microbatches",
    ),
    "whole_gradient_sends": StatedSetting(
        says="each tensor-parallel rank sends the whole gradient to the stage before (DeepSpeed 0.3); no: in parts, like activations",
    ),
    "mask_sends": StatedSetting(
        says="the attention mask is sent with the activations from stage to stage, in 16 bits (DeepSpeed's GPT2ModelPipe)",
    ),
    "nccl_rings": StatedSetting(
        says="collectives between nodes are flat rings (NCCL_ALGO=ring); no: trees and hierarchical algorithms too",
    ),
    "async_tp": StatedSetting(
        says=f"{ASYNC_TP_OVERLAP:.0%} of tensor-parallel communication overlaps with matrix multiplies (torch's asynchronous TP)",
    ),
    "tp_async": StatedSetting(
        says=f"{TP_ASYNC_OVERLAP:.0%} of tensor-parallel communication in backward overlaps with the matrix multiply of the other "
        "gradient; no: nothing",
    ),
    "moe_overlap": StatedSetting(
        says="the all-to-all of one microbatch overlaps with the passes of another, on a share of the compute units "
        "(Megatron-LM's --overlap-moe-expert-parallel-comm, DualPipe); no: it is exposed",
    ),
    "delayed_weight_gradients": StatedSetting(
        says="with moe_overlap: weight gradients are computed during the communication of backward, including pipeline warm-up and "
        "cool-down, and their inputs are kept until then (Megatron-LM's --delay-wgrad-compute, DualPipe)",
    ),
    "hybridep": StatedSetting(
        says="the dispatch kernels of `flex` sort rows by expert (HybridEP); no: a separate pass does (DeepEP)",
    ),
    "fused_experts": StatedSetting(
        says="matrix multiplies of experts, their activation and casts are one kernel (Megatron-LM's --use-transformer-engine-op-fuser)",
    ),
    "moe_shared_overlap": StatedSetting(
        says="shared experts overlap with the all-to-all of the other experts (Megatron-LM's --moe-shared-expert-overlap)",
    ),
    "fp8_dispatch": StatedSetting(
        says="rows are dispatched to experts in the cast format, with their scales, and combined in 16 bits (DeepEP; fp8-block and mxfp8)",
    ),
    "fp8_params": StatedSetting(
        says="weights are gathered in the cast format, and TransformerEngine keeps no 16-bit weights (--fp8-param-gather, torchao's float8 "
        "all-gather; not mxfp8, whose two copies have separate scales)",
    ),
    "attention_kernel": StatedSetting(
        says="generation of the fused attention kernel: its rate and its buffer for query gradients; flash_attention_2 is "
        "a synonym of flash2",
        values=ATTENTION_KERNELS,
    ),
    "cp_form": StatedSetting(
        says="context parallelism of --cp: keys and values gathered, passed around a ring (contiguous or balanced chunks: zigzag), or "
        "heads exchanged (Ulysses)",
        values=CONTEXT_FORMS,
    ),
    "fp8_recipe": StatedSetting(
        says=f"fp8 scales per tensor, or per row: {ROWWISE_FP8:g} of the rate",
        values=("tensorwise", "rowwise"),
    ),
    "mixed_precision_mode": StatedSetting(
        says="Composer's modes: gradients are reduced in float32 (DEFAULT), or in the compute dtype (PURE)",
        values=("DEFAULT", "PURE"),
    ),
    "sharding": StatedSetting(
        says="how FSDP cuts", values=("FULL_SHARD", "FSDP", "HSDP", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "DDP"), in_plan=True
    ),
    "reshard_after_forward": StatedSetting(
        says="no: FSDP keeps gathered parameters until the last microbatch's backward (ZeRO 2 of a run that states 3)", in_plan=True
    ),
    "zero_group": StatedSetting(
        says="ranks over which ZeRO shards; the rest of the data ranks are replicas", values=(1.0, 1e6), in_plan=True
    ),
    "balanced_routing": StatedSetting(
        says="tokens are forced to spread evenly over experts (where: as the framework's code does it)", values=("forced",), in_plan=True
    ),
    "tp_mode": StatedSetting(says="sequence parallelism, or not", values=("REDUCE_SCATTER", "ALL_REDUCE"), in_plan=True),
}

#: Settings that users state with a framework.
SETTING_NAMES: Mapping[str, StatedSetting] = {
    name: setting for name, setting in SETTINGS.items() if not setting.in_plan and setting.values is not None
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRef:
    """The framework of a plan, by its shipped name or the path of its file, with its stated settings."""

    name: str
    settings: Mapping[str, Value]

    @staticmethod
    @session_cache(maxsize=256)
    def parse(text: str) -> FrameworkRef:
        """Return the framework and settings of a text. Raises InputError for an unknown setting or value."""
        name = framework_named(text)
        suffix = text[len(name) :]
        return FrameworkRef(name=name, settings=MappingProxyType(read_settings(suffix[len(SEPARATOR) :]) if suffix else {}))

    def __str__(self) -> str:
        return SEPARATOR.join([self.name, settings_text(self.settings)]) if self.settings else self.name


def framework_named(profile: str) -> str:
    """Return the name of a profile, or the path of its file, without the stated settings."""
    file = _FILE.match(profile)
    return file[0] if file else profile.partition(SEPARATOR)[0]


def read_settings(given: object, name: str = "settings") -> dict[str, Value]:
    """Return the settings of `{"compile": True}`, `compile+fused_rmsnorm=false` or a list of such texts.

    Raises InputError for an unknown setting or value.
    """
    if given is None or given == {}:
        return {}
    settings: dict[str, Value] = {}
    for setting, value in _pairs(given, name):
        known = setting_value(setting, value)
        if settings.setdefault(setting, known) != known:
            raise bad_field("setting", _text(setting, known), f"was stated as {_text(setting, settings[setting])} before", "state it once")
    return _in_order(settings)


def _pairs(given: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for text in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(text, str):
            raise bad_field(name, shown(given), "must be a mapping of names to values", 'write {"compile": true}')
        for assignment in re.split(r"[+,]", text):
            setting, separator, value = (part.strip() for part in assignment.partition("="))
            yield setting, value if separator else True


def stated(profile: str, settings: Mapping[str, Value]) -> str:
    """Return the text of a profile with these settings added, but for no compression. Raises InputError for a contradiction."""
    ref = FrameworkRef.parse(profile)
    if not settings:
        return str(ref)
    current = ref.settings
    for name, value in settings.items():
        if current.get(name, value) != value:
            rule = f"the profile {one_line(profile)} says {_text(name, current[name])}"
            raise bad_field("setting", _text(name, value), rule, "state one of them")
    named = {name: value for name, value in {**current, **settings}.items() if value != str(NO_COMPRESSION)}
    return str(FrameworkRef(name=ref.name, settings=_in_order(named)))


def passed_over(settings: object) -> list[str]:
    """Return the settings of a measured run that are ignored: unknown names and unknown values."""
    given = settings.items() if isinstance(settings, Mapping) else ()
    return [text for name, value in given if value is not None and (text := unread(name, value))]


def passed_over_line(names: Sequence[str]) -> str:
    """Return one line about ignored settings."""
    first = names[0].partition("=")[0].partition(" ")[0]
    remedy = "" if first in SETTINGS else suggest(first, SETTINGS)
    return f"settings that nothing is known of, passed over: {', '.join(names[:12])}{' ...' if len(names) > 12 else ''}{remedy}"


def settings_text(settings: Mapping[str, Value]) -> str:
    return SEPARATOR.join(_text(name, value) for name, value in settings.items())


def flags_text(changes: Mapping[str, Any]) -> str:
    """Return changed words and settings as flags, such as `--chips 8 --tp 8`."""
    flags = []
    for name, value in changes.items():
        knob = name.replace("_", "-")
        if name in SETTING_NAMES:
            flags.append(f"--setting {_text(name, value)}")
        elif isinstance(value, bool):
            flags.append(f"--{knob}" if value else f"--no-{knob}")
        else:
            flags.append(f"--{knob} {value}")
    return " ".join(flags)


def _in_order(settings: Mapping[str, Value]) -> dict[str, Value]:
    return {name: settings[name] for name in SETTING_NAMES if name in settings}


def _text(name: str, value: Value) -> str:
    if isinstance(value, bool):
        return name if value else f"{name}=false"
    if isinstance(value, float):
        return f"{name}={int(value) if value.is_integer() else repr(value)}"
    return f"{name}={value}"


def unread(name: object, value: object) -> str:
    """Return the text of a measured run's setting whose name or value is unknown; "" if both are known."""
    setting = SETTINGS.get(name) if isinstance(name, str) else None
    if setting is None:
        return one_line(name, 40)
    try:
        _read(str(name), setting, value)
    except InputError:
        return f"{one_line(name, 40)}={one_line(value, 40)}"
    return ""


def setting_value(name: object, value: object) -> Value:
    """Return the value of a stated setting. Raises InputError for an unknown setting or value."""
    if not isinstance(name, str) or name not in SETTING_NAMES:
        raise bad_field("setting", one_line(name), f"is not known{suggest(one_line(name), SETTING_NAMES)}")
    known: Value = _read(name, SETTING_NAMES[name], value)
    return known


def _read(name: str, setting: StatedSetting, value: object) -> Any:
    known, field = setting.values, f"setting {name}"
    if setting.read is not None:
        return setting.read(value, name)
    if known is None:
        if not isinstance(value, list):
            raise bad_field(field, one_line(value), "must be a list of flags", "correct it")
        return value
    if not known:
        if isinstance(value, str):
            return parsed_bool(value, field)
        if value not in (True, False):
            raise bad_field(field, one_line(value), "must be true or false", "write one of them")
        return bool(value)
    if isinstance(known, re.Pattern):
        text = f"{value:.2f}" if isinstance(value, float) else value
        if not isinstance(text, str) or not known.fullmatch(text):
            raise bad_field(field, one_line(value), "must be a release such as 26.02 or 26.02.01", "write one in quotes")
        return text
    if isinstance(known[0], str):
        lowered = value.lower() if isinstance(value, str) else ""
        word = _SPELLINGS.get(re.sub("[^a-z0-9]", "", lowered), next((choice for choice in known if str(choice).lower() == lowered), ""))
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
