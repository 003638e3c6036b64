"""Models with a reduced number of layers, or with a stated number of dense layers or prediction modules."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.config import TransformerConfig


def truncated(
    model: TransformerConfig, num_layers: int, *, num_dense_layers: int | None = None, num_mtp_layers: int | None = None
) -> TransformerConfig:
    """Return the model with that number of layers. Raises InputError.

    num_dense_layers   leading layers without experts; None: in proportion, rounded, and at least one where the model has any
    num_mtp_layers     multi-token-prediction modules; None: the model's own at full depth, none in a truncated model

    Assumption: a truncated model represents the full one, so its dense layers are in proportion. Published runs of DeepSeek-V3 with four
    layers have one of the model's three dense layers and no module for a second token.
    """
    is_shorter = num_layers < model.num_hidden_layers
    shortened = model.with_layers(num_layers)
    dense = model.layer_kinds[0]
    if model.parts.experts is not None and dense.feed_forward == "dense" and not dense.turn:  # leading dense layers
        count = num_dense_layers
        if count is None:
            count = max(round(dense.count * num_layers / model.num_hidden_layers), 1) if is_shorter else dense.count
            count = min(count, num_layers)
        if count > num_layers:
            raise bad_field("num_dense_layers", count, f"must be at most num_hidden_layers={num_layers}", "correct it")
        rest = model.having(num_hidden_layers=model.num_hidden_layers - dense.count, kinds=model.layer_kinds[1:])
        others = rest.with_layers(num_layers - count).layer_kinds if count < num_layers else ()
        leading = (replace(dense, count=count),) if count else ()
        shortened = shortened.having(kinds=(*leading, *others))
    elif num_dense_layers:
        raise bad_field("num_dense_layers", num_dense_layers, f"{model.name} has no leading dense layers", "leave it out or state 0")
    further = num_mtp_layers
    if further is None:
        further = 0 if is_shorter else model.num_mtp_layers
    return replace(shortened, num_mtp_layers=further)


def layers_text(model: TransformerConfig) -> str:
    """Return the layers by kind: `61 layers: 3 dense, 58 with experts; 1 module for a further token`; empty where all are equal."""
    dense = sum(kind.count for kind in model.layer_kinds if kind.feed_forward == "dense")
    experts = sum(kind.count for kind in model.layer_kinds if kind.feed_forward == "experts")
    if not experts or (not dense and not model.num_mtp_layers):
        return ""
    further = model.num_mtp_layers
    modules = f"{further} module{'s' if further > 1 else ''} for a further token (MTP)" if further else "no MTP"
    layers = model.num_hidden_layers
    return f"{layers} layer{'s' if layers > 1 else ''}: {dense} dense, {experts} with experts; {modules}"
