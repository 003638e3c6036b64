"""Which keys a query of an imported attention sees, where its mask is made of nothing but sizes: then it is computed, and looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from perfmodel.workload.imported.graph import Reach, SeenKeys

if TYPE_CHECKING:
    from torch.fx import Node

_MOST_ENTRIES = 2**24  # of 4,096 queries and as many keys
_MAKES_SCORES = ("matmul", "bmm", "einsum", "baddbmm", "mm", "")
#: Operators that take of their first tensor its shape alone.
_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"})
_PARTS = frozenset({"slice", "select", "view", "unsqueeze", "squeeze", "expand", "narrow", "transpose", "diagonal"})


class Masks:
    """Masks of one exported program; `values` are known tensors by their nodes."""

    def __init__(self) -> None:
        self.values: dict[Any, torch.Tensor | None] = {}

    def seen_by(self, node: Node, arguments: Mapping[str, Any]) -> SeenKeys:
        """Keys seen by a call of scaled_dot_product_attention with these arguments."""
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
        """Keys seen by a softmax of scores, from what was added to them or put in place of masked ones; else not known."""
        with unset_fake_temporarily():
            scores = softmax.args[0]
            while isinstance(scores, torch.fx.Node) and _name(scores) not in _MAKES_SCORES:
                mask = self._added_to(scores)
                if mask is not None:
                    return _read(mask)
                scores = next((each for each in scores.all_input_nodes if self._value(each) is None), None)
        return SeenKeys()

    def _added_to(self, node: Node) -> torch.Tensor | None:
        """The mask that one operator puts on scores, which themselves have no value here."""
        name = _name(node).removesuffix("_")
        if name in ("masked_fill", "where"):
            mask = self._value(node.args[name == "masked_fill"])
            is_seen = name == "where" and self._value(node.args[1]) is None
            return mask if is_seen or mask is None else ~mask
        if name != "add":
            return None
        known = [value for each in node.all_input_nodes if (value := self._value(each)) is not None]
        return known[0] if len(known) == 1 and known[0].is_floating_point() and known[0].ndim > 1 else None

    def _value(self, mask: Any) -> torch.Tensor | None:
        """The mask itself; None where it depends on what the module holds or is called with, or is too large."""
        if not isinstance(mask, torch.fx.Node):
            return torch.as_tensor(mask)
        wanted, needed = [mask], set()
        while wanted:
            node = wanted.pop()
            if node in needed or node in self.values:
                continue
            needed.add(node)
            wanted += [] if _name(node) in _LIKE else node.all_input_nodes
        for node in sorted(needed):
            self.values[node] = None if _is_written(node, needed) else self._computed(node)
        return self.values[mask]

    def _computed(self, node: Node) -> torch.Tensor | None:
        if node.op != "call_function" or _entries(node.meta.get("val")) > _MOST_ENTRIES:
            return None

        def known(each: object) -> Any:
            if _name(node) in _LIKE and each is node.args[0]:
                return torch.empty(each.meta["val"].shape, dtype=each.meta["val"].dtype)
            found = self.values.get(each)
            if found is None:
                raise LookupError
            return found

        try:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known)
            found = node.target(*args, **kwargs)
        except Exception:  # what is not known stays so: any operator may refuse
            return None
        return None if isinstance(found, FakeTensor) or (isinstance(found, torch.Tensor) and found.is_meta) else found


def _read(mask: torch.Tensor) -> SeenKeys:
    """Keys seen by a mask [.., s, z] of truth values, or of numbers that are added to the scores."""
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
    """Whether something writes into a tensor, or into a part of it, that is not asked for: it is not what its node makes then."""
    others = [each for each in node.users if each not in known]
    return any(_name(each).endswith("_") or (_name(each) in _PARTS and _is_written(each, known)) for each in others)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.rpartition("::")[2])


def _entries(value: object) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0
