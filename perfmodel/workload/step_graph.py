"""The graph of a serving step: the forward pass of a decoder with the operators that read and write a cache.

A graph of decode steps is written for sequences of one token: `b` counts the step's tokens whatever sequences they are of. One of steps
with prompts is written for sequences of `PROMPT_LENGTH`, which only the chunks of state-space layers notice. Behind the last layer `LAST`
counts the rows that have logits, and `SEQUENCES` of `kinds/cache.py` the sequences that decode.

Latent attention reads the latents themselves when it decodes (`decoder/absorbed.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import CacheAttention, Extent, Graph, Operand, Operator, Tensor
from perfmodel.workload.kinds.cache import cached_attention, sample, state_update
from perfmodel.workload.rewriting import with_extents
from perfmodel.workload.states import UPDATE_KERNELS, UPDATE_PRODUCTS, convolved_elements, state_elements
from perfmodel.workload.transformer import build_graph

PROMPT_LENGTH = 2048
LAST = "last"
SCANS = ("state_scan", "delta_scan")


def step_length(*, takes_prompts: bool) -> int:
    """Tokens of the sequences that a step's graph is written for."""
    return PROMPT_LENGTH if takes_prompts else 1


@lru_cache(maxsize=64)
def step_graph(model: TransformerConfig, *, takes_prompts: bool, element_bytes: float) -> Graph:
    """Graph of steps that decode, or that take prompts besides; element_bytes: of weights and activations in no format of fewer bits."""
    graph = build_graph(
        model,
        seq_len=step_length(takes_prompts=takes_prompts),
        attention="flash",
        dropout=False,
        activation_bytes=element_bytes,
        parameter_bytes=element_bytes,
        dispatcher="fused",
        absorbs=model.latent is not None and not takes_prompts,
    )
    attends = _attention_of(model, takes_prompts=takes_prompts)
    mixers = {kind.name: kind.mixer for kind in model.layer_kinds}
    operators: list[Operator] = []
    tensors = dict(graph.tensors)
    for op in graph.operators:
        made = with_batch(op, LAST) if op.layer == graph.regions[-1].name else op
        if op.name == graph.loss:
            made = sample(made, itemsize=element_bytes)
        elif op.is_attention:
            made = cached_attention(op, attends)
        elif op.kind == "index_scores" or (op.kind in SCANS and not takes_prompts):
            made = replace(op, forward=(), backward=())  # of the cache: `cached_attention` has the one, `state_update` the other
        operators.append(made)
        if op.kind in SCANS:
            operators.append(_states(model, mixers[op.layer], op, tensors))
    return replace(graph, operators=tuple(operators), tensors=tensors)


def with_batch(op: Operator, dim: str) -> Operator:
    """The operator with rows that another quantity counts: its batch dim by the name `dim`."""

    def named(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dim if each in op.per_sample else each for each in dims)

    def change(extent: Extent) -> Extent:
        return tuple((size, *named((each,))) for size, each in extent)  # type: ignore[misc]

    fields = {name: named(getattr(op, name)) for name in ("sums", "unsplit", "padded", "per_sample", "per_token", "stretched")}
    return with_extents(
        op,
        change,
        dims={named((each,))[0]: size for each, size in op.dims.items()},
        inputs=tuple(replace(each, dims=named(each.dims)) for each in op.inputs),
        output=replace(op.output, dims=named(op.output.dims)),
        logical={named((each,))[0]: logical for each, logical in op.logical.items()},
        **fields,
    )


def _attention_of(model: TransformerConfig, *, takes_prompts: bool) -> CacheAttention:
    """Attention of the model's layers but for its heads: all windows have one width, as all latents."""
    latent = model.latent
    top = latent.index_top if latent is not None and latent.index_heads else 0
    window = model.sliding_window or model.attention_chunk
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
    operands = []
    for tensor in (f"{name}.in", f"{name}.out"):
        tensors[tensor] = Tensor(name=tensor, shape=(1, groups), itemsize=4.0)
        operands.append(Operand(tensor=tensor, dims=("sequences", "m")))
    return state_update(
        name,
        *operands,
        groups=groups,
        state=round(state_elements(model, mixer)) // groups,
        convolved=round(convolved_elements(model, mixer)) // groups,
        kernel=UPDATE_KERNELS[mixer],
        products=UPDATE_PRODUCTS[mixer],
        layer=scan.layer,
    )
