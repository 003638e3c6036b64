"""The feed-forward of an imported decoder's layer: dense, or a mixture of experts, recognised by its products.

Experts are recognised by the operator that selects among a product's outputs (topk, argmax). That product is the router, with one output
per expert, and the selection's output has one entry per expert of a token. The expert matrices may be stored and run in any form: modules
in a loop, or one tensor with a leading expert position (in batched or grouped products, in a loop over its parts, or indexed by the
selection).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.wiring import Wiring, is_choice
from perfmodel.workload.layer_specs import Experts, Score

#: Remedy where the module does not determine the number of experts per token.
BY_CONFIG = "give the model's config.json, which says num_experts_per_tok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """act(gate(x)) * up(x), or act(up(x)), and a down product; `number` of them in one tensor."""

    width: int
    gated: bool
    bias: bool
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFeedForward:
    """A dense MLP or a mixture of experts."""

    dense: Mlp | None
    experts: Experts | None
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """An operator that picks `top` of `among` entries; `entries`: all entries that it reads."""

    at: int
    router: int
    top: int
    among: int
    entries: int


def read_feed_forward(wiring: Wiring, products: Sequence[int], hidden: int, attention: int, end: int) -> ImportedFeedForward:
    """Return the feed-forward of a layer from its non-attention products before vertex `end`. Raises InputError."""
    if not products:
        raise wiring.refused(attention, "is in a layer with 0 products in addition to its own; a feed-forward has two or three")
    operators = [wiring.vertex(at) for at in range(min(products), max(products))]
    names = [name for vertex in operators if vertex.kind is ImportedKind.ELEMENTWISE for name in vertex.functions]
    activation = next((name for name in names if name in ACTIVATIONS), "gelu")
    choices = []
    for at in range(min(products), end):  # selections that read the output of exactly one of the products
        vertex = wiring.vertex(at)
        axis = vertex.unsplit[:1] or vertex.reduced[:1]
        if axis and is_choice(vertex):
            routers = wiring.products_before(at, first=min(products))
            if len(routers) == 1 and routers <= set(products):
                top = vertex.outputs[0].shape[-1] if vertex.function == "topk" else 1
                entries = vertex.inputs[0].num_elements
                choices.append(_Choice(at=at, router=min(routers), top=top, among=vertex.dims[axis[0]], entries=entries))
    if choices:
        experts = _experts(wiring, products, hidden, choices)
        return ImportedFeedForward(dense=None, experts=experts, activation=activation)
    several = len(products) > 3 or any(wiring.weights(at).number > 1 for at in products)
    rule = f"is in a layer with {len(products)} products in addition to its own; a feed-forward has two or three"
    if several:
        rule = f"has {len(products)} more products; a feed-forward has two or three, or picks experts (topk, argmax): {BY_CONFIG}"
    if several or len(products) < 2:
        raise wiring.refused(attention, rule)
    dense = _mlp(wiring, products[:-1], products[-1], hidden, 1)
    return ImportedFeedForward(dense=dense, experts=None, activation=activation)


def _mlp(wiring: Wiring, ups: Sequence[int], down: int, hidden: int, experts: int) -> Mlp:
    """Return the MLP of one or two up products (gate and up may be fused) and a down product; `experts`: size of an expert position."""
    above, below = [wiring.weights(at).for_experts(experts) for at in ups], wiring.weights(down).for_experts(experts)
    width, shapes = below.in_features, [(matrices.in_features, matrices.out_features) for matrices in above]
    is_plain = shapes == [(hidden, width)]
    is_gated = shapes in ([(hidden, 2 * width)], [(hidden, width)] * 2)
    if below.out_features != hidden or not (is_plain or is_gated) or {matrices.number for matrices in above} != {below.number}:
        text = ", ".join(matrices.text for matrices in (*above, below))
        raise wiring.refused(
            ups[0] if ups else down, f"is of a feed-forward with products of {text} entries, which is neither gated nor plain"
        )
    return Mlp(width=width, gated=is_gated, bias=any(matrices.has_bias for matrices in (*above, below)), number=below.number)


# --- experts ----------------------------------------------------------------------------------------------------------------------


def _experts(wiring: Wiring, products: Sequence[int], hidden: int, choices: Sequence[_Choice]) -> Experts:
    routers = {choice.router for choice in choices}
    if len(routers) > 1:
        raise wiring.refused(max(routers), "makes what is chosen among, as another product of the layer does; one router is modelled")
    (router,) = routers
    matrix = wiring.weights(router)
    number = matrix.out_features
    rows = wiring.vertex(router).outputs[0].num_elements // number
    tops = {choice.top for choice in choices if choice.among == number}
    if len(tops) != 1 or matrix.in_features != hidden:
        rule = f"makes {number} entries of {matrix.in_features}, among which no single operator picks"
        raise wiring.refused(router, f"{rule}, so that num_experts_per_tok is not known; {BY_CONFIG}")
    groups = [choice for choice in choices if choice.among < number and choice.entries == rows * choice.among]
    if len(products) == 1:
        raise wiring.refused(router, f"chooses among {number} experts, and the layer has no other product")
    routed, shared = _routed_and_shared(wiring, router, [at for at in products if at != router], hidden, number)
    gates = [at for at in products if wiring.weights(at).out_features == 1 and at != router]
    has_softmax = any(
        wiring.vertex(at).kind is ImportedKind.SOFTMAX and router in wiring.products_before(at, first=router)
        for at in range(router, max(products))
    )
    # A sigmoid precedes the selection, or follows it.
    ways = {at for choice in choices for at in wiring.between(choice.at, first=router)} | set(wiring.out_of[choices[-1].at])
    has_sigmoid = any("sigmoid" in wiring.vertex(at).functions for at in ways)
    score: Score = "sigmoid" if has_sigmoid and not has_softmax else "softmax"
    return Experts(
        num_experts=number,
        top_k=tops.pop(),
        width=routed.width,
        gated=routed.gated,
        bias=routed.bias,
        shared_width=shared,
        shared_gate=bool(gates) and shared > 0,
        router_bias=matrix.has_bias,
        score=score,
        num_groups=groups[0].among if groups else 1,
        top_groups=groups[0].top if groups else 1,
    )


def _routed_and_shared(wiring: Wiring, router: int, products: Sequence[int], hidden: int, number: int) -> tuple[Mlp, int]:
    """Return one routed expert and the total width of shared ones: the router's outputs are the number of routed experts."""
    known = set(products)
    into = {at: wiring.products_into(at, first=min(products)) & known for at in products}
    ups = {at for before in into.values() for at in before}
    parts = [_mlp(wiring, sorted(before), at, hidden, number) for at, before in into.items() if before]
    lonely = [at for at in products if at not in ups and not into[at] and wiring.weights(at).out_features != 1]
    if lonely:
        raise wiring.refused(lonely[0], f"takes {wiring.weights(lonely[0]).text} in and out, and is no part of an expert")
    counts: Counter[tuple[int, bool, bool]] = Counter()
    for part in parts:
        counts[part.width, part.gated, part.bias] += part.number
    routed = [shape for shape, count in counts.items() if count >= number]
    if len(routed) != 1:
        listing = ", ".join(f"{count} of width {shape[0]}" for shape, count in counts.items()) or "none"
        rule = f"chooses among {number} experts, and the layer has feed-forwards: {listing}"
        raise wiring.refused(router, rule)
    (expert,) = routed
    counts[expert] -= number
    shared = {shape: count for shape, count in counts.items() if count}
    if any(shape[1:] != expert[1:] for shape in shared):
        raise wiring.refused(router, "chooses among experts that are gated, or have biases, unlike the shared expert")
    width, gated, bias = expert
    return Mlp(width=width, gated=gated, bias=bias), sum(shape[0] * count for shape, count in shared.items())


__all__ = ["ImportedFeedForward", "Mlp", "read_feed_forward"]
