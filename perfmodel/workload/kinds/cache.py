"""Operators of a serving step on a cache (attention to cached tokens, state updates, sampling), and the sizes of recurrent states.

Sizes of operators are columns of a step: decoding sequences, prompts, and the cached tokens of each (`DimRoles.per_sample`).

States of recurrent layers replace the KV cache of a sequence. Engines keep the recurrent state in float32 and the last inputs of the short
convolution in the model's dtype. vLLM reads both dtypes from `mamba_cache_dtype` (the model's) and the state's from
`mamba_ssm_cache_dtype`; SGLang has bfloat16 and float32. Checkpoints ask for float32 (`mamba_ssm_dtype` of Qwen3.5, NVIDIA's cards of
Nemotron-H). Under vLLM's `auto` a model that does not ask (Qwen3-Next) has a 16-bit state, which is not modelled.

Sources: vLLM, vllm/model_executor/layers/mamba/mamba_utils.py (shapes and dtypes), read 2026-11 at commit 02d71083; SGLang,
Mamba2CacheParams and SGLANG_MAMBA_CONV_DTYPE; Qwen3.5's config.json.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import DimRoles, Operand, Operator
from perfmodel.workload.work import CacheAttention, Data, FusedAttention, OwnTraffic, Pass, Stream, extent

#: Bytes of an element of a recurrent state, and of an input of the convolution. [byte]
STATE_BYTES, CONVOLVED_BYTES = 4.0, 2.0
#: Kernel class that reads and writes the states of decoding sequences.
UPDATE_KERNELS = {"mamba": "state_update", "delta": "delta_update"}
#: Products with the state per token: write and read (Mamba-2); read of the old value, write and read (delta rule).
UPDATE_PRODUCTS = {"mamba": 2.0, "delta": 3.0}


def token_shapes(model: TransformerConfig, mixer: str, tp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that a layer caches per token on one of `tp` ranks, which share the heads; none for a layer without attention.

    They are keys and values of its heads, or the latent of all heads and the key of an indexer.
    """
    latent = model.parts.latent
    if mixer == "latent" and latent is not None:
        kept = (latent.key_value_rank + latent.rope_head_dim,)
        return (kept, (latent.index_head_dim,)) if latent.index_heads else (kept,)
    if mixer != "attention":
        return ()
    heads = (model.num_key_value_heads // tp, model.head_dim)
    return heads, heads


def state_shapes(model: TransformerConfig, mixer: str, tp: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a layer's state per sequence on one of `tp` ranks, which share the groups; none for a layer without a state.

    They are the last inputs of the convolution [taps - 1, m, c], and the state of each head [m, ...]: H P N elements in all (Mamba-2), or
    n_v d_k d_v (delta networks).
    """
    spec = model.recurrence_of(mixer)
    if spec is None:
        return ()
    groups, *state = spec.state_shape
    return (spec.conv_kernel - 1, groups // tp, spec.group_channels), (groups // tp, *state)


def state_bytes(model: TransformerConfig, mixer: str) -> float:
    """Return the state bytes of one layer and sequence, over all tp ranks. [byte]"""
    return sum(prod(shape) * itemsize for shape, itemsize in zip(state_shapes(model, mixer), (CONVOLVED_BYTES, STATE_BYTES), strict=False))


#: Dim that counts the decoding sequences of a step.
SEQUENCES = "sequences"


def cached_attention(op: Operator, work: CacheAttention) -> Operator:
    """Return fused attention `op` as attention to a cache, into which it writes the keys and values of new tokens.

    work   the cache attention, whose heads are replaced by those of `op`
    """
    (fused,) = (work for work in op.forward if isinstance(work, FusedAttention))
    work = replace(
        work,
        heads=fused.heads,
        kv_heads=fused.kv_heads,
        head_dim=fused.head_dim,
        value_head_dim=fused.value_head_dim or fused.head_dim,
    )
    return replace(op, kind="cached_attention", forward=(work,), backward=(), saved=())


def state_update(
    name: str, read: Operand, written: Operand, *, groups: int, state: int, convolved: int, kernel: str, products: float, layer: str
) -> Operator:
    """Return the update of the states [sequences, m] of decoding sequences by one token: a read and a write.

    state, convolved   elements of each group's state, in float32, and inputs of its convolution, in 16 bits
    products           products with the state per token
    """
    dims = {SEQUENCES: 1, "m": groups}
    rows = ((1, SEQUENCES), (groups, "m"))
    states = Data(extent=(*rows, (state, "")), itemsize=4.0)
    inputs = Data(extent=(*rows, (convolved, "")), itemsize=2.0)
    accesses = (states, states, inputs, inputs)
    return Operator(
        name=name,
        kind="state_update",
        dims=dims,
        inputs=(read,),
        output=written,
        forward=(Stream(kernel=kernel, elements=states.extent, accesses=accesses, element_flops=2.0 * products),),
        roles=DimRoles(logical={SEQUENCES: "batch", "m": "state_groups"}, per_sample=(SEQUENCES,)),
        group="attention_core",
        layer=layer,
    )


def sample(op: Operator, *, itemsize: float) -> Operator:
    """Return the sampling of a token per row of logits, in place of the loss `op`: a pass over the rank's shard, and an all-gather."""
    logits = op.inputs[0]
    entries = tuple((size, dim if dim not in op.roles.padded else "") for size, dim in extent(op.dims, logits.dims))
    gathered = OwnTraffic(kind=CollectiveKind.ALL_GATHER, over=op.roles.padded, extent=entries, phase=Pass.FORWARD, itemsize=itemsize)
    return replace(op, kind="sample", inputs=(logits,), backward=(), saved=(), traffic=(gathered,))
