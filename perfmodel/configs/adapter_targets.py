"""Target modules of adapters in the notation of frameworks: names, wildcards and regular expressions over module paths.

PEFT matches a list of names with the end of a module's path, and a string with the whole path (`re.fullmatch`). NeMo Automodel's names may
contain `*`. This module matches them with the paths of a layer's linear operators in transformers and Megatron-Core.

Sources: PEFT 0.21 tuners/tuners_utils.py (check_target_module_exists) and utils/constants.py; Automodel
nemo_automodel/components/_peft/module_matcher.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import load_model
from perfmodel.workload.training import linear_operators

_SIGNS = re.compile(r"[\\()|^$]|\.[*+]|\[(?!['\"])")  # of a regular expression; a list may be written ['a', 'b']


def adapter_targets(modules: object, model: object = None) -> list[str] | None:
    """Return the linear operators of a framework's list of target modules; None for all linear operators.

    modules   a list, names with commas, or one regular expression
    model     name, path or model that has the modules; for an unknown model the usual operators of a layer are taken

    Modules of vision towers, embeddings and routers are left out. A list without matches is returned unchanged, and the job refuses it.
    """
    names_of_all = _table()["all"]
    if isinstance(modules, str) and modules not in names_of_all and _SIGNS.search(modules):
        targets, is_expression = [modules], True
    else:
        entries = modules if isinstance(modules, list) else re.split(r"[,+\s]+", str(modules).strip("[] "))
        targets, is_expression = [name for entry in entries if (name := str(entry).strip("'\" "))], False
    if any(target in names_of_all for target in targets):
        return None
    config = known_model(model)
    operators, num_layers = (_table()["usual"], 1) if config is None else (linear_operators(config), config.num_hidden_layers)
    names = [name for target in targets for name in operators if _matches(target, name, num_layers, is_expression=is_expression)]
    return list(dict.fromkeys(names)) or targets


def peft_targets(model: object) -> list[str] | None:
    """Return the default target modules of PEFT; None for models without a default."""
    config = known_model(model)
    defaults = _table()["peft_defaults"].items()
    return next((list(names) for architectures, names in defaults if config and config.origin.architecture in architectures.split()), None)


def known_model(model: object) -> TransformerConfig | None:
    """Return a model, or the one of this name or path; None if there is none."""
    try:
        return model if isinstance(model, TransformerConfig) else load_model(str(model))
    except InputError:
        return None


def _matches(target: str, operator: str, num_layers: int, *, is_expression: bool) -> bool:
    if is_expression:
        try:
            return any(re.fullmatch(target, path) for path in _paths(operator, num_layers))
        except re.error:
            return False
    if target == operator:
        return True
    if "experts" in operator and "experts" not in target:
        return False  # the tensor of all experts is a parameter, not a module: only its own name matches
    if "*" in target:  # a pattern for modules without fused products: *up_proj does not match gate_up_proj
        return fnmatchcase(next(_paths(operator, 1)), target)
    return any(path.endswith(f".{target}") for path in _paths(operator, 1))


def _paths(operator: str, num_layers: int) -> Iterator[str]:
    modules = [names for operators, names in _table()["modules"].items() if operator in operators.split()]
    for module in " ".join(modules or [operator]).split():
        for layer in range(num_layers):
            yield from (f"{prefix}layers.{layer}.{module}" for prefix in _table()["prefixes"])


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return read_yaml(resource_dir("strategies") / "adapter_modules.yaml")
