"""An operator with its extents written anew: sizes or dims of everything that it computes, sends, keeps and holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfmodel.workload.graph import CacheAttention, Data, Extent, FusedAttention, Operator, Product, RoutedExperts, Stream, Work


def with_extents(operator: Operator, change: Callable[[Extent], Extent], **fields: object) -> Operator:
    """`change` on every extent; `fields` as in `dataclasses.replace`, where dims have other sizes or names."""

    def data(items: tuple[Data, ...]) -> tuple[Data, ...]:
        return tuple(replace(each, extent=change(each.extent)) for each in items)

    def work(each: Work) -> Work:
        match each:
            case Product():
                tensors = tuple(map(change, each.tensors))
                return replace(each, batch=change(each.batch), m=change(each.m), n=change(each.n), k=change(each.k), tensors=tensors)
            case Stream():
                return replace(each, elements=change(each.elements), accesses=data(each.accesses))
            case FusedAttention():
                batch, heads, kv_heads, queries, keys = map(change, each.extents())
                return replace(each, batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys)
            case CacheAttention():
                return replace(each, heads=change(each.heads), kv_heads=change(each.kv_heads))
            case RoutedExperts():
                return each

    rewritten = {
        "forward": tuple(map(work, operator.forward)),
        "backward": tuple(map(work, operator.backward)),
        "traffic": tuple(replace(own, extent=change(own.extent)) for own in operator.traffic),
        "saved": data(operator.saved),
        "scratch": data(operator.scratch),
    }
    return replace(operator, **{**rewritten, **fields})  # type: ignore[arg-type]
