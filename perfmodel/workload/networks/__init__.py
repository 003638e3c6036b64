"""Networks by name: those of the literature, and every shipped language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module

from perfmodel.errors import InputError, bad_field, suggest
from perfmodel.workload.config import printable
from perfmodel.workload.models import list_models
from perfmodel.workload.network import Network

Size = int | bool | tuple[int, ...]

#: Name -> module of this package, which has a function of the name after the colon. Loaded when asked for.
_BUILT_IN = {
    "alexnet": "alexnet:alexnet",
    "inception3": "inception:inception3",
    "resnet50": "resnet:resnet50",
    "resnet101": "resnet:resnet101",
    "densenet121": "densenet:densenet121",
    "rnnlm": "rnnlm:rnnlm",
    "transformer": "encoder_decoder:transformer",
    "bert-large": "bert:bert_large",
    "vit-large": "vit:vit_large",
    "dlrm": "dlrm:dlrm",
}


def list_networks() -> tuple[str, ...]:
    """The names that `load_network` knows, those of language models (`list_models`) last."""
    return (*_BUILT_IN, *(name for name in list_models() if name not in _BUILT_IN))


def load_network(name: str, *, batch: int = 0, **sizes: Size) -> Network:
    """A training step of a network by its name.

    batch   samples a step; 0: the network's default
    sizes   what its function takes by keyword (`image=64`, `layers=2`), else its defaults
    """
    if name in _BUILT_IN:
        module, _, function = _BUILT_IN[name].partition(":")
        build: Callable[..., Network] = getattr(import_module(f"{__name__}.{module}"), function)
        known = [key for key in inspect.signature(build).parameters if key != "batch"]
    elif name in list_models():
        from perfmodel.workload.networks.language_model import language_model

        def build(**given: Size) -> Network:
            return language_model(name, **given)  # type: ignore[arg-type]

        known = [key for key in inspect.signature(language_model).parameters if key not in ("name", "batch")]
    else:
        raise InputError(f"network={printable(str(name)[:80])}: no network has this name{suggest(name, list_networks())}")
    for key, value in sizes.items():
        if key not in known:
            raise bad_field(key, value, f"is no size of {name}{suggest(key, known)}")
        _check_size(key, value)
    if batch:
        _check_size("batch", batch)
        return build(batch=batch, **sizes)
    return build(**sizes)


def _check_size(field: str, value: Size) -> None:
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, int) or part < (0 if isinstance(part, bool) else 1):
            raise bad_field(field, printable(value), "must be a whole number of at least 1", "leave it out for the default")


__all__ = ["list_networks", "load_network"]
