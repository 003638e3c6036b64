"""Execution profiles: what a framework does with a plan, as data that the cost model reads (DESIGN.md section 3)."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.records import record_from_data, record_to_data
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.values import check_path
from perfmodel.frameworks.fitted import NOTHING, FittedTo
from perfmodel.frameworks.runnable import ANYTHING, Runs, listed_choices, not_runnable_reason, runs_from_dict
from perfmodel.frameworks.settings import with_stated
from perfmodel.frameworks.shipped import flattened, framework_names, shipped_fields, unit_of
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.parallel.context_forms import read_context_form
from perfmodel.parallel.framework_ref import SEPARATOR, framework_named, settings_in
from perfmodel.parallel.layout import ZERO_STAGES, Dispatcher, ZeroStage
from perfmodel.parallel.loss_forms import LOSS_FORMS, WHOLE_LOSS
from perfmodel.parallel.plan import Plan

GENERIC = "generic"
"""The profile where no framework is given."""

#: Parts of a layer that CUDA graphs may launch by themselves (Megatron-LM's --cuda-graph-scope).
GRAPH_SCOPES = ("attn", "mamba", "moe_router", "moe_preprocess", "mlp")
CONTEXT_CHUNKS = HEAD_TAIL, CONTIGUOUS = ("head_tail", "contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionProfile:
    """A framework's habits. Nothing in the cost model asks for the name.

    dropout                              dropout operators run (in training, with the model's probability)
    saved_input_layout                   where a redistributed input of a matmul or of attention is saved: consumer (gathered) or producer
                                         (gathered again)
    fused_cross_entropy                  softmax, loss and its gradient in one kernel: no separate fp32 copy of the logits
    logit_bytes                          memory traffic of the loss, forward and backward together, a logit
    loss_peak_bytes                      memory at the peak of the loss beyond saved tensors and logits, a logit: float32 gradient, copies
    fuses_elementwise                    chains of elementwise operators are one kernel that keeps what is between in registers
    rms_norm_traffic, rotary_traffic     memory traffic of these operators over that of one fused kernel; written out: `parallel/eager.py`
    accumulate_dtype, reduce_dtype       gradients as accumulated / as reduced ("fp32" or "compute")
    stores_master_weights                the weights that stay are the master copy, operators read a cast (torch); else both stay (Megatron)
    fuses_gradient_accumulation          the weight-gradient matmul adds into the accumulator itself
    gradient_copy_bytes                  what stays beside the accumulators, a parameter: gradients as produced, in buckets, where there are
                                         replicas to reduce over
    waiting_gradient_fraction            gradients as produced wait for the end of their microbatch before they are added: the share of
                                         them that the allocator holds beside the peak
    reserve_factor                       what its allocator holds over what is in tensors, of all that comes and goes within a step
    delayed_collectives                  tensor-parallel collectives whose tensors, whole and cut, the allocator may not use again yet,
                                         because the host runs that far ahead of the chip (torch's record_stream)
    workspace_bytes                      workspaces of cuBLAS and of kernel libraries, which lie in the allocator
    framework_bytes                      what a run needs beside its allocator and the context: NCCL's buffers, the allocator's spread
    zero2_stores_shards                  ZeRO-2 keeps parameter shards and gathers every microbatch (torch), or whole copies (DeepSpeed)
    reduces_each_microbatch              gradients leave for their accumulator layout after every microbatch, not once a step
    pipeline_reduces_each_microbatch     under a pipeline, those of weights without ZeRO do so too (nanotron)
    bucket_bytes                         gradients are reduced in buckets of this size, counted in the parameters' dtype and of whole
                                         tensors; 0: one collective per unit
    parameter_unit                       what one parameter gather or publish takes along: layer or tensor
    overlaps_gradients                   ZeRO stages whose gradients are reduced under the last backward; others wait for its end
    exposed_gradient_fraction            the share of what could hide there and does not
    exposed_scatter_fraction             the share of a reduce-scatter (ZeRO-1 and 2) that could hide and waits for the end of backward
    publish_factor                       time of the gathers that bring updated parameters back to all ranks after the step (ZeRO-1), over
                                         that of the collectives by themselves
    prefetches_parameters                the next unit's gather runs under this unit's compute
    tp_overlap_fraction                  share of tensor-parallel communication that hides under compute
    tp_backward_overlap_fraction         the same of those in backward beside which a matmul runs that nothing waits for (Megatron:
                                         re-gathers and input gradients, while the input's and the weight's gradient are computed)
    attention_kernel                     generation of its fused attention (flash1, flash2, flash3, cudnn): what an older one reaches of the
                                         calibrated kernel's rate is the chip's (`attention_generations` of its calibration)
    attention_rate_fraction              rate of its fused attention over that generation's
    matmul_rate_fraction                 rate of its matrix multiplies over the calibrated one in a long run (layouts of its products, its
                                         library, what runs beside them)
    fp8_matmul_rate_fraction             the same again of those in fp8
    context_chunks                       which part of the sequence a context-parallel rank has: head_tail (the r-th chunk of 2 cp from
                                         either end: equal causal work) or contiguous (the last rank does 2 - 1/cp of the mean)
    context_attention_rate_fraction      rate of its fused attention where ranks share the queries over the same kernel's where they do
                                         not (smaller blocks, partial results that are merged)
    pp_overlap                           pipeline sends hide in the steady state
    hides_exchanges                      what tokens of one microbatch send to experts and back travels beside another one's passes
    delays_weight_gradients              a block's weight gradients are computed apart from those of its inputs, beside what is exchanged
                                         (of who hides exchanges alone: Megatron's --delay-wgrad-compute, DualPipe)
    hides_shared_experts                 what of a layer neither needs nor makes what is exchanged runs beside it
    sends_low_rows                       rows go to experts in the bits in which they are multiplied, where the recipe can (DeepEP)
    gathers_low_weights                  so are weights gathered, and they live in no more (TransformerEngine's primary weights, torchao)
    scatters_pipeline_sends              tp-equal copies at a stage boundary are sent in tp parts and gathered (Megatron's scatter-gather)
    permutes_in_exchange                 kernels that send tokens once to each place (`flex`) put rows in the order of experts, and back
                                         (HybridEP); else a pass of its own does (DeepEP)
    fuses_experts                        products of experts apply the activation and cast as they write (one kernel)
    adds_expert_bias_apart               the bias of experts' outputs is added expert by expert, weighted, in float32, and the pieces are
                                         put together again (torch.cat); else by the product before it
    pads_expert_rows                     rows of experts are copied to multiples that products in few bits take, and back, where the kernels
                                         of the exchange do not pad them (Transformer Engine's Fp8Padding)
    graph_scope                          parts of a layer that CUDA graphs launch, where the host launches the others: attn, mamba,
                                         moe_router, moe_preprocess, mlp (Megatron-LM's --cuda-graph-scope)
    release                              of the framework, whose recipes set more for models with experts; "": not stated
    recompute_stops_early                recomputation ends with the last tensor that backward needs, without the last collectives of a
                                         layer and the last product of unfused attention (torch); else it runs to the end (Megatron)
    host_launch_time                     what its host needs for each kernel or collective of a backward pass, and half of what it needs for
                                         one of a forward pass: a pass takes no less than its launches (`cost/launches.py` counts them)
    host_layer_time_per_tp_across_nodes  more of that for each layer and tp rank, where the pipeline leaves the node
    reduces_tp_gradients_first           where weights lie sharded, a gradient that is partial over tp is summed over it by itself,
                                         whole, before the data axes reduce it (DTensor); else its shard is, once a step
    gathers_row_bias_gradients           the bias of a row-parallel linear takes the gradient that the product gathers, whole on every
                                         tp rank (DTensor); else that of its part of the sequence, summed over tp like a norm's (Megatron)
    pipeline_keeps_parameters            under a pipeline, parameters stay gathered, gradients unreduced until the last microbatch (torch)
    step_time_constant                   once a step: data loading, logging, optimizer launch, Python
    compute_slowdown_under_communication share by which compute slows while communication overlaps it
    optimizer_bytes_factor               optimizer traffic over the minimum (fused 1, foreach more)
    gradient_pass_bytes                  traffic a parameter of passes over a rank's whole gradients once a step, before ZeRO shards them:
                                         zeroing their buffer, looking for NaN (Megatron)
    gradient_scaling_bytes               the same of dividing them by the number of ranks, where data axes reduce them
    pipeline_keeps_boundaries            a stage has a buffer for each microbatch of a step that it receives, and keeps what it sent until
                                         that microbatch's backward (torch); else two buffers, and what was sent is freed (Megatron)
    recomputes_gated_product             the product of a gated feed-forward is not kept for the projection that reads it: the gate's
                                         backward kernel writes it again (fused SwiGLU of xformers)
    softmax_keeps_float32                unfused attention keeps the softmax in float32 beside its cast (torch), or the cast alone (the
                                         fused kernel of Megatron)
    keeps_low_copies                     products in fewer bits keep the cast copies of what they multiply, and weights have theirs beside
                                         them (TransformerEngine); else what they read is kept as it is, and cast again (torchao)
    keeps_added_rows                     rows that come back from experts stay for the backward of their sum (torch's index_add, which
                                         deterministic runs take)
    keeps_unrotated_qk                   q and k stay as they were before the rotary embedding too: v is cut from the same tensor (Megatron)
    context_form                         how ranks share a sequence (`parallel/context_forms.py`), where it is stated; "": as the framework
                                         does, keys and values gathered
    query_gradient_bytes                 an element of queries that fused attention adds its gradient up in, beside the gradient itself
    loss_form                            how the logits lie in memory (`frameworks/tiles.py`): whole; chunked: a few tokens at a time, and
                                         again in backward; fused: with the product before it, gradients made on the way (Liger)
    tiles_mlp                            dense feed-forwards run over tiles of the sequence, and again in backward
    offloads_checkpoints                 inputs of recomputed layers wait for backward in the host's memory
    offloads_activations                 so does all that layers keep, whatever is recomputed
    offloads_optimizer                   the optimizer's state and its step are the host's, gradients go there (ZeRO-Offload)
    stores_frozen_float32                sharded weights that adapters leave frozen are stored in float32, and cast when they are gathered
    steps_in_backward                    a parameter is updated when its gradient is there, and the gradient is freed
    optimizer_copies                     an optimizer of several kernels holds one tensor as large as a state of all parameters (foreach)
    norms_keep_float32                   RMSNorm written out keeps a float32 copy of its input for backward
    adapter_dropout                      adapters drop a part of their input: a copy and a mask of it are kept
    quantized_rest_float32               next to a quantised base all other weights are cast to float32 (PEFT)
    offloads_parameters                  weights lie in the host's memory and come a layer at a time (ZeRO-Infinity, FSDP's CPU offload)
    redistribution_copies                collectives along an inner dim copy their buffer into one piece first (DTensor)
    places_layers_by_cost                pipeline stages are cut by the layers' and the head's running cost (nanotron); else evenly
    family                               frameworks of one family share code, and weigh as one among frameworks (`lab/generic.py`); "": none
    unknown                              numbers that neither its code nor its runs tell: they say nothing of other frameworks
    runs                                 what of the plans it can run; anything where nothing is said (perfmodel/frameworks/runnable.py)
    uneven_stage_weight                  how far the slowest stage rather than the mean sets the pipeline's pace
    fitted                               runs of one's own that `perfmodel fit` made it from; nothing of one that ships
    """

    name: str
    dropout: bool
    saved_input_layout: str
    fused_cross_entropy: bool
    logit_bytes: float
    loss_peak_bytes: float
    fuses_elementwise: bool
    rms_norm_traffic: float
    rotary_traffic: float
    accumulate_dtype: str
    reduce_dtype: str
    stores_master_weights: bool
    fuses_gradient_accumulation: bool
    gradient_copy_bytes: float
    waiting_gradient_fraction: float
    reserve_factor: float
    delayed_collectives: float
    workspace_bytes: float
    framework_bytes: float
    zero2_stores_shards: bool
    reduces_each_microbatch: bool
    pipeline_reduces_each_microbatch: bool
    bucket_bytes: float
    parameter_unit: str
    overlaps_gradients: tuple[int, ...]
    exposed_scatter_fraction: float
    exposed_gradient_fraction: float
    prefetches_parameters: bool
    tp_overlap_fraction: float
    tp_backward_overlap_fraction: float
    attention_kernel: str
    attention_rate_fraction: float
    matmul_rate_fraction: float
    fp8_matmul_rate_fraction: float
    context_chunks: str
    context_attention_rate_fraction: float
    pp_overlap: bool
    scatters_pipeline_sends: bool
    hides_exchanges: bool
    hides_shared_experts: bool
    sends_low_rows: bool
    gathers_low_weights: bool
    recompute_stops_early: bool
    reduces_tp_gradients_first: bool
    gathers_row_bias_gradients: bool
    pipeline_keeps_parameters: bool
    host_launch_time: float
    host_layer_time_per_tp_across_nodes: float
    step_time_constant: float
    compute_slowdown_under_communication: float
    optimizer_bytes_factor: float
    pipeline_keeps_boundaries: bool
    softmax_keeps_float32: bool
    keeps_unrotated_qk: bool
    keeps_low_copies: bool
    keeps_added_rows: bool
    redistribution_copies: bool
    places_layers_by_cost: bool
    uneven_stage_weight: float
    default_attention: str
    source: str
    gradient_pass_bytes: float = 0.0
    gradient_scaling_bytes: float = 0.0
    delays_weight_gradients: bool = False
    recomputes_gated_product: bool = False
    permutes_in_exchange: bool = False
    fuses_experts: bool = False
    adds_expert_bias_apart: bool = False
    pads_expert_rows: bool = False
    graph_scope: tuple[str, ...] = ()
    release: str = ""
    publish_factor: float = 1.0
    context_form: str = ""
    query_gradient_bytes: float = 0.0
    loss_form: str = WHOLE_LOSS
    tiles_mlp: bool = False
    offloads_checkpoints: bool = False
    offloads_activations: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    stores_frozen_float32: bool = False
    steps_in_backward: bool = False
    optimizer_copies: bool = False
    norms_keep_float32: bool = False
    adapter_dropout: bool = False
    quantized_rest_float32: bool = False
    runs: Runs = ANYTHING
    fitted: FittedTo = NOTHING
    family: str = ""
    unknown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.saved_input_layout not in ("consumer", "producer"):
            raise InputError(f"saved_input_layout={self.saved_input_layout}: must be consumer or producer; correct the profile {self.name}")
        if self.parameter_unit not in ("layer", "tensor"):
            raise InputError(f"parameter_unit={self.parameter_unit}: must be layer or tensor; correct the profile {self.name}")
        if self.attention_kernel not in ATTENTION_KERNELS:
            rule = f"must be one of {', '.join(ATTENTION_KERNELS)}"
            raise InputError(f"attention_kernel={one_line(self.attention_kernel)}: {rule}; correct the profile {self.name}")
        for scope in self.graph_scope:
            if scope not in GRAPH_SCOPES:
                raise bad_field(
                    "graph_scope", one_line(scope), f"must be one of {', '.join(GRAPH_SCOPES)}", f"correct the profile {self.name}"
                )
        if self.context_chunks not in CONTEXT_CHUNKS:
            rule = f"must be {' or '.join(CONTEXT_CHUNKS)}"
            raise InputError(f"context_chunks={self.context_chunks}: {rule}; correct the profile {self.name}")
        if self.context_form:
            read_context_form(self.context_form, "context_form")
        if self.loss_form not in LOSS_FORMS:
            raise bad_field("loss_form", one_line(self.loss_form), f"must be {', '.join(LOSS_FORMS)}", f"correct the profile {self.name}")
        if self.delays_weight_gradients and not self.hides_exchanges:
            raise InputError(f"delays_weight_gradients=true: needs hides_exchanges=true; correct the profile {self.name}")
        for field in fields(self):
            value = getattr(self, field.name)
            least, most = bounds_of(field.name) if str(field.type) == "float" else (0.0, 0.0)
            if str(field.type) == "float" and not least <= value <= most:
                raise bad_field(
                    field.name,
                    value,
                    f"must be {'positive, ' if least > 0 else ''}from {least:g} to {most:g}",
                    f"correct the profile {self.name}",
                )
        for name in ("accumulate_dtype", "reduce_dtype"):
            if getattr(self, name) not in ("fp32", "compute"):
                raise InputError(f"{name}={getattr(self, name)}: must be fp32 or compute; correct the profile {self.name}")

    def not_runnable_reason(self, plan: Plan) -> str:
        """Why the framework cannot run this plan; empty if it can."""
        return not_runnable_reason(plan, framework_named(self.name), self.runs, balanced_context=self.context_chunks == HEAD_TAIL)

    def pads_rows(self, dispatcher: Dispatcher) -> bool:
        """Whether a pass of its own pads the rows of experts for products in few bits."""
        is_exchanged = self.permutes_in_exchange and dispatcher is Dispatcher.FLEX
        return self.pads_expert_rows and not is_exchanged and not self.fuses_experts

    def exposed_share(self, zero: int) -> float:
        """Of a gradient reduction once a step what could hide and does not: of whole gradients at ZeRO stage 0, of scattered ones above.
        Those of stage 3 leave with their unit of parameters, wherever it lies in backward."""
        return 0.0 if zero == ZeroStage.PARAMETERS else min(self.exposed_gradient_fraction + self.late_share(zero), 1.0)

    def late_share(self, zero: int) -> float:
        """Of scattered gradients that could hide what waits for the end of backward."""
        return self.exposed_scatter_fraction if zero in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS) else 0.0

    @property
    def has_host_floor(self) -> bool:
        return max(self.host_launch_time, self.host_layer_time_per_tp_across_nodes) > 0


def list_profiles() -> list[str]:
    return framework_names()


#: `nemo@26.06`: a framework and its release.
_RELEASED = re.compile(r"^([\w.-]+)@([\d.]+)(?=$|\+)", re.ASCII)


def load_profile(name: str | Path) -> ExecutionProfile:
    """The profile of that name, or in that file; `NAME+compile+fused_rmsnorm=false`: with these settings (docs/settings.md); `NAME@26.06`:
    of that release."""
    from perfmodel.foundation.files import read_yaml

    check_path(name, "profile")
    name = _RELEASED.sub(rf"\1{SEPARATOR}release=\2", str(name))
    settings, whole = settings_in(str(name)), framework_named(str(name))
    if settings:
        return with_stated(load_profile(whole), settings)
    is_file = Path(whole).suffix in (".yaml", ".yml")
    shipped = None if is_file else shipped_fields(whole)
    if shipped is not None:
        return _profile_of(pickle.dumps(shipped), whole)
    if not is_file or not os.path.exists(whole):  # pathlib raises for a name too long or a folder that may not be entered
        known = f"{suggest(one_line(whole), list_profiles())} (`perfmodel profiles` lists them; a path works too)"
        raise InputError(f"profile={one_line(whole, 200)}: not known{known}")
    path = Path(whole)
    return _profile_of(pickle.dumps(_with_base(flattened(read_yaml(path), where=whole), path)), whole)


@lru_cache(maxsize=64)
def _profile_of(fields_pickled: bytes, where: str) -> ExecutionProfile:
    """Return `profile_from_dict` of the fields, read once while the files stay as they are."""
    return profile_from_dict(pickle.loads(fields_pickled), where=where)


def _with_base(data: dict[str, Any], path: Path, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """The contents of a file over those of its `base`: a shipped profile, or a file beside it."""
    from perfmodel.foundation.files import read_yaml

    if "base" not in data:
        return data
    base = data["base"]
    if not isinstance(base, str) or base in below:
        raise bad_field("base", shown(base), "must be the name or the path of another profile", f"correct {path}")
    own = path.parent / base
    is_file = own.suffix in (".yaml", ".yml")
    under = None if is_file else shipped_fields(base)
    if is_file and os.path.exists(own):
        under = _with_base(flattened(read_yaml(own), where=str(own)), own, (*below, base))
    if under is None:
        raise InputError(f"{path}: base={one_line(base, 200)}: not known{suggest(one_line(base), list_profiles())}")
    return {key: value for key, value in under.items() if key not in _OWN} | {key: value for key, value in data.items() if key != "base"}


def profile_from_dict(data: Any, *, where: str = "profile") -> ExecutionProfile:
    """The profile of a file's contents. Raises InputError naming every field that is wrong."""
    from perfmodel.foundation.files import listed

    if not isinstance(data, dict):
        raise InputError(f"{where}: must be a mapping of fields; see strategies/frameworks for examples")
    known = {field.name: str(field.type) for field in fields(ExecutionProfile)}
    faults = [f"{one_line(key)}: unknown field{suggest(one_line(key), known)}; remove it or correct it" for key in data if key not in known]
    missing = [key for key in known if key not in data and key not in _OPTIONAL]
    faults += [f"{key}: is missing; give it, or a `base:` to take it from (`perfmodel fit` and docs/files.md show one)" for key in missing]
    values: dict[str, Any] = {}
    for key in known.keys() & data.keys():
        try:
            read = _READERS.get(key)
            values[key] = _value(key, known[key], data[key]) if read is None else read(data[key])
        except InputError as error:
            faults.append(str(error))
    if SEPARATOR in str(values.get("name", "")):
        faults.append(f"name={one_line(values['name'])}: holds a {SEPARATOR}, which stands before a setting; take another name")
    if faults:
        raise InputError(f"{where}: {listed(faults)}")
    return ExecutionProfile(**values)


def _zero_stages(value: object) -> tuple[int, ...]:
    """As a list, or yes or no for all of them."""
    if isinstance(value, bool):
        return ZERO_STAGES if value else ()
    return listed_choices(value, ZERO_STAGES, "overlaps_gradients")


def _names(value: object) -> tuple[str, ...]:
    known = [field.name for field in fields(ExecutionProfile) if str(field.type) == "float"]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise bad_field("unknown", shown(value), "must be a list of fields", "write [host_launch_time]")
    for name in value:
        if name not in known:
            raise bad_field("unknown", one_line(name), f"is no number of a profile{suggest(one_line(name), known)}", "correct it")
    return tuple(value)


#: What reads the fields that are groups of their own.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "runs": runs_from_dict,
    "overlaps_gradients": _zero_stages,
    "unknown": _names,
    "graph_scope": lambda data: listed_choices(data, GRAPH_SCOPES, "graph_scope"),
    "fitted": lambda data: record_from_data(FittedTo, data, where="fitted"),
}


def save_profile(profile: ExecutionProfile, path: str | Path) -> None:
    """Write a profile's file, whole or not at all; `load_profile` gives back an equal one."""
    write_atomically(path, profile_text(profile))


def profile_text(profile: ExecutionProfile) -> str:
    from perfmodel.foundation.files import dump_yaml

    # sizes a parameter or a logit are no sizes of a thing: plain numbers, as the shipped files have them
    data = {
        name: value if name in _SIZES or not name.endswith("_bytes") else getattr(profile, name)
        for name, value in record_to_data(profile).items()
    }
    groups = {name: value for name, value in data.items() if isinstance(value, (dict, list))}
    plain = {name: 0.0 if getattr(profile, name) == 0.0 and isinstance(value, str) else value for name, value in data.items()}
    flat = dump_yaml({name: value for name, value in plain.items() if name not in groups})
    return flat + (dump_yaml(groups, inline_leaves=True) if groups else "")


def _value(key: str, kind: str, value: object) -> Any:
    from perfmodel.foundation.units import parse_quantity

    if kind == "bool":
        if not isinstance(value, bool):
            raise bad_field(key, shown(value), "must be true or false", "write one of them")
        return value
    if kind == "str":
        if not isinstance(value, str):
            raise bad_field(key, shown(value), "must be a text", "correct it")
        return value
    if isinstance(value, str):
        value = parse_quantity(value, unit_of(key), field=key)
    least, most = bounds_of(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise bad_field(key, shown(value), f"must be a number from {least:g} to {most:g}", "correct it")
    return float(value)


def bounds_of(key: str) -> tuple[float, float]:
    """What a number of a profile may be: shares lie in 0..1, the rest where no time or size leaves what can be counted."""
    if key in _SHARES:
        return 0.0, 1.0
    if "rate_fraction" in key:
        return 0.01, 100.0
    if key in _LEAST_1:
        return 1.0, 1000.0
    return 0.0, 1e15 if key in _SIZES else 3600.0 if "time" in key else 1e9


_OPTIONAL = frozenset(
    {
        "runs",
        "family",
        "unknown",
        "fitted",
        "gradient_pass_bytes",
        "gradient_scaling_bytes",
        "delays_weight_gradients",
        "recomputes_gated_product",
        "permutes_in_exchange",
        "fuses_experts",
        "adds_expert_bias_apart",
        "pads_expert_rows",
        "graph_scope",
        "release",
        "publish_factor",
        "context_form",
        "query_gradient_bytes",
        "loss_form",
        "tiles_mlp",
        "offloads_checkpoints",
        "offloads_activations",
        "offloads_optimizer",
        "offloads_parameters",
        "stores_frozen_float32",
        "steps_in_backward",
        "optimizer_copies",
        "norms_keep_float32",
        "adapter_dropout",
        "quantized_rest_float32",
    }
)
#: What a profile does not inherit.
_OWN = frozenset({"name", "source", "unknown", "fitted", "release"})
_SHARES = frozenset(
    {
        "waiting_gradient_fraction",
        "exposed_gradient_fraction",
        "exposed_scatter_fraction",
        "tp_overlap_fraction",
        "tp_backward_overlap_fraction",
        "uneven_stage_weight",
    }
)
_LEAST_1 = frozenset({"reserve_factor", "optimizer_bytes_factor"})
_SIZES = frozenset({"workspace_bytes", "framework_bytes", "bucket_bytes"})
