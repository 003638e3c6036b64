"""Schemas of files that say what a framework does: execution profiles and serving engines."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from perfmodel.foundation.schemas import (
    Fields,
    FileModel,
    descriptions,
    file_model,
    list_of,
    model_of,
    number,
    one_of,
    quantity_or_number,
    text,
    yes_or_some_of,
)
from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.options import GRAPH_SCOPES, GROUP_OF, GROUPS, KIND_OF, bounds_of
from perfmodel.frameworks.runnable import MAY_BE_LEFT_OUT, RUNS_CHOICES, Runs
from perfmodel.frameworks.shipped import FILE_GROUPS, unit_of
from perfmodel.parallel.algebra.rules import list_rule_sets
from perfmodel.parallel.layout import ZERO_STAGES

_MOST = 64
_NAMED = {"name": (text(), "what options and files call it"), "source": (text(), "where this was read or measured")}
_BASE = (text(), "what gives all fields that the file leaves out: a shipped name, or a file in the same folder")


@cache
def profile_model(record: type) -> type[FileModel]:
    """A profile's file, of `ExecutionProfile`: its options with or without their groups; those of its `base` may be left out."""
    says = {name: text for group in GROUPS.values() for name, text in descriptions(group).items()}
    own = descriptions(record)
    options = {name: (_option(name), says.get(name, "")) for name in GROUP_OF}
    groups = {
        group: (
            file_model(group.capitalize(), {}, {"source": _NAMED["source"], **{name: options[name] for name in sorted(names)}}),
            "options in a group, with a source of their own",
        )
        for group, names in FILE_GROUPS.items()
    }
    numbers = [name for name, kind in KIND_OF.items() if kind == "float"]
    more: Fields = {
        "base": _BASE,
        "release": (text(may_be_empty=True), own["release"]),
        "family": (text(may_be_empty=True), own["family"]),
        "unknown": (list_of(one_of(numbers), most=len(numbers)), own["unknown"]),
        "runs": (runs_model(), own["runs"]),
        "fitted": (model_of(FittedTo), own["fitted"]),
    }
    return file_model("Profile", _NAMED, options | more | groups)


def _option(name: str) -> Any:
    if name == "overlaps_gradients":
        return yes_or_some_of(ZERO_STAGES)
    if name == "graph_scope":
        return list_of(one_of(GRAPH_SCOPES), most=len(GRAPH_SCOPES))
    if KIND_OF[name] == "float":
        return quantity_or_number(unit_of(name), *bounds_of(name)) if "time" in name or name.endswith("bytes") else number(*bounds_of(name))
    return bool if KIND_OF[name] == "bool" else text(may_be_empty=True)


@cache
def runs_model() -> type[FileModel]:
    choices = {**RUNS_CHOICES, "rules": tuple(list_rule_sets())}
    says = descriptions(Runs)
    made: Fields = {}
    for each in fields(Runs):
        name = each.name
        kind: Any = text() if name == "source" else bool
        if name in choices:
            kind = list_of(one_of(choices[name]), most=_MOST)
        elif name == "flex":
            kind = list_of(text(), most=_MOST)
        made[name] = (kind, says[name])
    return file_model(
        "Runs",
        {name: each for name, each in made.items() if name not in MAY_BE_LEFT_OUT},
        {name: each for name, each in made.items() if name in MAY_BE_LEFT_OUT},
    )


@cache
def engine_model(record: Any) -> type[FileModel]:
    """An engine's file, of `Engine`: its options without their groups; those of its `base`, or with a usual value, may be left out."""
    hints, groups = get_type_hints(record), set(record.GROUP_OF.values())
    parts = [model_of(record), *(model_of(hints[group]) for group in sorted(groups))]
    every = {name: each for part in parts for name, each in part.model_fields.items() if name not in groups}
    needed: Fields = {name: (each.rebuild_annotation(), each.description or "") for name, each in every.items() if each.is_required()}
    others: Fields = {name: (each.rebuild_annotation(), each.description or "") for name, each in every.items() if name not in needed}
    return file_model("Engine", needed, {"base": _BASE, **others})
