"""Random weights and tokens that depend on name and seed only: every shard of every plan starts from the same model."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from perfmodel.execute.local import local_tensor
from perfmodel.execute.uniform.experts import expert_shard, is_expert_parameter, unsharded_shape
from perfmodel.execute.uniform.model import Transformer
from perfmodel.execute.uniform.sharding import Sharding
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import TrainingJob

SEED = 20240601
#: Spread of norm weights around 1 and of biases around 0: large enough to affect every gradient.
NORM_SPREAD = 0.05
_WRAPPERS = ("_checkpoint_wrapped_module", "branches", "attention", "mlp")
_PREFIXES = ("experts", "shared")


def canonical_name(name: str) -> str:
    """Return the name used in `TransformerConfig.parameter_shapes`, without modules that only group others."""
    words = [part for part in name.split(".") if part not in _WRAPPERS]
    return "".join(word + ("_" if word in _PREFIXES else ".") for word in words).removesuffix(".")


def make_weight(config: TransformerConfig, name: str, shape: torch.Size, device: torch.device | str) -> torch.Tensor:
    """Return the unsharded tensor `name` in fp32; padded rows of the vocabulary are 0."""
    if config.tie_word_embeddings and name == "lm_head.weight":
        name = "embedding.weight"
    generator = torch.Generator(device=device).manual_seed(SEED + zlib.crc32(name.encode()))
    weight = torch.zeros(shape, device=device)
    real = weight[: config.vocab_size] if name.startswith(("embedding.", "lm_head.")) else weight
    real.normal_(generator=generator)
    if name.endswith("norm.weight"):
        return real.mul_(NORM_SPREAD).add_(1.0)
    real.mul_(NORM_SPREAD if len(shape) == 1 else shape[-1] ** -0.5)
    return weight


def local_piece(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of the tensor: tp shards first, then the data axes shard its rows."""
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, piece = parameter.device_mesh, tensor
    names = mesh.mesh_dim_names or ()
    for index in sorted(range(mesh.ndim), key=lambda i: names[i] != "tp"):
        dim = getattr(parameter.placements[index], "dim", None)  # Shard and _StridedShard have one, Replicate does not
        if dim is not None:
            chunks = piece.chunk(mesh.size(index), dim=dim)
            rank = mesh.get_local_rank(index)
            piece = chunks[rank] if rank < len(chunks) else piece[:0]
    return piece


def initial_piece(config: TransformerConfig, name: str, parameter: nn.Parameter, sharding: Sharding, device: torch.device) -> torch.Tensor:
    """Return this rank's shard of a parameter's initial value."""
    if config.parts.experts is None or not is_expert_parameter(name):
        return local_piece(make_weight(config, name, parameter.shape, device), parameter)
    shape = unsharded_shape(parameter.shape, name, sharding.experts)
    return local_piece(expert_shard(make_weight(config, name, shape, device), name, config.parts.experts, sharding.experts), parameter)


@torch.no_grad()
def fill(config: TransformerConfig, name: str, parameter: nn.Parameter, sharding: Sharding | None = None) -> None:
    local = local_tensor(parameter).detach()
    local.copy_(initial_piece(config, name, parameter, sharding or Sharding(), local.device))


def one_process_model(
    config: TransformerConfig, device: str, *, fused: bool = True, loss_scale: float = 1.0, beat: Callable[[str], None] = lambda what: None
) -> Transformer:
    """Return the unsharded model with its initial weights, which every plan of it is compared with."""
    model = Transformer(config, sharding=Sharding(loss_scale=loss_scale), fused_attention=fused, device=device)
    model.beat = beat
    for name, parameter in model.named_parameters():
        beat(f"filling {name}")
        fill(config, canonical_name(name), parameter)
    return model


def make_tokens(job: TrainingJob) -> torch.Tensor:
    """Return [global_batch, seq_len + 1 + n] token ids: each sequence, the next token, and the n further targets of MTP modules."""
    generator = torch.Generator().manual_seed(SEED)
    length = job.seq_len + 1 + job.transformer.num_mtp_layers
    return torch.randint(job.transformer.vocab_size, (job.global_batch, length), generator=generator)


def shifted_tokens(tokens: torch.Tensor, positions: slice, number: int) -> torch.Tensor:
    """Return [b, s + 1 + n] -> [b, n + 1, len(positions)]: the tokens shifted by one position, two, ... up to n + 1."""
    return torch.stack([tokens[:, positions.start + i : positions.stop + i] for i in range(1, number + 2)], dim=1)
