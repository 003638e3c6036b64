"""Networks by name: published networks, and every language model, shipped or from a config.json."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module

from perfmodel.foundation.errors import InputError, bad_field, one_line, suggest
from perfmodel.foundation.values import check_path, is_path
from perfmodel.workload.config import MAX_SIZE, printable
from perfmodel.workload.graph import Graph
from perfmodel.workload.models import list_models

Size = int | bool | tuple[int, ...]

#: Name -> "module:function" in this package, imported on first use.
_BUILT_IN = {
    "alexnet": "images:alexnet",
    "inception3": "inception:inception3",
    "resnet50": "images:resnet50",
    "resnet101": "images:resnet101",
    "densenet121": "images:densenet121",
    "rnnlm": "rnnlm:rnnlm",
    "transformer": "encoder_decoder:transformer",
    "bert-large": "bert:bert_large",
    "vit-large": "vit:vit_large",
    "dlrm": "dlrm:dlrm",
}


def list_networks() -> tuple[str, ...]:
    """Return the network names for `load_network`, language models (`list_models`) last."""
    return (*_BUILT_IN, *(name for name in list_models() if name not in _BUILT_IN))


def is_language_model(name: str) -> bool:
    """Return whether the network is a decoder: a shipped model, or one by the path of its config.json."""
    return name not in _BUILT_IN and (name in list_models() or is_path(name))


def load_network(name: str, /, *, batch: int = 0, **sizes: Size) -> Graph:
    """Return a training step of a network by name, or of a language model by the path of its config.json.

    batch   samples per step; 0: the network's default
    sizes   keyword arguments of its function (`image=64`, `layers=2`); default: the function's
    """
    build, known = _builder(name)
    given = {"batch": batch, **sizes} if batch or isinstance(batch, bool) else dict(sizes)
    for key, value in given.items():
        if key not in known:
            raise bad_field(key, printable(value), f"is no size of {name}{suggest(key, set(known) - {'batch'})}")
        default = known[key]  # the size has its kind: a flag, a size, or one size per layer
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise bad_field(key, printable(value), "must be true or false", "write one of them")
            continue
        if isinstance(default, tuple) and (not isinstance(value, tuple) or not value):
            raise bad_field(key, printable(value), "must be several sizes", f"use the number of sizes in {default}")
        for part in value if isinstance(value, tuple) and isinstance(default, tuple) else (value,):
            if isinstance(part, bool) or not isinstance(part, int) or not 1 <= part <= MAX_SIZE:
                raise bad_field(key, printable(part), f"must be a whole number from 1 to {MAX_SIZE}", "leave it out for the default")
    return build(**given)


def network_sizes(name: str) -> dict[str, Size]:
    """Return the sizes that `load_network` takes for a network in addition to its batch, with defaults."""
    return {key: default for key, default in _builder(name)[1].items() if key != "batch"}


def _builder(name: str) -> tuple[Callable[..., Graph], dict[str, Size]]:
    """Return the function that builds a network, and its sizes with their defaults."""
    check_path(name, "network")
    if name in _BUILT_IN:
        module, _, function = _BUILT_IN[name].partition(":")
        build: Callable[..., Graph] = getattr(import_module(f"{__name__}.{module}"), function)
    elif name in list_models() or is_path(name):
        from perfmodel.workload.networks.language_model import language_model

        build = partial(language_model, name)
    else:
        raise InputError(f"network={one_line(name)}: no network has this name{suggest(name, list_networks())}")
    parameters = inspect.signature(build).parameters
    return build, {key: parameter.default for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


__all__ = ["list_networks", "load_network", "network_sizes"]
