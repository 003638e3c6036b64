"""A mixture of experts: router, dispatch of rows, grouped GEMMs, combine; shared experts in parallel.

Dims: x experts in the router, k choices of a token, e experts, t mean rows of an expert from one sequence (seq_len * top_k / experts), y
halves of a gated product, w width of an expert, u width of the shared experts, o one column.

A routed tensor is rows[b, s, k, h] at its tokens and rows[b, t, e, h] at its experts. Both have the same number of entries, and their third
position is unsharded or sharded by the experts' axes. The algebra therefore derives dispatch and combine from the two layouts (R11). An
expert's gradient is partial on the token axes that experts do not use (R4). No rule is specific to experts.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.copies import Copies
from perfmodel.workload.decoder.builder import DecoderBuilder, operand, size_of
from perfmodel.workload.graph import Operator
from perfmodel.workload.kinds.routing import gated, permute, route, routed_experts, unpermute
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.routing import Once

_TOKENS, _ROUTED, _AT_EXPERTS = "b s h", "b s k h", "b t e h"
_FP32 = 4.0


def expert_mixture(b: DecoderBuilder, x: str) -> str:
    """Write the mixture x[b,s,h] -> y[b,s,h]."""
    experts = b.model.parts.experts
    assert experts is not None  # `TransformerConfig` checks it
    logits = b.linear("router", x, "b s_res x h", _TOKENS, "x h", 1, "b s x", itemsize=_FP32, part="other")
    if experts.router_bias:
        logits = b.bias("router", logits, "b s_res x", "b s x", "x")
    dims = "b s_res x k"
    gathers = b.dispatcher in ("allgather", "fused")
    operator = route("route", operand(logits, "b s x"), operand("route.out", "b s k"), b.of(dims), score=experts.score)
    # Gathered weights, and those of a fused call, come with the expert of each choice.
    weights = b.add(operator, dims, itemsize=2 * _FP32 if gathers else _FP32)
    once = b.rank_rows.once
    if b.dispatcher == "fused":
        routed = _fused(b, experts, x, weights)
    elif once is not None:
        routed = _once_each(b, experts, once, x, weights)
    else:
        routed = (_all_gather if gathers else _all_to_all)(b, experts, x, weights)
    if not experts.shared_width:
        return routed
    shared = _shared(b, experts, x)
    return b.sum("experts_add", routed, shared)


def _all_to_all(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """Copy rows at their tokens and send them to their experts, which sort them again.

    Flex dispatcher: a token is sent once to each destination, and the transfers copy and add up rows, without separate passes.
    """
    copies = None
    if b.dispatcher == "flex":
        copies = Copies(slots=experts.num_experts, chosen=experts.top_k, groups=experts.num_groups, top_groups=experts.top_groups)

    rank_rows = b.rank_rows
    # Factors of the exchange over the rows held before dispatch and over those computed before combine.
    at_tokens, at_experts = (
        1.0 if rank_rows.exchanged is None else rank_rows.exchanged / local for local in (rank_rows.held, rank_rows.computed)
    )

    def moved(op: Operator) -> Operator:
        return op if copies is None else replace(op, forward=(), backward=())

    dims = "b s_res k h"
    operator = permute("permute", operand(x, _TOKENS), operand("permute.out", _ROUTED), b.of(dims))
    rows = b.add(moved(operator), dims, is_set=True, copies=copies, exchanged=at_tokens, is_counted=rank_rows.is_counted)
    dims = "b_x t_res e h"
    rows = b.add(permute("sort", operand(rows, _AT_EXPERTS), operand("sort.out", _AT_EXPERTS), b.of(dims)), dims, is_set=True)
    rows = _run(b, experts, rows)
    operator = permute("unsort", operand(rows, _AT_EXPERTS), operand("unsort.out", _AT_EXPERTS), b.of(dims))
    rows = b.add(operator, dims, is_set=True, copies=copies, exchanged=at_experts)
    dims = "b s_res k h"
    weighted = operand(weights, "b s k") if not b.weights_in_experts else None
    operator = unpermute("unpermute", operand(rows, _ROUTED), weighted, operand("unpermute.out", _TOKENS), b.of(dims))
    return b.add(moved(operator), dims)


def _once_each(b: DecoderBuilder, experts: Experts, once: Once, x: str, weights: str) -> str:
    """Send tokens once to each rank, as the executor does where the destinations are known.

    Their weights are sent too, and rows are weighted and added up at their experts. n counts the sent copies of a token. The
    reduction is counted as if no rows were added up.
    """
    token_dims, there = "b s_res n h", "b_x t_res e h"
    weight_dims = "b s_res k"
    operator = permute("permute_weights", operand(weights, "b s k"), operand("permute_weights.out", "b s k"), b.of(weight_dims))
    weights = b.add(operator, weight_dims, itemsize=_FP32, is_set=True, exchanged=once.weights)
    rows = b.add(permute("permute", operand(x, _TOKENS), operand("permute.out", "b s n h"), b.of(token_dims)), token_dims, is_set=True)
    rows = b.add(permute("sort", operand(rows, _AT_EXPERTS), operand("sort.out", _AT_EXPERTS), b.of(there)), there, is_set=True)
    rows = _run(b, experts, rows)
    rows = b.add(permute("unsort", operand(rows, _AT_EXPERTS), operand("unsort.out", _AT_EXPERTS), b.of(there)), there, is_set=True)
    operator = unpermute("merge", operand(rows, _AT_EXPERTS), operand(weights, "b t e"), operand("merge.out", _AT_EXPERTS), b.of(there))
    rows = b.add(operator, there, is_set=True, exchanged=once.received / b.rank_rows.computed)
    return b.add(unpermute("unpermute", operand(rows, "b s n h"), None, operand("unpermute.out", _TOKENS), b.of(token_dims)), token_dims)


def _all_gather(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """All-gather tokens to the experts; each expert takes its rows, and a reduction adds up their outputs per token."""
    dims, tensor_dims = "b_x s_x e h", "b s e h"
    chosen = {"e": size_of(experts.top_k * b.rank_rows.computed)}  # per token those that it chose
    sizes = b.of(dims) | chosen
    rows = b.add(permute("permute", operand(x, _TOKENS), operand("permute.out", tensor_dims), sizes), dims)
    weight_dims = "b_x s_x k e"
    operator = permute("permute_weights", operand(weights, "b s k"), operand("permute_weights.out", "b s e"), b.of(weight_dims) | chosen)
    rows = _run(b, experts, rows, weights=b.add(operator, weight_dims, itemsize=_FP32))
    return b.add(unpermute("unpermute", operand(rows, tensor_dims), None, operand("unpermute.out", _TOKENS), sizes), dims)


def _fused(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """Write one fused call from tokens to the experts' combined output; the graph has no axis for expert placement."""
    halves = "y " if experts.gated else ""
    named: list[tuple[str, str, int, WeightPart]] = [
        ("experts_up.weight", f"e {halves}w h", 2 + experts.gated, "experts"),
        ("experts_down.weight", "e h w", 2, "experts"),
    ]
    if experts.bias:
        named += [("experts_up.bias", f"e {halves}w", 2 + experts.gated, "other"), ("experts_down.bias", "e h", 2, "other")]
    parameters = tuple(operand(b.parameter(name, dims, rows, part=part), dims) for name, dims, rows, part in named)
    dims = f"b s_res k e_all {halves}w_all h"
    inputs = (operand(x, _TOKENS), operand(weights, "b s k"), *parameters)
    operator = routed_experts("experts", inputs, operand("experts.out", _TOKENS), b.of(dims), top_k=experts.top_k)
    return b.add(operator, dims)


def _run(b: DecoderBuilder, experts: Experts, rows: str, *, weights: str = "") -> str:
    """Write the two grouped GEMMs and the activation between them: rows[b,t,e,h] -> rows[b,t,e,h].

    weights   [b, t, e]: weights applied to the rows, in the activation's kernel if gated, else in a separate kernel
    """
    halves = "y " if experts.gated else ""
    wide = f"b t e {halves}w"
    up = b.linear(
        "experts_up", rows, f"b_x t e {halves}w h", _AT_EXPERTS, f"e {halves}w h", 2 + experts.gated, wide, grouped=True, part="experts"
    )
    if experts.bias:
        up = b.bias("experts_up", up, f"b_x t e {halves}w", wide, f"e {halves}w")
    dims = f"b_x t e {halves}w"
    out = operand("experts_activation.out", "b t e w")
    apart = b.activation_bytes if weights and not experts.gated else 0.0
    weighted = operand(weights, "b t e") if weights else None
    operator = gated("experts_activation", b.model.mlp.activation, operand(up, wide), weighted, out, b.of(dims), apart=apart)
    down = b.linear("experts_down", b.add(operator, dims), "b_x t e w h", "b t e w", "e h w", 2, _AT_EXPERTS, grouped=True, part="experts")
    if experts.bias:
        down = b.bias("experts_down", down, "b_x t e h", _AT_EXPERTS, "e h")
    return down


def _shared(b: DecoderBuilder, experts: Experts, x: str) -> str:
    """Write the shared experts: a dense branch whose output a gate may scale."""
    model = b.model

    def wide(name: str) -> str:
        out = b.linear(name, x, "b s u h", _TOKENS, "u h", 1, "b s u", part="dense")
        return b.bias(name, out, "b s u", "b s u", "u") if experts.bias else out

    if experts.gated:
        gate, up = wide("shared_gate_proj"), wide("shared_up_proj")
        y = b.pointwise("shared_activation", model.mlp.activation, [(gate, "b s u")], "b s u")
        y = b.pointwise("shared_product", "mul", [(y, "b s u"), (up, "b s u")], "b s u")
    else:
        y = b.pointwise("shared_activation", model.mlp.activation, [(wide("shared_up_proj"), "b s u")], "b s u")
    y = b.linear("shared_down_proj", y, "b s u h", "b s u", "h u", 1, _TOKENS, part="dense")
    if experts.bias:
        y = b.bias("shared_down_proj", y, "b s_res h", _TOKENS, "h")
    if not experts.shared_gate:
        return y
    gate = b.linear("shared_gate", x, "b s_res o h", _TOKENS, "o h", 1, "b s o", part="other")
    gate = b.pointwise("shared_gate_sigmoid", "sigmoid", [(gate, "b s o")], "b s_res o")
    return b.pointwise("shared_gate_product", "mul", [(y, _TOKENS), (gate, "b s o")], "b s_res h o")
