"""Tensor and sequence parallelism with torch's DTensor, with one redistribution per edge of the algebra.

A norm's output is redistributed once for all projections that read it (`PrepareModuleInput` on the attention and on
the MLP). Their gradients are summed while partial and reduced once; torch's per-linear default would reduce each.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from perfmodel.execute.uniform.experts import ExpertMixture, ReplicatedLinear
from perfmodel.execute.uniform.latent import LatentMixer
from perfmodel.execute.uniform.model import Layer, Transformer
from perfmodel.execute.uniform.recurrent import RecurrentMixer
from perfmodel.workload.config import TransformerConfig

#: The dim of [b, s, h] activations that sequence parallelism shards, and the heads dim of [b, s, n, d].
SEQUENCE_DIM, HEAD_DIM = 1, 2


def _layer_styles(config: TransformerConfig, layer: Layer, *, sequence_parallel: bool) -> list[tuple[str, ParallelStyle]]:
    residual = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    styles: list[tuple[str, ParallelStyle]] = []

    def gathered(number: int = 1) -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(residual,) * number, desired_input_layouts=(Replicate(),) * number)

    def row() -> RowwiseParallel:
        # In a parallel block, attention and MLP leave partial sums that are added before one reduction.
        if config.parallel_block:
            return RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        return RowwiseParallel(output_layouts=residual)

    prefix = "branches." if config.parallel_block else ""
    mixer, mlp = (layer.branches.attention, layer.branches.mlp) if config.parallel_block else (layer.mixer, layer.feed_forward)
    mixes = not config.parallel_block and isinstance(mlp, ExpertMixture)
    if sequence_parallel:
        norms = ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")
        styles += [(name, SequenceParallel(sequence_dim=SEQUENCE_DIM)) for name in norms if hasattr(layer, name)]
    if config.parallel_block:
        styles.append(("branches", gathered(1 if config.norms.shared_norm else 2)))
        styles.append(("branches", PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=(residual,))))
    else:
        if mixer is not None and not isinstance(mixer, LatentMixer):
            styles.append(("attention", gathered()))
        if mlp is not None and not mixes:
            styles.append(("mlp", gathered()))
    if mixer is not None:
        styles += [(f"{prefix}attention{name}", style) for name, style in _mixer_styles(config, mixer, residual)]
        output = "out_proj" if isinstance(mixer, RecurrentMixer) else "o_proj"
        styles.append((f"{prefix}attention.{output}", row()))
    if mlp is None:
        return styles
    name = f"{prefix}mlp"
    if mixes:
        # Each rank dispatches its own tokens; shared experts are sharded like any MLP.
        styles += [(f"mlp.{name}", _Table(Replicate())) for name, child in mlp.named_children() if isinstance(child, ReplicatedLinear)]
        if not hasattr(mlp, "shared"):
            return styles
        name = "mlp.shared"
        styles.append((name, gathered()))
    for wide in ("gate_proj", "up_proj"):
        if hasattr(layer.get_submodule(name), wide):
            styles.append((f"{name}.{wide}", ColwiseParallel()))
    is_part = isinstance(mlp, ExpertMixture) and mlp.adds_before_reduction
    styles.append((f"{name}.down_proj", RowwiseParallel(output_layouts=Partial()) if is_part else row()))
    return styles


def _mixer_styles(config: TransformerConfig, mixer: nn.Module, residual: Shard | Replicate) -> list[tuple[str, ParallelStyle]]:
    """Shard the heads of a mixer, without its output product."""
    styles: list[tuple[str, ParallelStyle]] = []
    if isinstance(mixer, LatentMixer):
        # latents are computed from local tokens with replicated weights, and all-gathered for the sharded up-projections of the heads
        for name, module in mixer.named_children():
            if name in ("q_proj", "q_b_proj", "kv_b_proj"):
                # with an indexer, the query latents are all-gathered for it too
                given = Replicate() if name != "kv_b_proj" and hasattr(mixer, "index_q_proj") else residual
                styles.append((f".{name}", ColwiseParallel(input_layouts=given)))
            elif residual.is_shard() and isinstance(module, ReplicatedLinear):
                styles.append((f".{name}", _Table(Replicate())))
            elif residual.is_shard() and name.endswith("norm"):
                styles.append((f".{name}", SequenceParallel(sequence_dim=SEQUENCE_DIM)))
    elif isinstance(mixer, RecurrentMixer):
        # everything is sharded by groups of heads, except a norm weight shared by all heads, whose gradient is partial
        styles.append(("", _Table(Shard(0))))
        for name, _ in mixer.named_children():
            if name.startswith("in_proj"):
                styles.append((f".{name}", ColwiseParallel()))
            elif name != "out_proj":
                styles.append((f".{name}", _Table(Replicate() if name == mixer.shared_norm else Shard(0))))
    else:
        styles += [(f".{name}", ColwiseParallel()) for name in ("q_proj", "k_proj", "v_proj", "q_gate_proj") if hasattr(mixer, name)]
        if config.attention.attention_sinks:
            styles.append(("", _Table(Shard(0))))
        for name in ("q_norm", "k_norm") if config.norms.qk_norm else ():
            # Each rank normalises its own heads: the weight gradient is partial over tp, with or without sequence parallelism.
            styles.append((f".{name}", SequenceParallel(sequence_dim=HEAD_DIM, use_local_output=True)))
    return styles


class _Table(ParallelStyle):
    """Style for parameters as DTensors: an embedding table sharded by rows over tp, or parameters applied to local tokens."""

    def __init__(self, placement: Shard | Replicate) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.data, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut))
        return module


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard heads, MLP and vocabulary over tp; under sequence parallelism the residual stream too."""
    config = model.config
    residual = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    if hasattr(model, "embedding"):
        parallelize_module(model.embedding, mesh, _Table(Shard(0)))
    if model.has_embedding:
        if sequence_parallel and hasattr(model, "position_embedding"):
            parallelize_module(model.position_embedding, mesh, _Table(Replicate()))
        if sequence_parallel and hasattr(model, "embedding_norm"):
            parallelize_module(model.embedding_norm, mesh, SequenceParallel(sequence_dim=SEQUENCE_DIM))
    for layer in (*model.layers.values(), *model.mtp_modules):
        assert isinstance(layer, Layer)
        for path, style in _layer_styles(config, layer, sequence_parallel=sequence_parallel):
            parallelize_module(layer.get_submodule(path), mesh, style)
    for module in model.mtp_modules if sequence_parallel else ():
        for name in ("hidden_norm", "embedding_norm", "final_norm"):
            parallelize_module(module.get_submodule(name), mesh, SequenceParallel(sequence_dim=SEQUENCE_DIM))
        parallelize_module(module.joint_proj, mesh, _Table(Replicate()))
    if model.has_head:
        if sequence_parallel:
            parallelize_module(model.final_norm, mesh, SequenceParallel(sequence_dim=SEQUENCE_DIM))
        parallelize_module(model.lm_head, mesh, ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1)))
        model.tie_weights()


def has_partial_gradient(name: str, parameter: nn.Parameter) -> bool:
    """Return whether this parameter's gradient is a partial sum over tp.

    Replicated DTensors are norm and position weights that each rank applies to its own tokens or heads. The exception is the bias of
    a row-parallel linear: it is added to the reduced sum, and its gradient is complete on every rank.
    """
    if not isinstance(parameter, DTensor) or not parameter.placements[-1].is_replicate():
        return False
    return not name.endswith(("o_proj.bias", "out_proj.bias", "down_proj.bias"))
