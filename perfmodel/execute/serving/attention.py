"""Mixers with a cache: the projections of training, cache writes of new tokens, and attention or recurrence by groups of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from perfmodel.execute.layers.attention import alibi_bias, attention, latent_attention
from perfmodel.execute.layers.indexer import cached_index
from perfmodel.execute.layers.masks import additive, seen
from perfmodel.execute.layers.scans import causal_conv_on
from perfmodel.execute.local import local_tensor
from perfmodel.execute.serving.step import ChunkGroup, ServedSharding
from perfmodel.execute.uniform.latent import LatentMixer
from perfmodel.execute.uniform.model import Attention, CoreAttention
from perfmodel.execute.uniform.recurrent import DeltaMixer, MambaMixer, RecurrentMixer
from perfmodel.workload.config import TransformerConfig


def seen_keys(group: ChunkGroup, start: int, window: int, device: torch.device) -> torch.Tensor:
    """Return whether each new token sees each key from `start` on [b or 1, q, z], itself included."""
    keys, queries = group.reads.length, group.queries
    lengths = torch.tensor([keys], device=device) if group.lengths is None else group.lengths
    positions = lengths.view(-1, 1) - queries + torch.arange(queries, device=device)
    return seen(positions, torch.arange(start, keys, device=device), window)


class CachedCore(CoreAttention):
    """Attention of the last tokens of sequences to the cached keys that they see."""

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: ChunkGroup, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute [b, q, n, d], pools of keys and values, sink score of each head [n] -> [b, q, n * d]

        Query heads that share a key head are rows of one product: the cache is read once, without a copy.
        """
        start = max(0, group.reads.length - group.queries + 1 - self.window) if self.window and group.lengths is None else 0
        k, v = (group.reads.of(pool, start).transpose(1, 2) for pool in (keys, values))
        _, queries, heads, _ = q.shape
        shared = heads // k.shape[1]
        rows = q.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [b, g, r q, d]
        if sinks is not None:
            sinks = sinks.view(1, -1, shared, 1).expand(-1, -1, -1, queries).reshape(1, -1, shared * queries, 1)
        # score bias [b or 1, 1 or g, r q, z]; None if a token sees all keys, or if a kernel computes the mask itself
        bias, slopes = None, self.slopes(q)
        if not self.sharding.is_abstract and (queries > 1 or group.lengths is not None or slopes is not None):
            bias = additive(seen_keys(group, start, self.window, q.device), q.dtype).unsqueeze(1)
            if slopes is None:
                bias = bias.repeat(1, 1, shared, 1)
            else:
                bias = (bias + alibi_bias(slopes, group.reads.length - start)).unflatten(1, (-1, shared)).flatten(2, 3)
        context = attention(rows, k, v, mask=bias, sinks=sinks)
        return context.unflatten(2, (shared, queries)).permute(0, 3, 1, 2, 4).flatten(2)


class CachedAttention(Attention):
    sharding: ServedSharding

    def __init__(self, config: TransformerConfig, sharding: ServedSharding, *, index: int, device: str) -> None:
        super().__init__(config, sharding, index=index, fused=True, recompute_core=False, device=device)
        self.index, self.core = index, CachedCore(config, sharding, fused=True, window=self.core.window)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [1, t, h] -> [1, t, h]."""
        cache, step = self.sharding.now()
        keys, values = cache.pools[self.index]
        q, k, v = (tensor.squeeze(0) for tensor in self.project(x))
        keys.index_copy_(0, step.places, k)
        values.index_copy_(0, step.places, v)
        sinks = self.local_sinks()
        rows = [
            self.core.attend(q[group.rows : group.stop].unflatten(0, (-1, group.queries)), keys, values, group, *sinks).flatten(0, 1)
            for group in step.groups
        ]
        context = rows[0] if len(rows) == 1 else torch.cat(rows)
        return self.finish(context.unsqueeze(0), x)


class CachedLatent(LatentMixer):
    """Latent attention that caches only latents, and the keys of an indexer.

    Single tokens attend to the latents themselves ("absorbed"): the key up-projection is applied to the query, and the value up-projection
    to the weighted sum of latents. With an indexer, they attend to the chosen latents. For several new tokens in a sequence, keys and
    values of the full sequence are recomputed from the latents.
    """

    sharding: ServedSharding

    def __init__(self, config: TransformerConfig, sharding: ServedSharding, *, index: int, device: str) -> None:
        super().__init__(config, sharding, device=device)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [1, t, h] -> [1, t, h]."""
        cache, step = self.sharding.now()
        pool, *index = cache.pools[self.index]
        given = self._query_latent(x)
        q = self._of_heads(given).squeeze(0)
        asked: tuple[torch.Tensor, ...] = ()
        if index:
            queries, keys, weights = (tensor.squeeze(0) for tensor in self.indexed(x, given))
            index[0].index_copy_(0, step.places, keys)
            asked = queries, weights
        compressed, shared = self.compress(x)
        pool.index_copy_(0, step.places, torch.cat((compressed, shared.squeeze(2)), dim=-1).squeeze(0))
        rows = []
        for group in step.groups:
            mine, *index_inputs = (tensor[group.rows : group.stop].unflatten(0, (-1, group.queries)) for tensor in (q, *asked))
            chosen = None
            if index:
                kept_keys, visible = group.reads.of(index[0]), self._seen(group, q)
                visible, top = None if visible is None else visible.squeeze(1), min(self.latent.index_top, kept_keys.shape[1])
                chosen = cached_index(index_inputs[0], kept_keys, index_inputs[1], visible, top)
            kept = group.reads.of(pool)
            if group.queries == 1:
                context = self._absorbed(mine, kept, group, chosen)
            else:
                rank = self.latent.key_value_rank
                context = self.attend(mine, *self.expand(kept[..., :rank], kept[..., rank:].unsqueeze(2)), chosen)
            rows.append(context.flatten(0, 1))
        output: torch.Tensor = self.o_proj(torch.cat(rows).unsqueeze(0))
        return output

    def _seen(self, group: ChunkGroup, like: torch.Tensor) -> torch.Tensor | None:
        if self.sharding.is_abstract or (group.queries == 1 and group.lengths is None):
            return None
        return seen_keys(group, 0, 0, like.device).unsqueeze(1)

    def _absorbed(self, q: torch.Tensor, kept: torch.Tensor, group: ChunkGroup, chosen: torch.Tensor | None) -> torch.Tensor:
        """Compute [b, 1, n, qk], [b, z, c + r], [b, 1, top] -> [b, 1, n * v]."""
        latent = self.latent
        plain, turned = q.squeeze(1).split((latent.nope_head_dim, latent.rope_head_dim), dim=-1)
        weight = local_tensor(self.kv_b_proj.weight)
        for_keys, for_values = weight.unflatten(0, (plain.shape[1], -1)).split((latent.nope_head_dim, latent.value_head_dim), dim=1)
        absorbed = torch.bmm(plain.transpose(0, 1), for_keys).transpose(0, 1)  # [b, n, c]
        seen = self._seen(group, q)
        if chosen is not None:
            kept = kept.gather(1, chosen.squeeze(1).unsqueeze(-1).expand(-1, -1, kept.shape[-1]))
            seen = None if seen is None else seen.expand(len(chosen), -1, -1, -1).gather(3, chosen.unsqueeze(1))
        joint = torch.cat((absorbed, turned), dim=-1)
        context = latent_attention(
            joint, kept, None if seen is None else seen.squeeze(1), latent.key_value_rank, float(latent.score_head_dim**-0.5)
        )
        return torch.bmm(context.transpose(0, 1), for_values.transpose(1, 2)).transpose(0, 1).flatten(1).unsqueeze(1)


class CachedStates(RecurrentMixer):
    """Recurrent mixer that continues sequences: several positions by chunks, a single position as a decode step.

    index   index of the layer
    """

    index: int

    def _run(self, mixed: torch.Tensor, steps: torch.Tensor, conv: Sequence[torch.Tensor], scan: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute [1, t, m, c], [1, t, m, ...] -> [1, t, m, o]."""
        cache, step = self.sharding.now()  # type: ignore[attr-defined]
        pools = cache.states.pools[self.index]
        rows = []
        for group in step.groups:
            x, given = (tensor[0, group.rows : group.stop].unflatten(0, (-1, group.queries)) for tensor in (mixed, steps))
            last, state = (group.slots.of(pool) for pool in pools)
            y = self.scan.onward(causal_conv_on(x, conv, last), given, scan, state, self.chunk_of(x))
            for pool, values in zip(pools, (last, state), strict=True):
                group.slots.put(pool, values)
            rows.append(y.flatten(0, 1))
        return torch.cat(rows).unsqueeze(0)


class CachedMamba(CachedStates, MambaMixer):
    pass


class CachedDelta(CachedStates, DeltaMixer):
    pass


#: By the mixer of a layer.
CACHED_STATES: dict[str, type[CachedMamba] | type[CachedDelta]] = {"mamba": CachedMamba, "delta": CachedDelta}
