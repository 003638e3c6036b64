"""The feed-forward of an imported decoder's layer: dense, or a mixture of experts, read from its products.

Experts are told by the operator that chooses among what a product makes (topk, argmax): that product is the router, what it makes is one
entry for each expert, and the operator's output has as many as a token takes. An expert is then its matrices, however they are stored and
whatever order they run in: as modules in a loop, as one tensor with an expert at each first position (in products of all experts, in
grouped ones, in a loop over its parts, or taken by the choices).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.imported.graph import ImportedKind
from perfmodel.workload.imported.wiring import Wiring, is_choice
from perfmodel.workload.layer_specs import Experts, Score

#: What to do where the module does not say how tokens choose.
BY_CONFIG = "give the model's config.json, which says num_experts_per_tok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """act(gate(x)) * up(x), or act(up(x)), and a product down; `number` of them in one."""

    width: int
    gated: bool
    bias: bool
    number: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFeedForward:
    """One of the two."""

    dense: Mlp | None
    experts: Experts | None
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """An operator that picks `top` of `among` entries, for as many rows as it reads entries of."""

    at: int
    router: int
    top: int
    among: int
    entries: int


def read_feed_forward(wiring: Wiring, own: Sequence[int], hidden: int, attention: int, end: int) -> ImportedFeedForward:
    """Feed-forward of a layer's products that are not its attention's and end before vertex `end`. Raises InputError."""
    activation = _activation(wiring, own)
    if not own:
        raise wiring.refused(attention, "is in a layer with 0 products in addition to its own; a feed-forward has two or three")
    choices = [choice for at in range(min(own), end) if (choice := _choice(wiring, at, own)) is not None]
    if choices:
        experts = _experts(wiring, own, hidden, choices)
        return ImportedFeedForward(dense=None, experts=experts, activation=activation)
    several = len(own) > 3 or any(wiring.weights(at).number > 1 for at in own)
    rule = f"is in a layer with {len(own)} products in addition to its own; a feed-forward has two or three"
    if several:
        rule = f"has {len(own)} more products; a feed-forward has two or three, or picks experts (topk, argmax): {BY_CONFIG}"
    if several or len(own) < 2:
        raise wiring.refused(attention, rule)
    dense = _mlp(wiring, own[:-1], own[-1], hidden, 1)
    return ImportedFeedForward(dense=dense, experts=None, activation=activation)


def _mlp(wiring: Wiring, ups: Sequence[int], down: int, hidden: int, experts: int) -> Mlp:
    """Two products up or one of both, and one down; `experts`: what a first position of so many entries counts."""
    above, below = [wiring.weights(at).for_experts(experts) for at in ups], wiring.weights(down).for_experts(experts)
    width, shapes = below.taken, [(each.taken, each.made) for each in above]
    is_plain = shapes == [(hidden, width)]
    is_gated = shapes in ([(hidden, 2 * width)], [(hidden, width)] * 2)
    if below.made != hidden or not (is_plain or is_gated) or {each.number for each in above} != {below.number}:
        text = ", ".join(each.text for each in (*above, below))
        raise wiring.refused(
            ups[0] if ups else down, f"is of a feed-forward with products of {text} entries, which is neither gated nor plain"
        )
    return Mlp(width=width, gated=is_gated, bias=any(each.has_bias for each in (*above, below)), number=below.number)


def _activation(wiring: Wiring, own: Sequence[int]) -> str:
    """By the name of its torch operator, somewhere between the products; gelu where none of them is known."""
    for at in range(min(own), max(own)) if own else ():
        vertex = wiring.vertex(at)
        if vertex.kind is ImportedKind.ELEMENTWISE:
            names = vertex.functions
            known = next((name for name in names if name in ACTIVATIONS), "")
            if known:
                return known
    return "gelu"


# --- experts ----------------------------------------------------------------------------------------------------------------------


def _choice(wiring: Wiring, at: int, own: Sequence[int]) -> _Choice | None:
    """Only of what one of these products alone makes."""
    vertex = wiring.vertex(at)
    if not is_choice(vertex):
        return None
    axis = vertex.unsplit[:1] or vertex.reduced[:1]
    routers = wiring.products_before(at, first=min(own))
    if not axis or len(routers) != 1 or not routers <= set(own):
        return None
    top = vertex.outputs[0].shape[-1] if vertex.function == "topk" else 1
    return _Choice(at=at, router=routers.pop(), top=top, among=vertex.dims[axis[0]], entries=vertex.inputs[0].num_elements)


def _experts(wiring: Wiring, own: Sequence[int], hidden: int, choices: Sequence[_Choice]) -> Experts:
    routers = {choice.router for choice in choices}
    if len(routers) > 1:
        raise wiring.refused(max(routers), "makes what is chosen among, as another product of the layer does; one router is modelled")
    (router,) = routers
    matrix = wiring.weights(router)
    number = matrix.made
    rows = wiring.vertex(router).outputs[0].num_elements // number
    tops = {choice.top for choice in choices if choice.among == number}
    if len(tops) != 1 or matrix.taken != hidden:
        rule = f"makes {number} entries of {matrix.taken}, among which no single operator picks, so that num_experts_per_tok is not known"
        raise wiring.refused(router, f"{rule}; {BY_CONFIG}")
    groups = [choice for choice in choices if choice.among < number and choice.entries == rows * choice.among]
    if len(own) == 1:
        raise wiring.refused(router, f"chooses among {number} experts, and the layer has no other product")
    parts = _parts(wiring, [at for at in own if at != router], hidden, number)
    routed, shared = _distinguished(wiring, router, parts, number)
    gates = [at for at in own if wiring.weights(at).made == 1 and at != router]
    has_softmax = any(
        wiring.vertex(at).kind is ImportedKind.SOFTMAX and router in wiring.products_before(at, first=router)
        for at in range(router, max(own))
    )
    score: Score = "softmax" if has_softmax or not _has_sigmoid(wiring, router, choices) else "sigmoid"
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


def _has_sigmoid(wiring: Wiring, router: int, choices: Sequence[_Choice]) -> bool:
    """Before the choice, or of what was chosen."""
    ways = {at for choice in choices for at in wiring.between(choice.at, first=router)} | set(wiring.out_of.get(choices[-1].at, ()))
    return any("sigmoid" in wiring.vertex(at).functions for at in ways)


def _parts(wiring: Wiring, own: Sequence[int], hidden: int, number: int) -> list[tuple[int, Mlp]]:
    """The feed-forwards of which the layer is made, each with its last product."""
    known = set(own)
    into = {at: wiring.products_into(at, first=min(own)) & known for at in own}
    ups = {at for before in into.values() for at in before}
    found = [(at, _mlp(wiring, sorted(before), at, hidden, number)) for at, before in into.items() if before]
    lonely = [at for at in own if at not in ups and not into[at] and wiring.weights(at).made != 1]
    if lonely:
        raise wiring.refused(lonely[0], f"takes {wiring.weights(lonely[0]).text} in and out, and is no part of an expert")
    return found


def _distinguished(wiring: Wiring, router: int, parts: Sequence[tuple[int, Mlp]], number: int) -> tuple[Mlp, int]:
    """One of the experts, and the width of all that every token runs: experts are as many as the router has entries."""
    counts: Counter[tuple[int, bool, bool]] = Counter()
    for _, part in parts:
        counts[part.width, part.gated, part.bias] += part.number
    routed = [make for make, count in counts.items() if count >= number]
    if len(routed) != 1:
        made = ", ".join(f"{count} of width {make[0]}" for make, count in counts.items()) or "none"
        rule = f"chooses among {number} experts, and the layer has feed-forwards: {made}"
        raise wiring.refused(router, rule)
    (make,) = routed
    counts[make] -= number
    shared = {each: count for each, count in counts.items() if count}
    if any(each[1:] != make[1:] for each in shared):
        raise wiring.refused(router, "chooses among experts that are gated, or have biases, unlike the shared expert")
    width, gated, bias = make
    return Mlp(width=width, gated=gated, bias=bias), sum(each[0] * count for each, count in shared.items())


__all__ = ["ImportedFeedForward", "Mlp", "read_feed_forward"]
