"""Rewrite of an operator's extents: sizes or dims of all data that it computes, sends, saves and holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfmodel.workload.graph import Operator
from perfmodel.workload.work import CacheAttention, Data, Extent, FusedAttention, Product, RoutedExperts, Stream, Work


def with_extents(operator: Operator, change: Callable[[Extent], Extent], **fields: object) -> Operator:
    """Return the operator with `change` applied to every extent; `fields` as in `dataclasses.replace`."""

    def data(items: tuple[Data, ...]) -> tuple[Data, ...]:
        return tuple(replace(item, extent=change(item.extent)) for item in items)

    def work(old: Work) -> Work:
        match old:
            case Product():
                tensors = tuple(map(change, old.tensors))
                return replace(old, batch=change(old.batch), m=change(old.m), n=change(old.n), k=change(old.k), tensors=tensors)
            case Stream():
                return replace(old, elements=change(old.elements), accesses=data(old.accesses))
            case FusedAttention():
                batch, heads, kv_heads, queries, keys = map(change, (old.batch, old.heads, old.kv_heads, old.queries, old.keys))
                return replace(old, batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys)
            case CacheAttention():
                return replace(old, heads=change(old.heads), kv_heads=change(old.kv_heads))
            case RoutedExperts():
                return old

    rewritten = {
        "forward": tuple(map(work, operator.forward)),
        "backward": tuple(map(work, operator.backward)),
        "traffic": tuple(replace(collective, extent=change(collective.extent)) for collective in operator.traffic),
        "saved": data(operator.saved),
        "scratch": data(operator.scratch),
    }
    return replace(operator, **{**rewritten, **fields})  # type: ignore[arg-type]
