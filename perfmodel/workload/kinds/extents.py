"""Construction of extents: by dim names, and for sliding windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Data, Extent, OwnTraffic, Pass


def extent(dims: Mapping[str, int], names: Iterable[str]) -> Extent:
    """Return the extent of these dims; unsharded positions ("") are skipped."""
    return tuple((dims[name], name) for name in names if name)


def passes(*extents: Extent) -> tuple[Data, ...]:
    """Return reads or writes of these extents, without operands."""
    return tuple(Data(extent=size) for size in extents)


def reduced_rows(dims: Mapping[str, int], names: Iterable[str], over: Iterable[str], *, values: int = 1) -> Extent:
    """Return `values` numbers for each entry that is left after the reduction of `over`."""
    gone = set(over)
    rows = extent(dims, (name for name in names if name not in gone))
    return ((values, ""), *rows) if values > 1 else rows


def window_output(name: str, size: int, window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the positions of a window along one side: floor((size + 2 padding - dilation (window - 1) - 1) / stride) + 1."""
    for field, value, least in (("window", window, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"operator {name}: {field}={value}: must be a whole number of at least {least}; correct it")
    left = size + 2 * padding - dilation * (window - 1) - 1
    if left < 0:
        raise InputError(f"operator {name}: window={window}: is wider than the padded input of {size + 2 * padding}; use a larger input")
    return left // stride + 1


def halo_rows(window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the rows that a shard needs from its neighbours: `padding` above it, the rest of the window below it.

    Source: sharding algebra, convolution with sharded h: owned rows are stride * outputs, needed stride * (outputs - 1) + window.
    """
    return padding + max(0, dilation * (window - 1) + 1 - stride - padding)


def halo_exchange(dim: str, rows: int, along: Extent) -> tuple[OwnTraffic, ...]:
    """Return the halo exchange: input rows to the neighbours in forward, the same number of gradient rows back in backward.

    Each dim is exchanged separately: with two sharded dims the corners (rows times columns) are not counted.
    """
    if rows == 0:
        return ()
    sent: Extent = ((rows, ""), *along)
    return tuple(OwnTraffic(kind=CollectiveKind.SEND_RECV, over=(dim,), extent=sent, phase=phase) for phase in Pass)
