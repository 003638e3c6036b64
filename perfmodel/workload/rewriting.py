"""Rewrite of an operator's extents: sizes or dims of all data that it computes, sends, saves and holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfmodel.workload.graph import CacheAttention, Data, Extent, FusedAttention, Operator, Product, RoutedExperts, Stream, Work


def with_extents(operator: Operator, change: Callable[[Extent], Extent], **fields: object) -> Operator:
    """Return the operator with `change` applied to every extent; `fields` as in `dataclasses.replace`."""

    def data(items: tuple[Data, ...]) -> tuple[Data, ...]:
        return tuple(replace(item, extent=change(item.extent)) for item in items)

    def work(original: Work) -> Work:
        match original:
            case Product():
                tensors = tuple(map(change, original.tensors))
                return replace(
                    original,
                    batch=change(original.batch),
                    m=change(original.m),
                    n=change(original.n),
                    k=change(original.k),
                    tensors=tensors,
                )
            case Stream():
                return replace(original, elements=change(original.elements), accesses=data(original.accesses))
            case FusedAttention():
                batch, heads, kv_heads, queries, keys = map(change, original.extents())
                return replace(original, batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys)
            case CacheAttention():
                return replace(original, heads=change(original.heads), kv_heads=change(original.kv_heads))
            case RoutedExperts():
                return original

    rewritten = {
        "forward": tuple(map(work, operator.forward)),
        "backward": tuple(map(work, operator.backward)),
        "traffic": tuple(replace(collective, extent=change(collective.extent)) for collective in operator.traffic),
        "saved": data(operator.saved),
        "scratch": data(operator.scratch),
    }
    return replace(operator, **{**rewritten, **fields})  # type: ignore[arg-type]
