"""Which axes cut which dim of each operator of a model: whether two rule sets say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from perfmodel.parallel.algebra.rules import RuleSet, load_rule_set
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.transformer import build_graph


def cuts_alike(rules: RuleSet, other: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> bool:
    """Whether both cut every operator of this model alike, where only these fine axes have more than one rank."""
    if rules.operators or other.operators:
        return _cuts(rules, model, attention, axes) == _cuts(other, model, attention, axes)
    return _left_of_model(rules, model, axes) == _left_of_model(other, model, axes)


def cuts_as(names: Iterable[str], rules: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> str:
    """The first of these shipped rule sets that cuts as `rules` does; empty where none does."""
    return next((name for name in names if cuts_alike(rules, load_rule_set(name), model, attention, axes)), "")


def _left_of_model(rules: RuleSet, model: TransformerConfig, axes: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Cuts of the rules for this model, without those of single operators and of layers that the model lacks."""
    lacking = {name for names, has in _OF_SOME_MODELS if not has(model) for name in names}
    return {name: cut for name, cut in rules.among(axes).items() if name not in lacking}


#: Dims that only some models have.
_OF_SOME_MODELS: tuple[tuple[tuple[str, ...], Callable[[TransformerConfig], bool]], ...] = (
    (("positions",), lambda model: model.position == "learned"),
    (("state_groups", "s_scan", "scan_groups"), lambda model: model.mamba is not None or model.delta is not None),
    (
        ("experts", "expert_ffn", "expert_batch", "expert_s", "expert_s_res", "experts_route", "shared_ffn"),
        lambda model: model.experts is not None,
    ),
)


@lru_cache(maxsize=4096)
def _cuts(rules: RuleSet, model: TransformerConfig, attention: str, axes: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """The axes that cut every dim of every operator."""
    return tuple(tuple(axis for axis in rules.cut(*dim) if axis in axes) for dim in _dims(model, attention))


@lru_cache(maxsize=64)
def _dims(model: TransformerConfig, attention: str) -> tuple[tuple[str, str], ...]:
    """(operator, logical name of its dim) of every dim; neither sizes nor dtypes change them."""
    graph = build_graph(model, seq_len=1, attention=attention, dropout=True, activation_bytes=2.0, parameter_bytes=2.0)
    return tuple((operator.name, operator.logical_name(dim)) for operator in graph.operators for dim in operator.dims)
