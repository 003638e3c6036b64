"""Valid degrees of a rule set: axes must divide the dims that they shard, and an axis without rules has one rank.

The conditions follow from which axes shard which dims, not from the name of the rule set.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.rules import RuleSet
from perfmodel.parallel.algebra.sharding import AXIS_PARTS
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.decoder.builder import LOGICAL, sizes_of

_TP = AXIS_PARTS["tp"]
_HEADS = ("kv_heads", "attn_kv_heads"), ("q_per_kv", "attn_q_per_kv")
_SEQUENCE = ("s_res", "s", "s_query", "s_key", "s_scan")
#: Dim -> name of its size in messages; `seq_len` marks the dims of the sequence.
_FIELDS = {
    "ffn": "intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "hidden": "hidden_size",
    "kv_heads": "num_key_value_heads",
    "attn_kv_heads": "num_key_value_heads",
    "q_per_kv": "num_attention_heads/num_key_value_heads",
    "attn_q_per_kv": "num_attention_heads/num_key_value_heads",
    "state_groups": "the groups of heads with a state",
    "scan_groups": "the groups of heads with a state",
    "positions": "rows of learned positions",
    **dict.fromkeys(_SEQUENCE, "seq_len"),
}


#: The same dim -> dim of a decoder's operators, by whose size its axes are limited.
_DIMS = {logical: word.partition("_")[0] for word, logical in LOGICAL.items() if logical in _FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A rule on degrees: the product of the fine axes must divide `size`; with `is_multiple` it may also be a multiple of it."""

    axes: tuple[str, ...]
    field: str
    size: int
    is_multiple: bool = False

    @property
    def is_sequence(self) -> bool:
        return self.field == "seq_len"

    @property
    def named(self) -> str:
        """Axes under the names of the options: `cp*tp`."""
        return "*".join(dict.fromkeys("tp" if axis in _TP else axis for axis in self.axes))

    def ways(self, fine: dict[str, int]) -> int:
        """Return the parts into which the fine axes cut the dim."""
        return prod(map(fine.__getitem__, self.axes))

    @property
    def reason(self) -> str:
        """Reason for which a space of plans excludes layouts."""
        if self.is_multiple:
            return f"{self.named} neither divides {self.field}={self.size} nor is a multiple of it"
        return f"{self.named} does not divide {self.field}={self.size}"


@session_cache(maxsize=1024)
def conditions(rules: RuleSet, model: TransformerConfig, seq_len: int) -> tuple[Condition, ...]:
    """Return the conditions of the rule set on the degrees of cp and tp for this model, heads first."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    cuts: dict[str, list[tuple[str, ...]]] = {}
    of_keys, of_queries = set[str](), set[str]()
    for name, axes in rules.cuts:
        cuts.setdefault(name, []).append(axes)
        for names, of_heads in zip(_HEADS, (of_keys, of_queries), strict=True):
            of_heads.update(axes if name in names else ())
    result: list[Condition] = []
    if _TP[0] in of_keys and _TP[1] in of_queries:
        result.append(Condition(axes=_TP, field="num_attention_heads", size=heads))
    if not of_keys.union(of_queries).isdisjoint(_TP):
        # tp_kv is the part of tp that divides the key-value heads: each of its ranks has whole heads
        result.append(Condition(axes=_TP, field="num_key_value_heads", size=kv, is_multiple=True))
    sizes = sizes_of(model, seq_len)
    for name, field in _FIELDS.items():
        for axes in cuts.get(name, ()) if _DIMS[name] in sizes else ():
            if axes:
                result.append(Condition(axes=axes, field=field, size=sizes[_DIMS[name]]))
    return tuple(dict.fromkeys(result))


def fine_sizes(model: TransformerConfig, *, cp: int, tp: int) -> dict[str, int]:
    tp_kv = gcd(tp, model.num_key_value_heads)
    return {"cp": cp, "tp_kv": tp_kv, "tp_q": tp // tp_kv, "dp_replicate": 1, "dp_shard": 1}


def present_axes(model: TransformerConfig, *, cp: int, tp: int) -> frozenset[str]:
    """Return the fine axes with several ranks, without the data axes, over which all rule sets shard the batch alike."""
    return frozenset(axis for axis, size in fine_sizes(model, cp=cp, tp=tp).items() if size > 1)


def unused_axis(rules: RuleSet, model: TransformerConfig, *, cp: int, tp: int) -> str:
    """Return an axis of several ranks that shards nothing, so that its ranks would do the same work; "" if there is none."""
    for axis, size in fine_sizes(model, cp=cp, tp=tp).items():
        if size > 1 and axis not in rules.axes:
            return "tp" if axis in _TP else axis
    return ""


def broken(rules: RuleSet, model: TransformerConfig, seq_len: int, *, cp: int, tp: int) -> Condition | None:
    """Return the first condition that these degrees violate."""
    fine = fine_sizes(model, cp=cp, tp=tp)
    for condition in conditions(rules, model, seq_len):
        ways = condition.ways(fine)
        if condition.size % ways and not (condition.is_multiple and ways % condition.size == 0):
            return condition
    return None


def admits(rules: RuleSet, model: TransformerConfig, seq_len: int, *, cp: int, tp: int) -> bool:
    return not unused_axis(rules, model, cp=cp, tp=tp) and broken(rules, model, seq_len, cp=cp, tp=tp) is None
