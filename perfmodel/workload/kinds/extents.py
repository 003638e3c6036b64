"""Extents as the kinds write them: by dim names, and those of a sliding window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.errors import InputError
from perfmodel.workload.graph import Data, Extent, OwnTraffic, Pass


def extent(dims: Mapping[str, int], names: Iterable[str]) -> Extent:
    """The product of these dims; a position that no dim cuts ("") is left out."""
    return tuple((dims[name], name) for name in names if name)


def passes(*extents: Extent) -> tuple[Data, ...]:
    """So many elements read or written, of no operand in particular."""
    return tuple(Data(extent=each) for each in extents)


def reduced_rows(dims: Mapping[str, int], names: Iterable[str], over: Iterable[str], *, values: int = 1) -> Extent:
    """`values` numbers for each entry that is left when `over` is reduced."""
    gone = set(over)
    rows = extent(dims, (name for name in names if name not in gone))
    return ((values, ""), *rows) if values > 1 else rows


def window_output(name: str, size: int, window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Positions of a window along one side: floor((size + 2 padding - dilation (window - 1) - 1) / stride) + 1."""
    for field, value, least in (("window", window, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"operator {name}: {field}={value}: must be a whole number of at least {least}; correct it")
    left = size + 2 * padding - dilation * (window - 1) - 1
    if left < 0:
        raise InputError(f"operator {name}: window={window}: is wider than the padded input of {size + 2 * padding}; use a larger input")
    return left // stride + 1


def halo_rows(window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Rows of its neighbours that a share needs: `padding` above it, the rest of the window below it.

    Source: sharding algebra, convolution with h sharded: owned rows are stride * outputs, needed stride * (outputs - 1) + window.
    """
    return padding + max(0, dilation * (window - 1) + 1 - stride - padding)


def halo_exchange(dim: str, rows: int, along: Extent) -> tuple[OwnTraffic, ...]:
    """The rows of the input to the neighbours in forward, as many rows of its gradient back in backward.

    Along each dim by itself: where two dims are cut at once the corners (rows times columns) are left out.
    """
    if rows == 0:
        return ()
    sent: Extent = ((rows, ""), *along)
    return tuple(OwnTraffic(kind=CollectiveKind.SEND_RECV, over=(dim,), extent=sent, phase=phase) for phase in Pass)
