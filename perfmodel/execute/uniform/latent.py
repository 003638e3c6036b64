"""Latent attention: keys and values of every head are computed from one latent per token (`workload/decoder/latent.py`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from perfmodel.execute.layers.attention import causal_attention
from perfmodel.execute.layers.indexer import choose_keys
from perfmodel.execute.layers.norm import NORM_EPSILON, RMS_EPSILON
from perfmodel.execute.layers.rotary import rotate
from perfmodel.execute.local import local_tensor
from perfmodel.execute.uniform.collective_ops import add_gradients, add_loss, exchange, gather_copies, gather_sequence, share_gradient
from perfmodel.execute.uniform.experts import ReplicatedLinear
from perfmodel.execute.uniform.norm import RMSNorm
from perfmodel.execute.uniform.sharding import Sharding, rotary_angles
from perfmodel.workload.config import TransformerConfig


class LatentMixer(nn.Module):
    """Latent attention under tp: latents are computed from local tokens with replicated weights and all-gathered; heads are sharded."""

    def __init__(self, config: TransformerConfig, sharding: Sharding, *, device: str) -> None:
        super().__init__()
        assert config.parts.latent is not None
        self.latent, self.sharding, self.heads = config.parts.latent, sharding, config.num_attention_heads
        latent, size = config.parts.latent, config.hidden_size
        queries = self.heads * latent.score_head_dim

        def linear(columns: int, rows: int, *, bias: bool = False) -> nn.Linear:
            return nn.Linear(columns, rows, bias=bias, device=device)

        if latent.query_rank:
            self.q_a_proj = ReplicatedLinear(size, latent.query_rank, bias=config.biases.qkv_bias, device=device)
            self.q_a_norm = RMSNorm(latent.query_rank, eps=RMS_EPSILON, device=device)
            self.q_b_proj = linear(latent.query_rank, queries)
        else:
            self.q_proj = linear(size, queries)
        self.kv_a_proj = ReplicatedLinear(size, latent.key_value_rank + latent.rope_head_dim, bias=config.biases.qkv_bias, device=device)
        self.kv_a_norm = RMSNorm(latent.key_value_rank, eps=RMS_EPSILON, device=device)
        self.kv_b_proj = linear(latent.key_value_rank, self.heads * (latent.nope_head_dim + latent.value_head_dim))
        if latent.index_heads:
            self.index_q_proj = linear(latent.query_rank or size, latent.index_heads * latent.index_head_dim)
            self.index_k_proj = ReplicatedLinear(size, latent.index_head_dim, bias=False, device=device)
            self.index_k_norm = nn.LayerNorm(latent.index_head_dim, eps=NORM_EPSILON, device=device)
            self.index_weights_proj = ReplicatedLinear(size, latent.index_heads, bias=False, device=device)
        self.o_proj = linear(self.heads * latent.value_head_dim, size, bias=config.biases.attention_output_bias)

    def _rotate(self, x: torch.Tensor, start: int = 0, *, of_residual: bool = False) -> torch.Tensor:
        """Rotate the entries of [b, s, n, d] from `start` on."""
        return rotate(x, *rotary_angles(self.sharding, x, self.latent.rope_head_dim, of_residual=of_residual), start=start)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, h] -> [b, s, n, qk]."""
        return self._of_heads(self._query_latent(x))

    def _query_latent(self, x: torch.Tensor) -> torch.Tensor:
        """Return the latent of the queries; may be a DTensor."""
        return self.q_a_norm(self.q_a_proj(x)) if self.latent.query_rank else x  # type: ignore[no-any-return]

    def _of_heads(self, compressed: torch.Tensor) -> torch.Tensor:
        latent = self.latent
        q = (self.q_b_proj if latent.query_rank else self.q_proj)(compressed)
        return self._rotate(q.unflatten(-1, (-1, latent.score_head_dim)), latent.nope_head_dim)

    def compress(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [b, s, h] -> the latent of keys and values [b, s, c], and the rotary key part shared by all heads [b, s, 1, r]."""
        latent = self.latent
        compressed, turned = self.kv_a_proj(x).split((latent.key_value_rank, latent.rope_head_dim), dim=-1)
        return self.kv_a_norm(compressed), self._rotate(turned.unsqueeze(2), of_residual=True)

    def expand(self, compressed: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [b, s, n, qk] and values [b, s, n, v]."""
        latent = self.latent
        expanded = self.kv_b_proj(compressed).unflatten(-1, (-1, latent.nope_head_dim + latent.value_head_dim))
        head_keys, value = expanded.split((latent.nope_head_dim, latent.value_head_dim), dim=-1)
        return torch.cat((head_keys, shared.expand(-1, -1, head_keys.shape[2], -1)), dim=-1), value.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, h] -> [b, s, h] of this rank's residual stream."""
        x = local_tensor(x)
        compressed, chosen = self._query_latent(x), None
        if self.latent.index_heads:
            compressed, read = self._for_indexer(compressed)
            chosen, loss = self._choose(x, read)
            q = add_loss(self._of_heads(compressed), loss)
            del read, loss
        else:
            q = self._of_heads(compressed)
        compressed, shared = self.compress(x)
        tp_group = self.sharding.tp_group
        if tp_group is not None:  # the gradient of the input of the local heads is summed over the ranks' heads
            shared = gather_sequence(shared, 1, tp_group) if self.sharding.sequence_parallel else add_gradients(shared, tp_group)
        k, v = self.expand(compressed, shared)
        del compressed, shared
        group, exchanges = self.sharding.cp_group, self.sharding.exchanges_heads
        if group is not None and exchanges:
            q, k, v = (exchange(tensor, split=2, join=1, group=group) for tensor in (q, k, v))
        elif group is not None:
            # contiguous chunks: slice off later keys
            seen = (self.sharding.cp_rank + 1) * q.shape[1]
            k, v = gather_sequence(k, 1, group)[:, :seen], gather_sequence(v, 1, group)[:, :seen]
        context = self.attend(q, k, v, chosen)
        del q, k, v, chosen
        if group is not None and exchanges:
            context = exchange(context, split=1, join=2, group=group)
        output: torch.Tensor = self.o_proj(context)
        return output

    def _for_indexer(self, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query latents of all tokens for the local heads, and for the indexer, which is replicated.

        They are all-gathered once. Backward sums partial gradients over ranks, so replicated ones are divided by the number of ranks.
        """
        ways = self.sharding.tp
        if ways == 1:
            return compressed, compressed
        if not isinstance(compressed, DTensor):
            weight = (self.q_b_proj if self.latent.query_rank else self.q_proj).weight
            assert isinstance(weight, DTensor)
            residual = Shard(1) if self.sharding.sequence_parallel else Replicate()
            compressed = DTensor.from_local(compressed, weight.device_mesh, [residual], run_check=False)
        compressed = compressed.redistribute(placements=[Replicate()])
        return compressed, share_gradient(compressed.to_local(grad_placements=[Partial()]), ways)

    def _choose(self, x: torch.Tensor, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the keys of each query with the indexer: (keys [b, s, top], term to add to the loss)."""
        group = self.sharding.tp_group if self.sharding.sequence_parallel else None
        q, k, weights = self.indexed(x, compressed)
        if group is not None:
            k, weights = gather_copies(k, 1, group), gather_copies(weights, 1, group)
        return choose_keys(q, k, weights, top=min(self.latent.index_top, q.shape[1]), scale=self.sharding.loss_scale)

    def indexed(self, x: torch.Tensor, compressed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the indexer's queries [b, s, n, d] of all tokens, and keys [b, s, d] and weights [b, s, n] of the local tokens."""
        latent = self.latent
        q = self._rotate(self.index_q_proj(compressed).unflatten(-1, (-1, latent.index_head_dim)))
        k = local_tensor(self.index_k_norm(self.index_k_proj(x))).unsqueeze(2)
        k = self._rotate(k, of_residual=True).squeeze(2)
        return q, k, self.index_weights_proj(x)

    @staticmethod
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [b, q, n, qk], [b, z, n, qk], [b, z, n, v] -> [b, q, n * v]; chosen [b, q, top]: the keys that each query attends to."""
        return causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), chosen=chosen).transpose(1, 2).flatten(2)
