"""Attention masks of imported modules: the keys that each query attends to, computed where the mask depends on sizes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from perfmodel.execute.importer.exported_module import operator_name
from perfmodel.workload.imported.graph import Reach, SeenKeys

if TYPE_CHECKING:
    from torch.fx import Node

_MOST_ENTRIES = 2**24  # 4,096 queries x 4,096 keys
_MAKES_SCORES = ("matmul", "bmm", "einsum", "baddbmm", "mm", "")
#: Operators that use only the shape of their first tensor.
_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"})
_PARTS = frozenset({"slice", "select", "view", "unsqueeze", "squeeze", "expand", "narrow", "transpose", "diagonal"})


class Masks:
    """Masks of one exported program. `values`: constant tensors by node."""

    def __init__(self) -> None:
        self.values: dict[Any, torch.Tensor | None] = {}

    def seen_by(self, node: Node, arguments: Mapping[str, Any]) -> SeenKeys:
        """Return the keys seen by a call of scaled_dot_product_attention with these arguments."""
        queries = int(node.args[0].meta["val"].shape[-2])
        if arguments.get("is_causal"):
            return SeenKeys(reach=Reach.CAUSAL)
        mask = arguments.get("attn_mask")
        if not isinstance(mask, torch.fx.Node):
            return SeenKeys(reach=Reach.CAUSAL if queries == 1 else Reach.ALL)
        with unset_fake_temporarily():
            value = self._value(mask)
            return SeenKeys() if value is None else _read(value)

    def under(self, softmax: Any) -> SeenKeys:
        """Return the keys seen by a softmax of scores, from the mask that is added to or filled into them; unknown if none is found."""
        with unset_fake_temporarily():
            scores = softmax.args[0]
            while isinstance(scores, torch.fx.Node) and operator_name(scores) not in _MAKES_SCORES:
                name, mask = operator_name(scores).removesuffix("_"), None
                if name in ("masked_fill", "where"):
                    mask = self._value(scores.args[name == "masked_fill"])
                    keeps_marked = name == "where" and self._value(scores.args[1]) is None
                    mask = mask if keeps_marked or mask is None else ~mask
                elif name == "add":
                    known = [value for source in scores.all_input_nodes if (value := self._value(source)) is not None]
                    if len(known) == 1 and known[0].is_floating_point() and known[0].ndim > 1:
                        mask = known[0]
                if mask is not None:
                    return _read(mask)
                scores = next((source for source in scores.all_input_nodes if self._value(source) is None), None)
        return SeenKeys()

    def _value(self, mask: object) -> torch.Tensor | None:
        """Return the mask's values; None if they depend on parameters or inputs, or if it is too large."""
        if not isinstance(mask, torch.fx.Node):
            return torch.as_tensor(mask)
        wanted, needed = [mask], set()
        while wanted:
            node = wanted.pop()
            if node in needed or node in self.values:
                continue
            needed.add(node)
            wanted += [] if operator_name(node) in _LIKE else node.all_input_nodes
        for node in sorted(needed):
            self.values[node] = None if _is_written(node, needed) else self._computed(node)
        return self.values[mask]

    def _computed(self, node: Node) -> torch.Tensor | None:
        value = node.meta.get("val")
        if node.op != "call_function" or (isinstance(value, torch.Tensor) and value.numel() > _MOST_ENTRIES):
            return None

        def known(argument: object) -> Any:
            if operator_name(node) in _LIKE and argument is node.args[0]:
                return torch.empty(argument.meta["val"].shape, dtype=argument.meta["val"].dtype)
            value = self.values.get(argument)
            if value is None:
                raise LookupError
            return value

        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known)
            result = node.target(*args, **kwargs)
        except Exception:  # any operator may fail on unknown values
            return None
        return None if isinstance(result, FakeTensor) or (isinstance(result, torch.Tensor) and result.is_meta) else result


def _read(mask: torch.Tensor) -> SeenKeys:
    """Return the keys seen under a mask [.., s, z] of booleans, or of numbers that are added to the scores."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return SeenKeys()
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.reshape(-1, *seen.shape[-2:])
    rows = torch.arange(seen.shape[-1])
    earlier = rows[None] <= rows[:, None]
    most = int(seen[0].sum(-1).max())
    forms = {
        SeenKeys(reach=Reach.CAUSAL): earlier,
        SeenKeys(reach=Reach.WINDOW, num_keys=most): earlier & (rows[None] > rows[:, None] - most),
        SeenKeys(reach=Reach.CHUNK, num_keys=most): earlier & (rows[None] // max(most, 1) == rows[:, None] // max(most, 1)),
        SeenKeys(reach=Reach.ALL): torch.ones_like(earlier),
    }
    return next((form for form, keys in forms.items() if bool((seen == keys).all())), SeenKeys(reach=Reach.OTHER))


def _is_written(node: Node, known: set[Any]) -> bool:
    """Return whether an operator outside `known` writes into the tensor or a part of it, so that its value is not its node's result."""
    others = [user for user in node.users if user not in known]
    return any(operator_name(user).endswith("_") or (operator_name(user) in _PARTS and _is_written(user, known)) for user in others)
