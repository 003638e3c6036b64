"""A mixture of experts: a router, rows sent to their experts, grouped products, rows brought back; shared experts beside them.

Dims: x experts as the router knows them, k those that a token chose, e experts, t rows of an expert that a sequence sends on average
(seq_len * top_k / experts), y halves of a gated product, w width of an expert, u width of the shared experts, o one column.
A routed tensor is rows[b, s, k, h] where its tokens lie and rows[b, t, e, h] where its experts do: as many entries, its third position
cut by nothing or by the experts' axes. So dispatch and combine are what the algebra finds between the two (R11), and an expert's gradient
is partial on the axes of tokens that experts leave (R4): no rule is theirs alone.
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
    """x[b,s,h] -> y[b,s,h]"""
    experts = b.model.experts
    assert experts is not None  # `TransformerConfig` checks it
    logits = b.linear("router", x, "b s_res x h", _TOKENS, "x h", 1, "b s x", itemsize=_FP32, part="other")
    if experts.router_bias:
        logits = b.bias("router", logits, "b s_res x", "b s x", "x")
    dims = "b s_res x k"
    gathers = b.dispatcher in ("allgather", "fused")
    made = route("route", operand(logits, "b s x"), operand("route.out", "b s k"), b.of(dims), score=experts.score)
    # what is gathered, or goes to a fused call, has the expert of each choice too
    weights = b.add(made, dims, itemsize=2 * _FP32 if gathers else _FP32)
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
    return b.sum("experts_add", [routed, shared])


def _all_to_all(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """Rows are copied where their tokens are and sent to their experts, which sort them again.

    Flex: a token travels once to each place, and the transfers themselves copy and add up: no pass of the tokens' ranks does.
    """
    copies = None
    if b.dispatcher == "flex":
        copies = Copies(slots=experts.num_experts, chosen=experts.top_k, groups=experts.num_groups, top_groups=experts.top_groups)

    rank_rows = b.rank_rows
    # what is sent is held here before dispatch, and was computed here before combine
    at_tokens, at_experts = (
        1.0 if rank_rows.exchanged is None else rank_rows.exchanged / own for own in (rank_rows.held, rank_rows.computed)
    )

    def moved(op: Operator) -> Operator:
        return op if copies is None else replace(op, forward=(), backward=())

    dims = "b s_res k h"
    made = permute("permute", operand(x, _TOKENS), operand("permute.out", _ROUTED), b.of(dims))
    rows = b.add(moved(made), dims, is_set=True, copies=copies, exchanged=at_tokens, is_counted=rank_rows.is_counted)
    dims = "b_x t_res e h"
    rows = b.add(permute("sort", operand(rows, _AT_EXPERTS), operand("sort.out", _AT_EXPERTS), b.of(dims)), dims, is_set=True)
    rows = _run(b, experts, rows)
    made = permute("unsort", operand(rows, _AT_EXPERTS), operand("unsort.out", _AT_EXPERTS), b.of(dims))
    rows = b.add(made, dims, is_set=True, copies=copies, exchanged=at_experts)
    dims = "b s_res k h"
    weighted = operand(weights, "b s k") if not b.weights_in_experts else None
    made = unpermute("unpermute", operand(rows, _ROUTED), weighted, operand("unpermute.out", _TOKENS), b.of(dims))
    return b.add(moved(made), dims)


def _once_each(b: DecoderBuilder, experts: Experts, once: Once, x: str, weights: str) -> str:
    """As the executor sends tokens once to each rank, where it is known which travel: their weights travel too, and rows are weighted and
    added up where their experts are. n of a token as many as it is sent as; what is added up is counted as if nothing were."""
    here, there = "b s_res n h", "b_x t_res e h"
    each = "b s_res k"
    made = permute("permute_weights", operand(weights, "b s k"), operand("permute_weights.out", "b s k"), b.of(each))
    weights = b.add(made, each, itemsize=_FP32, is_set=True, exchanged=once.weights)
    rows = b.add(permute("permute", operand(x, _TOKENS), operand("permute.out", "b s n h"), b.of(here)), here, is_set=True)
    rows = b.add(permute("sort", operand(rows, _AT_EXPERTS), operand("sort.out", _AT_EXPERTS), b.of(there)), there, is_set=True)
    rows = _run(b, experts, rows)
    rows = b.add(permute("unsort", operand(rows, _AT_EXPERTS), operand("unsort.out", _AT_EXPERTS), b.of(there)), there, is_set=True)
    made = unpermute("merge", operand(rows, _AT_EXPERTS), operand(weights, "b t e"), operand("merge.out", _AT_EXPERTS), b.of(there))
    rows = b.add(made, there, is_set=True, exchanged=once.received / b.rank_rows.computed)
    return b.add(unpermute("unpermute", operand(rows, "b s n h"), None, operand("unpermute.out", _TOKENS), b.of(here)), here)


def _all_gather(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """Tokens are gathered where the experts are, each expert takes its rows, and what they make of a token is added up by a reduction."""
    dims, here = "b_x s_x e h", "b s e h"
    chosen = {"e": size_of(experts.top_k * b.rank_rows.computed)}  # of a token those that it chose
    sizes = b.of(dims) | chosen
    rows = b.add(permute("permute", operand(x, _TOKENS), operand("permute.out", here), sizes), dims)
    each = "b_x s_x k e"
    made = permute("permute_weights", operand(weights, "b s k"), operand("permute_weights.out", "b s e"), b.of(each) | chosen)
    rows = _run(b, experts, rows, weights=b.add(made, each, itemsize=_FP32))
    return b.add(unpermute("unpermute", operand(rows, here), None, operand("unpermute.out", _TOKENS), sizes), dims)


def _fused(b: DecoderBuilder, experts: Experts, x: str, weights: str) -> str:
    """One call for all that lies between a token and what its experts make of it: where experts lie is no axis of the graph's."""
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
    made = routed_experts("experts", inputs, operand("experts.out", _TOKENS), b.of(dims), top_k=experts.top_k)
    return b.add(made, dims)


def _run(b: DecoderBuilder, experts: Experts, rows: str, *, weights: str = "") -> str:
    """The two grouped products and what lies between them: rows[b,t,e,h] -> rows[b,t,e,h].

    weights   [b, t, e] of rows that are weighted here: by the activation's kernel where halves are multiplied, by one of its own where not
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
    made = gated("experts_activation", b.model.activation, operand(up, wide), weighted, out, b.of(dims), apart=apart)
    down = b.linear("experts_down", b.add(made, dims), "b_x t e w h", "b t e w", "e h w", 2, _AT_EXPERTS, grouped=True, part="experts")
    if experts.bias:
        down = b.bias("experts_down", down, "b_x t e h", _AT_EXPERTS, "e h")
    return down


def _shared(b: DecoderBuilder, experts: Experts, x: str) -> str:
    """Experts that every token runs: a dense branch, whose output a gate may scale."""
    model = b.model

    def wide(name: str) -> str:
        out = b.linear(name, x, "b s u h", _TOKENS, "u h", 1, "b s u", part="dense")
        return b.bias(name, out, "b s u", "b s u", "u") if experts.bias else out

    if experts.gated:
        gate, up = wide("shared_gate_proj"), wide("shared_up_proj")
        y = b.pointwise("shared_activation", model.activation, [(gate, "b s u")], "b s u")
        y = b.pointwise("shared_product", "mul", [(y, "b s u"), (up, "b s u")], "b s u")
    else:
        y = b.pointwise("shared_activation", model.activation, [(wide("shared_up_proj"), "b s u")], "b s u")
    y = b.linear("shared_down_proj", y, "b s u h", "b s u", "h u", 1, _TOKENS, part="dense")
    if experts.bias:
        y = b.bias("shared_down_proj", y, "b s_res h", _TOKENS, "h")
    if not experts.shared_gate:
        return y
    gate = b.linear("shared_gate", x, "b s_res o h", _TOKENS, "o h", 1, "b s o", part="other")
    gate = b.pointwise("shared_gate_sigmoid", "sigmoid", [(gate, "b s o")], "b s_res o")
    return b.pointwise("shared_gate_product", "mul", [(y, _TOKENS), (gate, "b s o")], "b s_res h o")
