"""Data-dependent sizes of an export, such as the number of tokens per expert, replaced by even shares.

T tokens that choose k of E experts each make T k choices; each expert gets T k / E. The mask that selects the tokens of an expert has
that number of nonzero entries. Every operator then has a size, and the work of all experts together equals that of the choices.
This is exact for a balanced router (Shazeer et al. 2017, arXiv 1701.06538, section 4, trains it to be). Other selections have no size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from perfmodel.execute.importer.exported_module import operator_name

if TYPE_CHECKING:
    from torch.fx import Node

EVEN_SHARE = "even_share"
#: Functions whose output has one entry for each nonzero of a mask: the argument number of the mask, or of the indices among which it is.
_SELECTS = {"where": 0, "nonzero": 0, "masked_select": 1, "__getitem__": 1}
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


class EvenShares(TorchFunctionMode):
    """Mode of an export: a mask with a known share of nonzero entries selects that share.

    The number is set before torch looks for it (`nonzero_memo` of a fake tensor), so the export has no unknown size: one for each expert
    takes more than half of its time.
    The node of such a mask has `EVEN_SHARE` in its `meta`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        number = _SELECTS.get(name)
        if number is not None and number < len(args) and (name != "where" or len(args) == 1):
            for index in tree_leaves(args[number]):
                if isinstance(index, FakeTensor) and (name != "__getitem__" or index.dtype is torch.bool):
                    self._settle(index)
        return func(*args, **(kwargs or {}))

    def _settle(self, mask: FakeTensor) -> None:
        mode = get_proxy_mode()
        if mode is None or mask.nonzero_memo is not None:
            return
        slot = get_proxy_slot(mask, mode.tracer, None)
        share = None if slot is None else _share(slot.proxy.node)
        if share is not None:
            mask.nonzero_memo = max(1, ceil(share * mask.numel()))
            slot.proxy.node.meta[EVEN_SHARE] = share


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
