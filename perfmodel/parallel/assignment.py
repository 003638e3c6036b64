"""Comparison of two rule sets: whether they shard all operators of a model alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from perfmodel.foundation.session import session_cache
from perfmodel.parallel.algebra.rules import RuleSet, load_rule_set
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.transformer import build_graph


def cuts_alike(rules: RuleSet, other: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> bool:
    """Return whether both shard every operator of this model alike, where only these fine axes have more than one rank."""
    if rules.operators or other.operators:
        return _cuts(rules, model, attention, axes) == _cuts(other, model, attention, axes)
    return _rules_for_model(rules, model, axes) == _rules_for_model(other, model, axes)


def cuts_as(names: Iterable[str], rules: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> str:
    """Return the first of these shipped rule sets that shards as `rules` does; "" if none does."""
    return next((name for name in names if cuts_alike(rules, load_rule_set(name), model, attention, axes)), "")


def _rules_for_model(rules: RuleSet, model: TransformerConfig, axes: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the rules for this model without those of dims that it lacks, of a rule set without rules for single operators."""
    lacking = {name for names, has in _OF_SOME_MODELS if not has(model) for name in names}
    return {name: cut for name, cut in rules.among(axes).items() if name not in lacking}


#: Dims that only some models have.
_OF_SOME_MODELS: tuple[tuple[tuple[str, ...], Callable[[TransformerConfig], bool]], ...] = (
    (("positions",), lambda model: model.positions.position == "learned"),
    (("state_groups", "s_scan", "scan_groups"), lambda model: model.parts.mamba is not None or model.parts.delta is not None),
    (
        ("experts", "expert_ffn", "expert_batch", "expert_s", "expert_s_res", "experts_route", "shared_ffn"),
        lambda model: model.parts.experts is not None,
    ),
)


@session_cache(maxsize=4096)
def _cuts(rules: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """Return the axes that shard every dim of every operator."""
    return tuple(tuple(axis for axis in rules.cut(*dim) if axis in axes) for dim in _dims(model, attention))


@session_cache(maxsize=64)
def _dims(model: TransformerConfig, attention: str) -> tuple[tuple[str, str], ...]:
    """Return (operator, logical name of its dim) for every dim; they do not depend on sizes and dtypes."""
    graph = build_graph(model, seq_len=1, attention=attention, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    return tuple((operator.name, operator.logical_name(dim)) for operator in graph.operators for dim in operator.dims)
