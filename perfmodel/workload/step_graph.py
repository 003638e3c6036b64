"""The graph of a serving step: the forward pass of a decoder with operators that read and write a cache.

The graph of decode steps is built for sequences of one token: `b` counts the step's tokens over all sequences. The graph of steps with
prompts is built for sequences of `PROMPT_LENGTH`, which matters only to the chunks of state-space layers. After the last layer, `LAST`
counts the rows with logits, and `SEQUENCES` of `kinds/cache.py` the decoding sequences.

In decode steps, latent attention reads the cached latents directly (`decoder/absorbed.py`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from perfmodel.foundation.session import session_cache
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph, Operand, Operator, Tensor
from perfmodel.workload.kinds.cache import (
    UPDATE_KERNELS,
    UPDATE_PRODUCTS,
    cached_attention,
    sample,
    state_shapes,
    state_update,
)
from perfmodel.workload.rewriting import with_extents
from perfmodel.workload.transformer import build_graph
from perfmodel.workload.work import CacheAttention, Extent

PROMPT_LENGTH = 2048
LAST = "last"
SCANS = ("state_scan", "delta_scan")


def step_length(*, takes_prompts: bool) -> int:
    """Return the sequence length that a step's graph is built for."""
    return PROMPT_LENGTH if takes_prompts else 1


@session_cache(maxsize=64)
def step_graph(model: TransformerConfig, *, takes_prompts: bool, element_bytes: float) -> Graph:
    """Return the graph of decode steps, or of steps with prompts too. element_bytes: bytes of an element of unquantised weights and
    activations"""
    graph = build_graph(
        model,
        seq_len=step_length(takes_prompts=takes_prompts),
        attention="flash",
        dropout=False,
        activation_bytes=element_bytes,
        parameter_bytes=element_bytes,
        dispatcher="fused",
        absorbs=model.parts.latent is not None and not takes_prompts,
    )
    attends = _attention_of(model, takes_prompts=takes_prompts)
    mixers = {kind.name: kind.mixer for kind in model.layer_kinds}
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    for op in graph.operators:
        rewritten = with_batch(op, LAST) if op.layer == graph.regions[-1].name else op
        if op.name == graph.loss:
            rewritten = sample(rewritten, itemsize=element_bytes)
        elif op.is_attention:
            rewritten = cached_attention(op, attends)
        elif op.kind == "index_scores" or (op.kind in SCANS and not takes_prompts):
            rewritten = replace(op, forward=(), backward=())  # `cached_attention` has the former's work, `state_update` the latter's
        operators.append(rewritten)
        if op.kind in SCANS:
            operators.append(_states(model, mixers[op.layer], op, tensors))
    return replace(graph, operators=tuple(operators), tensors=tensors)


def with_batch(op: Operator, dim: str) -> Operator:
    """Return the operator with its batch dim renamed to `dim`, which counts other rows."""

    def named(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dim if name in op.roles.per_sample else name for name in dims)

    def change(extent: Extent) -> Extent:
        return tuple((size, *named((name,))) for size, name in extent)  # type: ignore[misc]

    return with_extents(
        op,
        change,
        dims={named((name,))[0]: size for name, size in op.dims.items()},
        inputs=tuple(replace(operand, dims=named(operand.dims)) for operand in op.inputs),
        output=replace(op.output, dims=named(op.output.dims)),
        roles=op.roles.with_dims(named),
    )


def _attention_of(model: TransformerConfig, *, takes_prompts: bool) -> CacheAttention:
    """Return the attention of the model's layers except its heads: all windows have one width, as have all latents."""
    latent = model.parts.latent
    top = latent.index_top if latent is not None and latent.index_heads else 0
    window = model.attention.window
    share = model.sliding_layer_fraction if window else 0.0
    return CacheAttention(
        heads=(),
        kv_heads=(),
        head_dim=0,
        value_head_dim=0,
        latent=(latent.key_value_rank, latent.rope_head_dim) if latent is not None else (0, 0),
        window=top or (window if share else 0),
        windowed=1.0 if top else share,
        index=(latent.index_heads, latent.index_head_dim) if latent is not None and top else (0, 0),
        takes_prompts=takes_prompts,
    )


def _states(model: TransformerConfig, mixer: str, scan: Operator, tensors: dict[str, Tensor]) -> Operator:
    name, groups = f"{scan.name.removesuffix(scan.name_in_layer)}{mixer} states", scan.dims["m"]
    convolved, state = state_shapes(model, mixer)
    operands = []
    for tensor in (f"{name}.in", f"{name}.out"):
        tensors[tensor] = Tensor(name=tensor, shape=(1, groups), itemsize=4.0)
        operands.append(Operand(tensor=tensor, dims=("sequences", "m")))
    return state_update(
        name,
        *operands,
        groups=groups,
        state=prod(state) // groups,
        convolved=prod(convolved) // groups,
        kernel=UPDATE_KERNELS[mixer],
        products=UPDATE_PRODUCTS[mixer],
        layer=scan.layer,
    )
