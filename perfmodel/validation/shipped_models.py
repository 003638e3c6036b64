"""Shipped models in the place of the models that published runs state: by name for training, by sizes for serving."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import list_models, load_model
from perfmodel.workload.truncation import truncated

#: Sizes that must be equal in a run and in the shipped model of its name: fields of both.
_SHARED_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads")
#: Sizes that must be equal in a run and in a shipped model of any name.
_SAME_SIZES = (*_SHARED_SIZES, "num_hidden_layers", "vocab_size")


@cache
def shipped_configs() -> Mapping[str, TransformerConfig]:
    """Return the shipped models by name."""
    return {name: load_model(name) for name in list_models()}


def shipped_model(model: Mapping[str, Any]) -> TransformerConfig | None:
    """Return the shipped model that the run's name begins with, with the depth, the dense layers and the multi-token-prediction layers that
    the run states; None where there is none, or where the run states other sizes.
    """
    name = _plain(model.get("name"))
    shipped = max((shipped_name for shipped_name in shipped_configs() if name.startswith(_plain(shipped_name))), key=len, default="")
    if not shipped:
        return None
    config = shipped_configs()[shipped]
    experts, layers = config.parts.experts, model.get("num_hidden_layers")
    stated = (model.get("num_experts"), model.get("num_experts_per_tok"))
    if stated != (None, None) and stated != ((None, None) if experts is None else (experts.num_experts, experts.top_k)):
        return None
    if experts is not None and stated == (None, None) and layers is not None:
        return None
    if any(model.get(field) not in (None, getattr(config, field)) for field in _SHARED_SIZES):
        return None
    dense, modules = stated_layers(model, DENSE), stated_layers(model, MTP)
    return truncated(config, int(layers or config.num_hidden_layers), num_dense_layers=dense, num_mtp_layers=modules)


#: Fields for dense layers before the others, and for multi-token-prediction modules.
DENSE, MTP = ("num_dense_layers", "first_dense_layers"), ("num_mtp_layers",)


def stated_layers(model: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the number that the run states in one of these fields; None: it states none."""
    for name in names:
        value = model.get(name)
        if value is not None:
            return int(value)
    return None


def shipped_equivalent(config: TransformerConfig) -> TransformerConfig:
    """Return the shipped model of the same sizes, under the run's name; `config` if there is none."""
    for shipped in shipped_configs().values():
        if all(getattr(shipped, field) == getattr(config, field) for field in _SAME_SIZES) and _parts(shipped) == _parts(config):
            return replace(shipped, name=config.name)
    return config


def _parts(model: TransformerConfig) -> tuple[object, ...]:
    """Return the latent attention of a model (else its head width), its MLP or experts, and the kinds of its layers in any order."""
    experts = model.parts.experts
    width = model.intermediate_size if experts is None else (experts.num_experts, experts.top_k, experts.width, experts.shared_width)
    kinds = sorted((kind.mixer, kind.feed_forward, kind.count) for kind in model.layer_kinds)
    return (model.head_dim if model.parts.latent is None else model.parts.latent, width, model.mlp.gated_mlp, kinds)


def _plain(name: object) -> str:
    """Return letters and digits only, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower()[:80]) if isinstance(name, str) else ""
