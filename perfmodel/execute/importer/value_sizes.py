"""Sizes of an exported program that only values tell: how many tokens chose an expert. They are taken as even shares.

Of the T k choices that T tokens make among E experts, each expert gets T k / E: the mask that picks its tokens has that many entries that
are not zero. So every operator has a size, and the work of all experts together is that of the choices, which is exact where the router
is balanced (Shazeer et al. 2017, arXiv 1701.06538, section 4, trains it to be). What is picked in another way has no size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

#: Operators that hand on which share of their first input is not zero.
_KEEPS_SHARE = frozenset(
    {
        "select", "slice", "permute", "transpose", "t", "view", "reshape", "flatten", "squeeze", "unsqueeze", "to", "_to_copy", "bool",
        "contiguous", "clone", "detach", "unbind", "split", "chunk", "expand", "alias", "ne", "gt", "greater",
    }
)  # fmt: skip
#: Operators whose entries are numbers of entries along a dim: which output, and the number of the argument that names the dim.
_SEARCHES = {"topk": (1, 2, -1), "sort": (1, 1, -1), "argsort": (0, 1, -1), "argmax": (0, 1, None), "max": (1, 1, None)}
_FEWER = frozenset({"any", "sum", "amax"})


def settle_sizes(program: ExportedProgram) -> int:
    """Every tensor of the program that has such a size gets an even one, in place, else it keeps its symbol. How many sizes there are."""
    sizes: dict[Any, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if value is None:
            continue
        for symbol in _symbols(value) - set(sizes):
            share = _picked(node)
            if share is not None:
                sizes[symbol] = max(1, ceil(share))
        node.meta["val"] = _settled(value, sizes)
    return len(sizes)


def _picked(node: Node) -> float | None:
    """How many entries an operator picks by their values."""
    mask = _mask(node)
    share = None if mask is None else _share(mask)
    return None if share is None else share * mask.meta["val"].numel()


def _mask(node: Node) -> Any:
    name, tensors = _name(node), [each for each in node.args if isinstance(each, torch.fx.Node)]
    if name in ("nonzero", "nonzero_numpy") or (name == "where" and len(tensors) == 1):
        return tensors[0]
    if name == "masked_select":
        return tensors[1]
    if name == "index":
        masks = [each for each in node.args[1] if each is not None and each.meta["val"].dtype == torch.bool]
        return masks[0] if len(masks) == 1 else None
    return None


def _share(node: Node) -> float | None:
    """Share of a tensor's entries that are not zero if all choices are equally frequent; None: not known."""
    name = _name(node)
    if name == "getitem" or name in _KEEPS_SHARE:
        is_of_zero = name not in ("ne", "gt", "greater") or node.args[1] == 0
        return _share(node.args[0]) if is_of_zero else None
    if name == "one_hot":
        return 1.0 / int(node.meta["val"].shape[-1])
    if name == "eq" and not isinstance(node.args[1], torch.fx.Node):
        entries = _num_values(node.args[0])
        return None if entries is None else 1.0 / entries
    if name in _FEWER:
        before, after = node.args[0].meta["val"].numel(), node.meta["val"].numel()
        share = _share(node.args[0])
        return None if share is None else min(1.0, share * before / after)
    if name in ("scatter", "scatter_") and _name(node.args[0]) in ("zeros", "zeros_like", "new_zeros"):
        return float(node.args[2].meta["val"].numel() / node.meta["val"].numel())
    return None


def _num_values(node: Node) -> int | None:
    """Among how many numbers the whole numbers of a tensor are: those of the entries that were searched."""
    number = 0
    while _name(node) not in _SEARCHES:
        if _name(node) != "getitem" and _name(node) not in _KEEPS_SHARE:
            return None
        number = node.args[1] if _name(node) == "getitem" else number
        node = node.args[0]
    output, place, default = _SEARCHES[_name(node)]
    searched = node.args[0].meta["val"]
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
    return int(searched.shape[dim]) if isinstance(dim, int) and number == output else None


def _name(node: Node) -> str:
    """Without namespace and overload; "" of what the caller gives."""
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema is not None else str(getattr(node.target, "__name__", ""))


def _symbols(value: object) -> set[Any]:
    if isinstance(value, torch.Tensor):
        return {symbol for size in value.shape if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    if isinstance(value, (list, tuple)):
        return {symbol for each in value for symbol in _symbols(each)}
    return set()


def _settled(value: object, sizes: Mapping[Any, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_settled(each, sizes) for each in value)
    if isinstance(value, torch.SymInt):
        found = value.node.expr.subs(sizes)
        return int(found) if found.is_Integer else value
    if not isinstance(value, torch.Tensor) or all(type(size) is int for size in value.shape):
        return value
    shape = [_settled(size, sizes) for size in value.shape]
    if not all(type(size) is int for size in shape):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(shape, dtype=value.dtype, device=value.device)
