"""Options of a training framework, in groups by what reads them.

`rates` change the machine that prices a program, `timing` is read when the times of a step are put together; programs are compiled from the
other groups (`ExecutionProfile.compiled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.frameworks.grouped import group_of
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.parallel.context_forms import read_context_form
from perfmodel.parallel.loss_forms import LOSS_FORMS, WHOLE_LOSS

#: Parts of a layer that CUDA graphs may launch by themselves (Megatron-LM's --cuda-graph-scope).
GRAPH_SCOPES = ("attn", "mamba", "moe_router", "moe_preprocess", "mlp")
CONTEXT_CHUNKS = HEAD_TAIL, CONTIGUOUS = ("head_tail", "contiguous")


def bounds_of(key: str) -> tuple[float, float]:
    """Bounds of a number of a profile: 0 to 1 for shares, wide limits for times and sizes."""
    if key in _SHARES:
        return 0.0, 1.0
    if "rate_fraction" in key:
        return 0.01, 100.0
    if key in _LEAST_1:
        return 1.0, 1000.0
    return 0.0, 1e15 if key in SIZES else 3600.0 if "time" in key else 1e9


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
SIZES = frozenset({"workspace_bytes", "framework_bytes", "bucket_bytes"})


def check_numbers(options: Any) -> None:
    """Raise InputError for a number of a group that is out of its bounds."""
    for option in fields(options):
        if str(option.type) == "float":
            value, (least, most) = getattr(options, option.name), bounds_of(option.name)
            if not least <= value <= most:
                rule = f"must be {'positive, ' if least > 0 else ''}from {least:g} to {most:g}"
                raise bad_field(option.name, value, rule, "correct the profile")


def _check_word(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise bad_field(name, one_line(value), f"must be one of {', '.join(known)}", "correct the profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Which kernels a step runs: fused or written out, attention, the loss.

    dropout                          dropout operators run (in training, with the model's probability)
    fused_cross_entropy              softmax, loss and its gradient in one kernel: no separate fp32 copy of the logits
    logit_bytes                      memory traffic of the loss, forward and backward together, a logit
    fuses_elementwise                chains of elementwise operators are one kernel that keeps what is between in registers
    rms_norm_traffic                 memory traffic of these operators over that of one fused kernel; written out: `parallel/eager.py`
    rotary_traffic                   memory traffic of these operators over that of one fused kernel; written out: `parallel/eager.py`
    fuses_gradient_accumulation      the weight-gradient matmul adds into the accumulator itself
    redistribution_copies            collectives along an inner dim copy their buffer into one piece first (DTensor)
    default_attention                attention of a plan that names none: flash or unfused
    attention_kernel                 generation of its fused attention (flash1, flash2, flash3, cudnn): what an older one reaches of the
                                     calibrated kernel's rate is the chip's (`attention_generations` of its calibration)
    context_attention_rate_fraction  rate of its fused attention where ranks share the queries over the same kernel's where they do not
                                     (smaller blocks, partial results that are merged)
    fused_loss_keeps_float32         a fused loss saves traffic, not memory: the softmax stays in float32 and its gradient is made from it
                                     (Megatron-Core, fusions/fused_cross_entropy.py)
    fuses_experts                    products of experts apply the activation and cast as they write (one kernel)
    adds_expert_bias_apart           the bias of experts' outputs is added expert by expert, weighted, in float32, and the pieces are put
                                     together again (torch.cat); else by the product before it
    pads_expert_rows                 rows of experts are copied to multiples that products in few bits take, and back, where the kernels of
                                     the exchange do not pad them (Transformer Engine's Fp8Padding)
    loss_form                        how the logits lie in memory (`frameworks/tiles.py`): whole; chunked: a few tokens at a time, and again
                                     in backward; fused: with the product before it, gradients made on the way (Liger)
    tiles_mlp                        dense feed-forwards run over tiles of the sequence, and again in backward
    graph_scope                      parts of a layer that CUDA graphs launch, where the host launches the others: attn, mamba, moe_router,
                                     moe_preprocess, mlp (Megatron-LM's --cuda-graph-scope)
    """

    dropout: bool
    fused_cross_entropy: bool
    logit_bytes: float
    fuses_elementwise: bool
    rms_norm_traffic: float
    rotary_traffic: float
    fuses_gradient_accumulation: bool
    redistribution_copies: bool
    default_attention: str
    attention_kernel: str
    context_attention_rate_fraction: float
    fused_loss_keeps_float32: bool = False
    fuses_experts: bool = False
    adds_expert_bias_apart: bool = False
    pads_expert_rows: bool = False
    loss_form: str = WHOLE_LOSS
    tiles_mlp: bool = False
    graph_scope: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_word("attention_kernel", self.attention_kernel, ATTENTION_KERNELS)
        _check_word("loss_form", self.loss_form, LOSS_FORMS)
        for scope in self.graph_scope:
            _check_word("graph_scope", scope, GRAPH_SCOPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationOptions:
    """Tensors that the forward pass saves for backward.

    saved_input_layout        where a redistributed input of a matmul or of attention is saved: consumer (gathered) or producer (gathered
                              again)
    loss_peak_bytes           memory at the peak of the loss beyond saved tensors and logits, a logit: float32 gradient, copies
    softmax_keeps_float32     unfused attention keeps the softmax in float32 beside its cast (torch), or the cast alone (the fused kernel of
                              Megatron)
    keeps_unrotated_qk        q and k stay as they were before the rotary embedding too: v is cut from the same tensor (Megatron)
    keeps_low_copies          products in fewer bits keep the cast copies of what they multiply, and weights have theirs beside them
                              (TransformerEngine); else what they read is kept as it is, and cast again (torchao)
    keeps_added_rows          rows that come back from experts stay for the backward of their sum (torch's index_add, which deterministic
                              runs take)
    recompute_stops_early     recomputation ends with the last tensor that backward needs, without the last collectives of a layer and the
                              last product of unfused attention (torch); else it runs to the end (Megatron)
    query_gradient_bytes      an element of queries that fused attention adds its gradient up in, beside the gradient itself
    recomputes_gated_product  the product of a gated feed-forward is not kept for the projection that reads it: the gate's backward kernel
                              writes it again (fused SwiGLU of xformers)
    norms_keep_float32        RMSNorm written out keeps a float32 copy of its input for backward
    adapter_dropout           adapters drop a part of their input: a copy and a mask of it are kept
    offloads_checkpoints      inputs of recomputed layers wait for backward in the host's memory
    offloads_activations      so does all that layers keep, whatever is recomputed
    """

    saved_input_layout: str
    loss_peak_bytes: float
    softmax_keeps_float32: bool
    keeps_unrotated_qk: bool
    keeps_low_copies: bool
    keeps_added_rows: bool
    recompute_stops_early: bool
    query_gradient_bytes: float = 0.0
    recomputes_gated_product: bool = False
    norms_keep_float32: bool = False
    adapter_dropout: bool = False
    offloads_checkpoints: bool = False
    offloads_activations: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_word("saved_input_layout", self.saved_input_layout, ("consumer", "producer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """Weights, gradients and optimizer state: copies, dtypes, where they lie, passes over them.

    accumulate_dtype        gradients as accumulated / as reduced ("fp32" or "compute")
    stores_master_weights   the weights that stay are the master copy, operators read a cast (torch); else both stay (Megatron)
    gradient_copy_bytes     what stays beside the accumulators, a parameter: gradients as produced, in buckets, where there are replicas to
                            reduce over
    zero2_stores_shards     ZeRO-2 keeps parameter shards and gathers every microbatch (torch), or whole copies (DeepSpeed)
    stores_frozen_float32   sharded weights that adapters leave frozen are stored in float32, and cast when they are gathered
    steps_in_backward       a parameter is updated when its gradient is there, and the gradient is freed
    optimizer_copies        an optimizer of several kernels holds one tensor as large as a state of all parameters (foreach)
    quantized_rest_float32  next to a quantised base all other weights are cast to float32 (PEFT)
    offloads_optimizer      the optimizer's state and its step are the host's, gradients go there (ZeRO-Offload)
    offloads_parameters     weights lie in the host's memory and come a layer at a time (ZeRO-Infinity, FSDP's CPU offload)
    gradient_pass_bytes     traffic a parameter of passes over a rank's whole gradients once a step, before ZeRO shards them: zeroing their
                            buffer, looking for NaN (Megatron)
    gradient_scaling_bytes  the same of dividing them by the number of ranks, where data axes reduce them
    """

    accumulate_dtype: str
    stores_master_weights: bool
    gradient_copy_bytes: float
    zero2_stores_shards: bool
    stores_frozen_float32: bool = False
    steps_in_backward: bool = False
    optimizer_copies: bool = False
    quantized_rest_float32: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    gradient_pass_bytes: float = 0.0
    gradient_scaling_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_word("accumulate_dtype", self.accumulate_dtype, ("fp32", "compute"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """Memory that is reserved in addition to the tensors of a step.

    waiting_gradient_fraction  gradients as produced wait for the end of their microbatch before they are added: the share of them that the
                               allocator holds beside the peak
    reserve_factor             what its allocator holds over what is in tensors, of all that comes and goes within a step
    delayed_collectives        tensor-parallel collectives whose tensors, whole and cut, the allocator may not use again yet, because the
                               host runs that far ahead of the chip (torch's record_stream)
    workspace_bytes            workspaces of cuBLAS and of kernel libraries, which lie in the allocator
    framework_bytes            what a run needs beside its allocator and the context: NCCL's buffers, the allocator's spread
    """

    waiting_gradient_fraction: float
    reserve_factor: float
    delayed_collectives: float
    workspace_bytes: float
    framework_bytes: float

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationOptions:
    """Which collectives a step issues, and what they may overlap with.

    reduce_dtype                      gradients as accumulated / as reduced ("fp32" or "compute")
    reduces_each_microbatch           gradients leave for their accumulator layout after every microbatch, not once a step
    pipeline_reduces_each_microbatch  under a pipeline, those of weights without ZeRO do so too (nanotron)
    bucket_bytes                      gradients are reduced in buckets of this size, counted in the parameters' dtype and of whole tensors;
                                      0: one collective per unit
    parameter_unit                    what one parameter gather or publish takes along: layer or tensor
    overlaps_gradients                ZeRO stages whose gradients are reduced under the last backward; others wait for its end
    prefetches_parameters             the next unit's gather runs under this unit's compute
    context_chunks                    which part of the sequence a context-parallel rank has: head_tail (the r-th chunk of 2 cp from either
                                      end: equal causal work) or contiguous (the last rank does 2 - 1/cp of the mean)
    pp_overlap                        pipeline sends hide in the steady state
    scatters_pipeline_sends           tp-equal copies at a stage boundary are sent in tp parts and gathered (Megatron's scatter-gather)
    hides_exchanges                   what tokens of one microbatch send to experts and back travels beside another one's passes
    hides_shared_experts              what of a layer neither needs nor makes what is exchanged runs beside it
    sends_low_rows                    rows go to experts in the bits in which they are multiplied, where the recipe can (DeepEP)
    gathers_low_weights               so are weights gathered, and they live in no more (TransformerEngine's primary weights, torchao)
    reduces_tp_gradients_first        where weights lie sharded, a gradient that is partial over tp is summed over it by itself, whole,
                                      before the data axes reduce it (DTensor); else its shard is, once a step
    gathers_row_bias_gradients        the bias of a row-parallel linear takes the gradient that the product gathers, whole on every tp rank
                                      (DTensor); else that of its part of the sequence, summed over tp like a norm's (Megatron)
    context_form                      how ranks share a sequence (`parallel/context_forms.py`), where it is stated; "": as the framework
                                      does, keys and values gathered
    delays_weight_gradients           a block's weight gradients are computed apart from those of its inputs, beside what is exchanged (of
                                      who hides exchanges alone: Megatron's --delay-wgrad-compute, DualPipe)
    permutes_in_exchange              kernels that send tokens once to each place (`flex`) put rows in the order of experts, and back
                                      (HybridEP); else a pass of its own does (DeepEP)
    """

    reduce_dtype: str
    reduces_each_microbatch: bool
    pipeline_reduces_each_microbatch: bool
    bucket_bytes: float
    parameter_unit: str
    overlaps_gradients: tuple[int, ...]
    prefetches_parameters: bool
    context_chunks: str
    pp_overlap: bool
    scatters_pipeline_sends: bool
    hides_exchanges: bool
    hides_shared_experts: bool
    sends_low_rows: bool
    gathers_low_weights: bool
    reduces_tp_gradients_first: bool
    gathers_row_bias_gradients: bool
    context_form: str = ""
    delays_weight_gradients: bool = False
    permutes_in_exchange: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_word("parameter_unit", self.parameter_unit, ("layer", "tensor"))
        _check_word("reduce_dtype", self.reduce_dtype, ("fp32", "compute"))
        _check_word("context_chunks", self.context_chunks, CONTEXT_CHUNKS)
        if self.context_form:
            read_context_form(self.context_form, "context_form")
        if self.delays_weight_gradients and not self.hides_exchanges:
            raise InputError("delays_weight_gradients=true: needs hides_exchanges=true; correct the profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How layers are placed on pipeline stages, and what a stage keeps.

    places_layers_by_cost      pipeline stages are cut by the layers' and the head's running cost (nanotron); else evenly
    pipeline_keeps_boundaries  a stage has a buffer for each microbatch of a step that it receives, and keeps what it sent until that
                               microbatch's backward (torch); else two buffers, and what was sent is freed (Megatron)
    pipeline_keeps_parameters  under a pipeline, parameters stay gathered, gradients unreduced until the last microbatch (torch)
    """

    places_layers_by_cost: bool
    pipeline_keeps_boundaries: bool
    pipeline_keeps_parameters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RateOptions:
    """Rates relative to the chip's calibration: they change the machine that prices a program, not the program.

    matmul_rate_fraction      rate of its matrix multiplies over the calibrated one in a long run (layouts of its products, its library,
                              what runs beside them)
    attention_rate_fraction   rate of its fused attention over that generation's
    fp8_matmul_rate_fraction  the same again of those in fp8
    """

    matmul_rate_fraction: float
    attention_rate_fraction: float
    fp8_matmul_rate_fraction: float

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Numbers that are read when the times of a step are put together: exposed shares, host times, optimizer traffic.

    exposed_gradient_fraction             the share of what could hide there and does not
    exposed_scatter_fraction              the share of a reduce-scatter (ZeRO-1 and 2) that could hide and waits for the end of backward
    tp_overlap_fraction                   share of tensor-parallel communication that hides under compute
    tp_backward_overlap_fraction          the same of those in backward beside which a matmul runs that nothing waits for (Megatron: re-
                                          gathers and input gradients, while the input's and the weight's gradient are computed)
    compute_slowdown_under_communication  share by which compute slows while communication overlaps it
    uneven_stage_weight                   how far the slowest stage rather than the mean sets the pipeline's pace
    host_launch_time                      what its host needs for each kernel or collective of a backward pass, and half of what it needs
                                          for one of a forward pass: a pass takes no less than its launches (`cost/launches.py` counts them)
    host_layer_time_per_tp_across_nodes   more of that for each layer and tp rank, where the pipeline leaves the node
    step_time_constant                    once a step: data loading, logging, optimizer launch, Python
    optimizer_bytes_factor                optimizer traffic over the minimum (fused 1, foreach more)
    publish_factor                        time of the gathers that bring updated parameters back to all ranks after the step (ZeRO-1), over
                                          that of the collectives by themselves
    batches_by_speed                      replicas on faster chips get more microbatches; else each gets as many
    """

    exposed_gradient_fraction: float
    exposed_scatter_fraction: float
    tp_overlap_fraction: float
    tp_backward_overlap_fraction: float
    compute_slowdown_under_communication: float
    uneven_stage_weight: float
    host_launch_time: float
    host_layer_time_per_tp_across_nodes: float
    step_time_constant: float
    optimizer_bytes_factor: float
    publish_factor: float = 1.0
    batches_by_speed: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)


GROUPS: Mapping[str, Any] = MappingProxyType(
    {
        "kernels": KernelOptions,
        "activations": ActivationOptions,
        "state": StateOptions,
        "allocator": AllocatorOptions,
        "communication": CommunicationOptions,
        "stages": StageOptions,
        "rates": RateOptions,
        "timing": TimingOptions,
    }
)
"""The groups by the fields of a profile that hold them."""

GROUP_OF: Mapping[str, str] = group_of(GROUPS)
"""Option -> its group."""

KIND_OF: Mapping[str, str] = MappingProxyType({option.name: str(option.type) for of in GROUPS.values() for option in fields(of)})
"""Option -> its type, as written."""

OPTIONAL = frozenset(name for of in GROUPS.values() for name, option in of.__dataclass_fields__.items() if option.default is not MISSING)
"""Options that a file may leave out."""
