"""Schema of profile files. An engine file has the fields of `Engine` without groups."""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Annotated, Any

from pydantic import Field, create_model

from perfmodel.foundation.errors import bad_field, one_line, shown, suggest
from perfmodel.foundation.schema import OMITTED, FileModel, OneOf, ReadBy, Text, descriptions, model_of
from perfmodel.foundation.units import SI_UNITS, QuantityKind, parse_quantity
from perfmodel.frameworks.fitted import FittedTo
from perfmodel.frameworks.options import GRAPH_SCOPES, GROUP_OF, GROUPS, KIND_OF, bounds_of
from perfmodel.frameworks.runnable import RUNS_CHOICES, Runs
from perfmodel.frameworks.shipped import FILE_GROUPS, unit_of
from perfmodel.parallel.algebra.rules import list_rule_sets
from perfmodel.parallel.choices import ZERO_STAGES

_SOURCE = (Text, Field(OMITTED, description="where this was read or measured"))
_EXAMPLES = {QuantityKind.TIME: "15 us", QuantityKind.BYTES: "25 MB"}
_JSON = {"float": "number", "bool": "boolean", "str": "string"}


@lru_cache(maxsize=8)
def profile_model(record: type) -> type[FileModel]:
    """Return the model of a profile's file: the options of `ExecutionProfile` with or without groups; `base` has those left out."""
    about = descriptions(record) | {name: text for group in GROUPS.values() for name, text in descriptions(group).items()}
    options: dict[str, Any] = {name: (_option(name), Field(OMITTED, description=about.get(name, ""))) for name in GROUP_OF}
    groups: dict[str, Any] = {}
    for group, names in FILE_GROUPS.items():
        fields: dict[str, Any] = {"source": _SOURCE, **{name: options[name] for name in sorted(names)}}
        model = create_model(f"{group.capitalize()}Group", __base__=FileModel, __doc__="Options in a group, with their source.", **fields)
        groups[group] = (model, Field(OMITTED, description="options in a group, with a source of their own"))
    ungrouped: dict[str, Any] = {
        "name": (Text, Field(description="what options and files call it")),
        "source": (Text, Field(description="where this was read or measured")),
        "base": (
            Text,
            Field(OMITTED, description="profile that gives what the file leaves out: a shipped name, or a file in the same folder"),
        ),
        "release": (str, Field(OMITTED, description=about["release"])),
        "family": (str, Field(OMITTED, description=about["family"])),
        "unknown": (list[Annotated[Any, ReadBy(_read_number_name, {"type": "string"})]], Field(OMITTED, description=about["unknown"])),
        "runs": (runs_model(), Field(OMITTED, description=about["runs"])),
        "fitted": (model_of(FittedTo), Field(OMITTED, description=about["fitted"])),
    }
    return create_model("ProfileFile", __base__=FileModel, __doc__="What a framework does with a plan.", **ungrouped, **options, **groups)


@cache
def runs_model() -> type[FileModel]:
    """Return the model of the group `runs`: features of plans that a framework can run."""
    return model_of(Runs, types=_choices)


def _choices(name: str, hint: object) -> Any:
    choices: tuple[Any, ...] | None = (*list_rule_sets(),) if name == "rules" else RUNS_CHOICES.get(name)
    if choices is None:
        return list[Text] if name == "flex" else None
    if isinstance(choices[0], int):
        return list[Annotated[Any, ReadBy(partial(_read_choice, choices), {"enum": list(choices)})]]
    return list[Annotated[str, OneOf(choices)]]  # type: ignore[misc]


def _read_choice(choices: tuple[Any, ...], value: object, field: str) -> None:
    if isinstance(value, bool) or value not in choices:
        raise bad_field(field, shown(value), f"must be one of {', '.join(map(str, choices))}", "use one of these")


def _option(name: str) -> Any:
    """Return the type of an option in a file."""
    if name == "overlaps_gradients":
        items = {"type": "array", "items": {"enum": list(ZERO_STAGES)}}
        return Annotated[Any, ReadBy(_read_stages, {"anyOf": [{"type": "boolean"}, items]})]
    if name == "graph_scope":
        return list[Annotated[str, OneOf(GRAPH_SCOPES)]]
    if KIND_OF[name] != "float":
        return bool if KIND_OF[name] == "bool" else str
    has_unit = "time" in name or name.endswith("bytes")
    least, most = bounds_of(name)
    schema: dict[str, Any] = {"type": "number", "minimum": least, "maximum": most}
    if has_unit:
        schema = {
            "type": ["string", "number"],
            "quantity": unit_of(name),
            "unit": SI_UNITS[unit_of(name)],
            "examples": [_EXAMPLES[QuantityKind(unit_of(name))]],
        }
    return Annotated[Any, ReadBy(partial(_read_option, name, has_unit), schema)]


def _read_option(name: str, has_unit: bool, value: object, field: str) -> None:
    least, most = bounds_of(name)
    number = parse_quantity(value, unit_of(name), field=field) if has_unit and isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
        raise bad_field(field, shown(value), f"must be a number from {least:g} to {most:g}", "correct it")


def _read_stages(value: object, field: str) -> None:
    """Validate ZeRO stages: a list, or true or false for all or none of them."""
    stages = value if isinstance(value, list) else [] if isinstance(value, bool) else [None]
    if any(isinstance(stage, bool) or stage not in ZERO_STAGES for stage in stages):
        raise bad_field(field, shown(value), f"must be true, false or a list of {', '.join(map(str, ZERO_STAGES))}", "correct it")


def _read_number_name(value: object, field: str) -> None:
    known = [option for option, kind in KIND_OF.items() if kind == "float"]
    if value not in known:
        raise bad_field(field, shown(value), f"is no number of a profile{suggest(one_line(value), known)}", "correct it")
