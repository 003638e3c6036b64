"""Data-dependent sizes of an exported program, such as the number of tokens per expert, replaced by even shares.

T tokens that choose k of E experts each make T k choices; each expert gets T k / E. The mask that selects the tokens of an expert has
that number of nonzero entries. Every operator then has a size, and the work of all experts together equals that of the choices.
This is exact for a balanced router (Shazeer et al. 2017, arXiv 1701.06538, section 4, trains it to be). Other selections have no size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from perfmodel.execute.importer.exported_module import operator_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

#: Operators whose output has the same share of nonzero entries as their first input.
_KEEPS_SHARE = frozenset(
    {
        "select", "slice", "permute", "transpose", "t", "view", "reshape", "flatten", "squeeze", "unsqueeze", "to", "_to_copy", "bool",
        "contiguous", "clone", "detach", "unbind", "split", "chunk", "expand", "alias", "ne", "gt", "greater",
    }
)  # fmt: skip
#: Operators that return indices along a dim: the output with the indices, the argument number of the dim, and its default.
_SEARCHES = {"topk": (1, 2, -1), "sort": (1, 1, -1), "argsort": (0, 1, -1), "argmax": (0, 1, None), "max": (1, 1, None)}
_FEWER = frozenset({"any", "sum", "amax"})


def settle_sizes(program: ExportedProgram) -> int:
    """Replace each data-dependent size of the program by an even share, in place, where one is known. Return the number of sizes."""
    sizes: dict[Any, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if value is None:
            continue
        for symbol in _symbols(value) - set(sizes):
            mask = _mask(node)
            share = None if mask is None else _share(mask)
            if share is not None:
                sizes[symbol] = max(1, ceil(share * mask.meta["val"].numel()))
        node.meta["val"] = _settled(value, sizes)
    return len(sizes)


def _mask(node: Node) -> Any:
    """Return the mask by whose values an operator selects entries; None for any other."""
    name, tensors = _name(node), [argument for argument in node.args if isinstance(argument, torch.fx.Node)]
    if name in ("nonzero", "nonzero_numpy") or (name == "where" and len(tensors) == 1):
        return tensors[0]
    if name == "masked_select":
        return tensors[1]
    if name == "index":
        masks = [mask for mask in node.args[1] if mask is not None and mask.meta["val"].dtype == torch.bool]
        return masks[0] if len(masks) == 1 else None
    return None


def _share(node: Node) -> float | None:
    """Return the share of nonzero entries of a tensor if all choices are equally frequent; None if unknown."""
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
    """Return the number of possible values of an index tensor: the size of the searched dim."""
    number = 0
    while _name(node) not in _SEARCHES:
        if _name(node) != "getitem" and _name(node) not in _KEEPS_SHARE:
            return None
        number = node.args[1] if _name(node) == "getitem" else number
        node = node.args[0]
    output, position, default = _SEARCHES[_name(node)]
    searched = node.args[0].meta["val"]
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return int(searched.shape[dim]) if isinstance(dim, int) and number == output else None


def _name(node: Node) -> str:
    """Return the operator's name; that of the function for one outside torch, such as `getitem`, and "" for an input."""
    return operator_name(node) or str(getattr(node.target, "__name__", ""))


def _symbols(value: object) -> set[Any]:
    if isinstance(value, torch.Tensor):
        return {symbol for size in value.shape if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in _symbols(item)}
    return set()


def _settled(value: object, sizes: Mapping[Any, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_settled(item, sizes) for item in value)
    if isinstance(value, torch.SymInt):
        number = value.node.expr.subs(sizes)
        return int(number) if number.is_Integer else value
    if not isinstance(value, torch.Tensor) or all(type(size) is int for size in value.shape):
        return value
    shape = [_settled(size, sizes) for size in value.shape]
    if not all(type(size) is int for size in shape):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(shape, dtype=value.dtype, device=value.device)
