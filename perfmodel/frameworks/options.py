"""Options of a training framework, in groups by their readers.

`rates` change the machine that prices a program, and `timing` is read when the times of a step are combined. Programs are compiled from the
other groups (`ExecutionProfile.compiled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.grouped import group_of
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.parallel.choices import LOSS_FORMS, WHOLE_LOSS, read_context_form
from perfmodel.parallel.compression import NO_COMPRESSION, compression_of

#: Parts of a layer that may be launched as CUDA graphs (Megatron-LM's --cuda-graph-scope).
GRAPH_SCOPES = ("attn", "mamba", "moe_router", "moe_preprocess", "mlp")
CONTEXT_CHUNKS = HEAD_TAIL, CONTIGUOUS = ("head_tail", "contiguous")


def bounds_of(key: str) -> tuple[float, float]:
    """Return the bounds of a number of a profile: 0 to 1 for shares, wide limits for times and sizes."""
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
    """Kernels of a step: fusion, attention, the loss.

    dropout                          dropout operators run (in training, with the model's probability)
    fused_cross_entropy              softmax, loss and its gradient are one kernel: no separate fp32 copy of the logits
    logit_bytes                      memory traffic of the loss per logit, forward plus backward
    fuses_elementwise                chains of elementwise operators are one kernel, with intermediate results in registers
    rms_norm_traffic                 memory traffic of RMSNorm over that of one fused kernel; unfused: `parallel/eager.py`
    rotary_traffic                   memory traffic of rotary embeddings over that of one fused kernel; unfused: `parallel/eager.py`
    fuses_gradient_accumulation      the weight-gradient matmul adds into the accumulator itself
    redistribution_copies            collectives along an inner dim first copy their buffer to contiguous memory (DTensor)
    default_attention                attention of a plan that names none: flash or unfused
    attention_kernel                 generation of its fused attention (flash1, flash2, flash3, cudnn); the chip's calibration has its rate
                                     relative to the calibrated kernel (`attention_generations`)
    context_attention_rate_fraction  rate of its fused attention with queries sharded over ranks, over that without (smaller blocks, merges
                                     of partial results)
    fused_loss_keeps_float32         a fused loss saves traffic, not memory: the softmax stays in float32 for its gradient (Megatron-Core,
                                     fusions/fused_cross_entropy.py)
    fuses_experts                    products of experts apply the activation and casts in the same kernel
    adds_expert_bias_apart           biases of experts' outputs are added expert by expert, weighted, in float32, and the pieces are
                                     concatenated (torch.cat); else the product before adds them
    pads_expert_rows                 rows of experts are copied to padded sizes for low-precision products, and back, unless the kernels of
                                     the exchange pad them (Transformer Engine's Fp8Padding)
    loss_form                        storage of the logits (`frameworks/tiles.py`): whole; chunked: a few tokens at a time, recomputed in
                                     backward; fused: with the product before, gradients are computed in the same pass (Liger)
    tiles_mlp                        dense feed-forwards run over tiles of the sequence and are recomputed in backward
    graph_scope                      parts of a layer that are launched as CUDA graphs, while the host launches the others: attn, mamba,
                                     moe_router, moe_preprocess, mlp (Megatron-LM's --cuda-graph-scope)
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

    saved_input_layout        layout in which a redistributed input of a matmul or of attention is saved: consumer (gathered) or producer
                              (gathered again in backward)
    loss_peak_bytes           peak memory of the loss per logit, in addition to saved tensors and logits: float32 gradient, copies
    softmax_keeps_float32     unfused attention saves the softmax in float32 and its cast (torch); else only the cast (Megatron's kernel)
    keeps_unrotated_qk        q and k before the rotary embedding are saved too, because v is a part of the same tensor (Megatron)
    keeps_low_copies          low-precision products save the cast copies of their inputs, and weights have cast copies too
                              (TransformerEngine); else inputs are saved without cast, and cast again (torchao)
    keeps_added_rows          rows that return from experts are saved for the backward of their sum (torch's index_add, which deterministic
                              runs use)
    recompute_stops_early     recomputation ends with the last tensor that backward needs, without the last collectives of a layer and the
                              last product of unfused attention (torch); else it runs to the end (Megatron)
    query_gradient_bytes      bytes per element of the buffer in which fused attention accumulates the gradient of queries, in addition to
                              the gradient itself
    recomputes_gated_product  the product of a gated feed-forward is not saved for the projection that reads it: the gate's backward kernel
                              recomputes it (fused SwiGLU of xformers)
    norms_keep_float32        unfused RMSNorm saves a float32 copy of its input for backward
    adapter_dropout           adapters apply dropout to their input: a copy and a mask of it are saved
    offloads_checkpoints      inputs of recomputed layers are in host memory until backward
    offloads_activations      all saved activations are in host memory until backward, with any recomputation
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
    """Weights, gradients and optimizer state: copies, dtypes, offloading, passes over them.

    accumulate_dtype        dtype of accumulated gradients ("fp32" or "compute")
    stores_master_weights   the stored weights are the master copy, and operators read a cast (torch); else both are stored (Megatron)
    gradient_copy_bytes     bytes per parameter in addition to the accumulators: gradients as produced, in buckets, if there are replicas to
                            reduce over
    zero2_stores_shards     ZeRO-2 stores parameter shards and gathers them every micro-batch (torch), or stores full copies (DeepSpeed)
    stores_frozen_float32   sharded weights that adapters leave frozen are stored in float32, and cast when they are gathered
    steps_in_backward       a parameter is updated as soon as its gradient is computed, and the gradient is freed
    optimizer_copies        an optimizer of several kernels holds a temporary tensor as large as one state of all parameters (foreach)
    quantized_rest_float32  with a quantised base, all other weights are cast to float32 (PEFT)
    offloads_optimizer      the host holds the optimizer state and runs the optimizer step; gradients are sent to it (ZeRO-Offload)
    offloads_parameters     weights are in host memory and are loaded layer by layer (ZeRO-Infinity, FSDP's CPU offload)
    gradient_pass_bytes     traffic per parameter of passes over a rank's full gradients once a step, before ZeRO shards them: zeroing their
                            buffer, checking for NaN (Megatron)
    gradient_scaling_bytes  the same for dividing them by the number of ranks, if data axes reduce them
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

    waiting_gradient_fraction  share of the gradients of a micro-batch that the allocator holds in addition to the peak, because they are
                               accumulated only at the end of the micro-batch
    reserve_factor             reserved over allocated memory, for tensors that are allocated and freed within a step
    delayed_collectives        tensor-parallel collectives whose tensors, full and sharded, the allocator cannot reuse yet, because the
                               host runs that far ahead of the chip (torch's record_stream)
    workspace_bytes            workspaces of cuBLAS and of kernel libraries, inside the allocator
    framework_bytes            memory of a run in addition to its allocator and the context: NCCL's buffers, the allocator's spread
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
    """Collectives over data, tensor-parallel and context-parallel ranks, and their overlap with compute.

    reduce_dtype                      dtype of reduced gradients ("fp32" or "compute")
    reduces_each_microbatch           gradients are reduced to their accumulator layout after every micro-batch, not once a step
    pipeline_reduces_each_microbatch  in a pipeline without ZeRO, gradients are reduced after every micro-batch too (nanotron)
    bucket_bytes                      size of a gradient bucket, counted in the parameters' dtype and in whole tensors; 0: one collective
                                      per unit
    parameter_unit                    parameters of one gather or publish: layer or tensor
    overlaps_gradients                ZeRO stages whose gradient reduction overlaps with the last backward; others wait for its end
    prefetches_parameters             the gather of the next unit overlaps with the compute of this one
    context_chunks                    chunks of the sequence on a context-parallel rank: head_tail (the r-th chunk of 2 cp from either end:
                                      equal causal work) or contiguous (the last rank does 2 - 1/cp of the mean)
    gathers_low_weights               weights are gathered and stored in the precision of their products alone (TransformerEngine's primary
                                      weights, torchao)
    reduces_tp_gradients_first        with sharded weights, a full gradient that is partial over tp is all-reduced over tp by itself, before
                                      the data axes reduce it (DTensor); else its shard is, once a step
    gathers_row_bias_gradients        the bias of a row-parallel linear takes the gradient that the product gathers, complete on every tp
                                      rank (DTensor); else that of its part of the sequence, summed over tp like a norm's (Megatron)
    context_form                      stated form of context parallelism (`parallel/choices.py`); "": that of the framework, keys and
                                      values gathered
    gradient_compression              stated compression of gradients that replicas all-reduce (`parallel/compression.py`)
    flat_rings                        collectives between nodes are flat rings, without trees or hierarchical algorithms
    """

    reduce_dtype: str
    reduces_each_microbatch: bool
    pipeline_reduces_each_microbatch: bool
    bucket_bytes: float
    parameter_unit: str
    overlaps_gradients: tuple[int, ...]
    prefetches_parameters: bool
    context_chunks: str
    gathers_low_weights: bool
    reduces_tp_gradients_first: bool
    gathers_row_bias_gradients: bool
    context_form: str = ""
    flat_rings: bool = False
    gradient_compression: str = str(NO_COMPRESSION)

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_word("parameter_unit", self.parameter_unit, ("layer", "tensor"))
        _check_word("reduce_dtype", self.reduce_dtype, ("fp32", "compute"))
        _check_word("context_chunks", self.context_chunks, CONTEXT_CHUNKS)
        if self.context_form:
            read_context_form(self.context_form, "context_form")
        compression_of(self.gradient_compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """Exchanges of rows with experts, and their overlap with compute.

    hides_exchanges          the exchanges of rows with experts of one micro-batch overlap with the passes of another
    hides_shared_experts     operators of a layer that neither lead to exchanged rows nor depend on them overlap with the exchange
    sends_low_rows           rows are sent to experts in the precision of their products, if the recipe supports it (DeepEP)
    delays_weight_gradients  weight gradients of a block are computed separately from input gradients, overlapped with exchanges; needs
                             hides_exchanges (Megatron's --delay-wgrad-compute, DualPipe)
    permutes_in_exchange     the kernels of the dispatcher `flex` sort rows by expert, and back (HybridEP); else a separate pass does
                             (DeepEP)
    """

    hides_exchanges: bool
    hides_shared_experts: bool
    sends_low_rows: bool
    delays_weight_gradients: bool = False
    permutes_in_exchange: bool = False

    def __post_init__(self) -> None:
        if self.delays_weight_gradients and not self.hides_exchanges:
            raise InputError("delays_weight_gradients=true: needs hides_exchanges=true; correct the profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Pipeline stages: placement of layers, memory, sends between stages.

    pp_overlap                 pipeline sends overlap with compute in the steady state
    scatters_pipeline_sends    activations replicated over tp are sent in tp parts and gathered (Megatron's scatter-gather)
    places_layers_by_cost      layers are placed on stages by the cumulative cost of layers and head (nanotron); else evenly
    pipeline_keeps_boundaries  a stage has a receive buffer for each micro-batch of a step, and keeps sent tensors until that micro-batch's
                               backward (torch); else two buffers, and sent tensors are freed (Megatron)
    pipeline_keeps_parameters  in a pipeline, parameters stay gathered and gradients unreduced until the last micro-batch (torch), those
                               of at most `MOST_GATHERED` virtual stages of a rank
    sends_whole_gradients      each tp rank sends the whole gradient of the boundary, even if activations are sent in tp parts
    sends_attention_mask       pipeline stages send the attention mask with the activations, in 16 bits (DeepSpeed's GPT2ModelPipe)
    """

    pp_overlap: bool
    scatters_pipeline_sends: bool
    places_layers_by_cost: bool
    pipeline_keeps_boundaries: bool
    pipeline_keeps_parameters: bool
    sends_whole_gradients: bool = False
    sends_attention_mask: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RateOptions:
    """Rates relative to the chip's calibration: they change the machine that prices a program, not the program.

    matmul_rate_fraction      rate of its matrix multiplies in a long run over the calibrated one (layouts of its products, its library,
                              concurrent kernels)
    attention_rate_fraction   rate of its fused attention over that of the generation
    fp8_matmul_rate_fraction  further factor on the rate of matrix multiplies in fp8
    """

    matmul_rate_fraction: float
    attention_rate_fraction: float
    fp8_matmul_rate_fraction: float

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Numbers that combine the times of a step: exposed shares, host times, optimizer traffic.

    exposed_gradient_fraction             exposed share of a gradient reduction that could overlap with backward
    exposed_scatter_fraction              share of an overlappable reduce-scatter (ZeRO-1 and 2) that waits for the end of backward
    tp_overlap_fraction                   overlapped share of tensor-parallel communication
    tp_backward_overlap_fraction          the same of collectives in backward that have an independent matmul (Megatron: re-gathers and
                                          input gradients, while the input's and the weight's gradient are computed)
    compute_slowdown_under_communication  slowdown of compute while communication overlaps with it, as a share
    uneven_stage_weight                   weight of the slowest stage, against the mean, in the pace of the pipeline
    host_launch_time                      host time per kernel or collective in backward; in forward it is twice that. A pass takes at least
                                          the time of its launches (`cost/program.py` counts them)
    host_layer_time_per_tp_across_nodes   further host time per layer and tp rank, if the pipeline crosses nodes
    step_time_constant                    time once per step: data loading, logging, optimizer launch, Python
    optimizer_bytes_factor                optimizer traffic over the minimum (fused 1, foreach more)
    publish_factor                        time of the all-gathers of updated parameters after the step (ZeRO-1), over that of the
                                          collectives alone
    batches_by_speed                      replicas on faster chips run more micro-batches; else all run the same number
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
        "exchanges": ExchangeOptions,
        "stages": StageOptions,
        "rates": RateOptions,
        "timing": TimingOptions,
    }
)
"""Field of a profile -> its group of options."""

GROUP_OF: Mapping[str, str] = group_of(GROUPS)
"""Option -> its group."""

KIND_OF: Mapping[str, str] = MappingProxyType(
    {option.name: str(option.type) for group_type in GROUPS.values() for option in fields(group_type)}
)
"""Option -> its type, as text."""


OPTIONAL = frozenset(
    name for group_type in GROUPS.values() for name, option in group_type.__dataclass_fields__.items() if option.default is not MISSING
)
"""Options that a file may leave out."""
