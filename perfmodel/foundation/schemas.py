"""What files of users may hold, as pydantic models: checks with one-sentence errors, JSON Schema, tables of fields.

Shipped files pass the same models in the tests and are trusted when they are read, so that a prediction does not import pydantic.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.foundation.units import SI_UNITS, example_of, parse_quantity, quantity_of

MOST_CHIPS = 2**31
_MOST = 1e15

#: Remedies of required fields whose name alone does not say what they take.
_WHAT_TO_WRITE = {
    "source": "say where the numbers are from, such as source: 'data sheet, read 2026-01-15'",
    "provenance": "write read, recalled, mixed or measured",
}
#: pydantic's type of an error -> rule and remedy.
_RULES = {
    "string_too_short": ("must not be empty", "write a text"),
    "int_type": ("must be a whole number", "write a number without quotes or unit"),
    "int_from_float": ("must be a whole number", "write a number without quotes or unit"),
    "bool_type": ("must be true or false", "write true or false"),
    "list_type": ("must be a list", "write a list: [a, b], or a line '- a' for each"),
    "dict_type": ("must be a mapping", "write a line 'name: value' for each entry"),
    "model_type": ("must be a mapping", "write a line 'name: value' for each entry"),
    "finite_number": ("must be a finite number", "correct it"),
}


class FileModel(BaseModel):
    """A mapping with exactly these fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def text(*, may_be_empty: bool = False) -> Any:
    return Annotated[str, Field(min_length=0 if may_be_empty else 1)]


def count(most: int = MOST_CHIPS) -> Any:
    """A whole number of at least 1."""
    return Annotated[int, Field(ge=1, le=most)]


def number(least: float = -_MOST, most: float = _MOST) -> Any:
    """A number without a unit."""

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _broken("must be a number", "write a number without quotes or unit")
        if not least <= value <= most:
            raise _broken(f"must be a {'finite ' if most >= _MOST else ''}number from {least:g} to {most:g}", "correct it")
        return float(value)

    return Annotated[float, BeforeValidator(check), WithJsonSchema({"type": "number", "minimum": least, "maximum": most})]


def quantity(kind: str) -> Any:
    """A text that holds a quantity with its unit."""

    def check(value: object) -> object:
        try:
            return parse_quantity(value, kind, field=_FIELD)
        except InputError as error:
            raise PydanticCustomError("sentence", "{sentence}", {"sentence": error.full}) from None

    schema = {"type": ["string", "number"] if quantity_is_bare(kind) else "string", "unit": SI_UNITS[kind], "examples": [_plain(kind)]}
    return Annotated[float, BeforeValidator(check), WithJsonSchema(schema)]


def quantity_or_number(kind: str, least: float, most: float) -> Any:
    """A quantity with its unit, or a number in its SI unit."""

    def check(value: object) -> object:
        return _adapter(quantity(kind)).validate_python(value) if isinstance(value, str) else value

    plain = number(least, most)
    examples = {"unit": SI_UNITS[kind], "examples": [_plain(kind)]}
    return Annotated[plain, BeforeValidator(check), WithJsonSchema({"type": ["string", "number"], **examples})]


def quantity_is_bare(kind: str) -> bool:
    """Whether a quantity may be written without a unit."""
    return SI_UNITS[kind] == "1"


def one_of(choices: Sequence[str | int]) -> Any:
    """One of these texts or whole numbers."""

    def check(value: object) -> object:
        if isinstance(value, bool) or value not in choices:
            nearest = suggest(value, [str(each) for each in choices]) if isinstance(value, str) else ""
            raise _broken(f"must be one of {', '.join(map(str, choices))}", nearest.removeprefix("; ") or "use one of these")
        return value

    return Annotated[
        Any, BeforeValidator(check), WithJsonSchema({"enum": [str(each) if isinstance(each, str) else each for each in choices]})
    ]


def yes_or_some_of(choices: Sequence[int]) -> Any:
    """True or false for all of them or none, or a list."""

    def check(value: object) -> object:
        if isinstance(value, bool):
            return value
        if not isinstance(value, list) or any(isinstance(each, bool) or each not in choices for each in value):
            raise _broken(f"must be true, false or a list of {', '.join(map(str, choices))}", "correct it")
        return value

    schema = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(choices)}}]}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(schema)]


def list_of(item: Any, *, least: int = 0, most: int) -> Any:
    return Annotated[list[item], Field(min_length=least, max_length=most)]


def map_of(item: Any, *, may_be_empty: bool = False) -> Any:
    """From names, whatever they are."""
    return Annotated[dict[text(), item], Field(min_length=0 if may_be_empty else 1)]  # type: ignore[misc]


Fields: TypeAlias = dict[str, tuple[Any, str]]
"""Field -> its type and its description."""


def file_model(
    name: str, required: Mapping[str, tuple[Any, str]], optional: Mapping[str, tuple[Any, str]] | None = None
) -> type[FileModel]:
    """A model from fields with their types and descriptions."""
    made: dict[str, Any] = {field: (kind, Field(description=says)) for field, (kind, says) in required.items()}
    made |= {field: (kind, Field(None, description=says)) for field, (kind, says) in (optional or {}).items()}
    return create_model(name, __base__=FileModel, **made)


_FIELD = "field-of-a-file"  # stands in a sentence where the field will


def _broken(rule: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}; {remedy}", {"rule": rule, "remedy": remedy})


def _plain(kind: str) -> str:
    return example_of(kind).split(" or ")[0].strip("'")


# --- models of records -----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def model_of(record: type) -> type[FileModel]:
    """The model of a file that holds a frozen dataclass: its fields, described by its docstring, numbers with the units of their names."""
    hints, says = typing.get_type_hints(record), descriptions(record)
    made: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        described = Field(description=says.get(field.name, "")) if is_needed else Field(None, description=says.get(field.name, ""))
        made[field.name] = (_kind_of(hints[field.name], field.name), described)
    return create_model(record.__name__, __base__=FileModel, __doc__=(record.__doc__ or "").strip().split("\n\n")[0], **made)


def _kind_of(hint: Any, name: str) -> Any:
    """The type of a value as the annotation of a record wants it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[_kind_of(arguments[0], ""), _item_kind(arguments[1], name)]  # type: ignore[misc]
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return list[_kind_of(arguments[0], name)]  # type: ignore[misc]
        return Annotated[list[_kind_of(arguments[0], name)], Field(min_length=len(arguments), max_length=len(arguments))]  # type: ignore[misc]
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{name}: a record field has one type, not {hint}")
    if dataclasses.is_dataclass(hint):
        return model_of(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return one_of([str(member) for member in hint])
    if hint is float:
        kind = quantity_of(name)
        return quantity(kind) if kind else number()
    if hint is str:
        return text(may_be_empty=True)
    if hint is int or hint is bool:
        return hint
    raise TypeError(f"{name}: no rule to read {hint}")


def _item_kind(hint: Any, name: str) -> Any:
    """Entries of a mapping are measured as its name says (`host_times`), but those of `peaks` as their own names."""
    if name != "peaks":
        return _kind_of(hint, name)
    return Annotated[Any, WithJsonSchema({"type": "string", "unit": "FLOP/s or byte/s", "examples": ["500 TFLOP/s"]})]


_DESCRIBED = re.compile(r"^ {4}(?P<names>[a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*) {2,}(?P<says>\S.*)$")
_CONTINUED = re.compile(r"^ {8,}(?P<says>\S.*)$")


def descriptions(record: type) -> dict[str, str]:
    """Field -> what the docstring of a record says of it, units included: `    name    what it is   [unit]`, which may go on below."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in f"    {record.__doc__ or ''}".splitlines():
        if match := _DESCRIBED.match(line):
            names = match["names"].split(", ")
            found |= dict.fromkeys(names, match["says"])
        elif (more := _CONTINUED.match(line)) and names:
            found |= {name: f"{found[name]} {more['says']}" for name in names}
        else:
            names = []
    return _USUAL | {name: " ".join(says.split()) for name, says in found.items()}


#: Of records whose docstring does not say more.
_USUAL = {
    "name": "what options and files call it",
    "source": "where the numbers are from",
    "date": "day on which it was made, such as '2026-01-15'",
    "notes": "anything else",
    "version": "of the software",
}


# --- checks ----------------------------------------------------------------------------------------------------------------------------


def check_file(data: Any, model: Any, *, where: str, within: str = "") -> Any:
    """`data` if it is what the model says; else an `InputError` that names file, field, value, rule and the nearest known field.

    within   what stands before each field, such as `calibration`
    """
    try:
        _adapter(model).validate_python(data)
    except ValidationError as error:
        found = [_sentence(each, data, model, within) for each in error.errors(include_url=False)]
        # a misspelt field before the one that it should be
        sentences = [sentence for is_misspelt in (True, False) for sentence, misspelt in found if misspelt is is_misspelt]
        raise InputError(f"{where}: {listed(list(dict.fromkeys(sentences)))}" if where else listed(sentences)) from None
    return data


@lru_cache(maxsize=256)
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _sentence(error: ErrorDetails, data: Any, model: Any, within: str) -> tuple[str, bool]:
    """What is wrong, and whether a field is misspelt."""
    path = [part for part in error["loc"] if part != "[key]"]
    field = ".".join([*([within] if within else []), *(one_line(part, 60) for part in path)]) or "file"
    kind, context = error["type"], error.get("ctx", {})
    value = error["input"]
    if kind == "missing":
        return f"{field}: required field is missing; {_WHAT_TO_WRITE.get(str(path[-1]), 'add it')}", False
    if kind == "extra_forbidden":
        name = one_line(path[-1], 60)
        return f"{field}: unknown field{suggest(name, _known(model, path[:-1])) or '; take it out'}", True
    if kind == "sentence":
        return str(context["sentence"]).replace(_FIELD, field), False
    if kind == "rule":
        rule, remedy = context["rule"], context["remedy"]
    elif kind in ("string_type", "string_unicode"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        rule, remedy = "must be a text", f"write '{shown(value)}' in quotes" if is_number else "write one text"
    elif kind in ("greater_than_equal", "less_than_equal"):
        bound = f"least {context['ge']}" if kind == "greater_than_equal" else f"most {context['le']}"
        rule, remedy = f"must be at {bound}", "correct it"
    elif kind in ("too_short", "too_long") and isinstance(value, Mapping):
        rule, remedy = "must not be empty", "write a line 'name: value'"
    elif kind in ("too_short", "too_long"):
        number, bound = (context["min_length"], "least") if kind == "too_short" else (context["max_length"], "most")
        entries = f"{number} entr{'y' if number == 1 else 'ies'}"
        rule, remedy = f"must have at {bound} {entries}, not {len(value)}", f"write at {bound} {entries}"
    else:
        rule, remedy = _RULES.get(kind, (error["msg"].lower(), "correct it"))
    return str(bad_field(field, shown(value), rule, remedy).full), False


def _known(model: Any, path: Sequence[Any]) -> list[str]:
    """The fields of the mapping at that place."""
    at = _at(model, path)
    return list(at.model_fields) if isinstance(at, type) and issubclass(at, BaseModel) else []


def _at(model: Any, path: Sequence[Any]) -> Any:
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel):
            model = model.model_fields[part].annotation
            continue
        inner = typing.get_args(model)
        model = inner[-1] if inner else model
        if typing.get_origin(model) is Annotated:
            model = typing.get_args(model)[0]
    return model


# --- schemas ---------------------------------------------------------------------------------------------------------------------------


def json_schema(model: Any) -> dict[str, Any]:
    """The JSON Schema of a kind of file (draft 2020-12), with a `unit` and an example for each quantity."""
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_adapter(model).json_schema()}
    for each in (found, *found.get("$defs", {}).values()):
        for field in each.get("properties", {}).values():
            if field.get("default", "") is None:
                del field["default"]  # what is left out has no value, and null is none
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class FieldRow:
    """A field of a file in a table: its place, the kind of its value with the unit, whether it is needed, and what it is."""

    name: str
    kind: str
    is_needed: bool
    says: str


def field_rows(model: Any) -> Iterator[FieldRow]:
    """The fields of a kind of file, those of mappings below the mapping."""
    schema = json_schema(model)
    yield from _rows(schema, schema.get("$defs", {}), "")


def _rows(schema: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> Iterator[FieldRow]:
    for name, each in schema.get("properties", {}).items():
        each = _resolved(each, known)
        inner, mark = each, ""
        while "items" in inner or isinstance(inner.get("additionalProperties"), dict):
            mark += ".*" if "additionalProperties" in inner else "[]"
            inner = _resolved(inner.get("items") or inner["additionalProperties"], known)
        below = "properties" in inner
        kind = ("mapping" if below else _kind_text(inner)) + _many(mark)
        yield FieldRow(prefix + name, kind, name in schema.get("required", ()), each.get("description", ""))
        if below:
            yield from _rows(inner, known, f"{prefix}{name}{mark}.")


def _many(mark: str) -> str:
    return "; by name" if mark.endswith(".*") else "; list" if mark else ""


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Without references, and without the null of what may be left out."""
    found = dict(schema)
    for part in found.pop("anyOf", ()):
        if part.get("type") != "null":
            found = _resolved(part, known) | found
    while "$ref" in found:
        found = dict(known[found.pop("$ref").rsplit("/", 1)[-1]]) | found
    return found


def _kind_text(schema: Mapping[str, Any]) -> str:
    if "unit" in schema:
        return f"quantity [{schema['unit']}], such as {schema['examples'][0]}"
    if "enum" in schema:
        choices = [str(each) for each in schema["enum"]]
        return ", ".join(choices[:6]) + (f" and {len(choices) - 6} more" if len(choices) > 6 else "")
    kind = schema.get("type", "anything")
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    if kind == "number" and least > -_MOST and most < _MOST:
        return f"number, {least:g} to {most:g}"
    return {"integer": "whole number", "boolean": "true or false", "string": "text"}.get(kind, str(kind))
