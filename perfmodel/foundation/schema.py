"""Schemas of user files as pydantic models, with faults as sentences and descriptions from docstrings.

Imported only when a user's file is read: loading pydantic takes as long as a prediction.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.foundation.records import INLINE, Record, record_from_data, record_to_data
from perfmodel.foundation.units import SI_UNITS, QuantityKind, example_of, parse_quantity, quantity_of

MAX_COUNT = 2**31
MAX_NUMBER = 1e15

Model = TypeVar("Model", bound=BaseModel)


class FileModel(BaseModel):
    """A mapping with exactly these fields: unknown fields, other types and infinite numbers are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    #: Remedy for a missing field.
    ADD: ClassVar[str] = "add it"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReadBy:
    """Annotation of a value that a function validates.

    read     takes value and field, raises InputError
    schema   JSON Schema of the value
    """

    read: Callable[[Any, str], Any]
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> dict[str, Any]:
        return dict(self.schema)

    def _validate(self, value: object) -> Any:
        try:
            self.read(value, "")
        except InputError:
            raise PydanticCustomError("sentence", "refused", {"read": self.read}) from None
        return value


def quantity(kind: str) -> ReadBy:
    """Return the annotation of a text with a quantity and its unit."""
    schema = {"type": "string", "quantity": str(kind), "unit": SI_UNITS[kind], "examples": [example_of(kind).split("'")[1]]}
    return ReadBy(lambda value, field: parse_quantity(value, kind, field=field), schema)


class OneOf:
    """Annotation of a text from a closed choice."""

    def __init__(self, values: Iterable[str]) -> None:
        self.values = [str(value) for value in values]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        return core_schema.literal_schema(self.values)


#: Default of an optional field without a value.
OMITTED: Any = None
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Values = Annotated[list[Any], Field(min_length=1)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Bytes = Annotated[str, quantity(QuantityKind.BYTES)]
Bandwidth = Annotated[str, quantity(QuantityKind.BANDWIDTH)]
Time = Annotated[str, quantity(QuantityKind.TIME)]


@lru_cache(maxsize=256)
def model_of(record: type, *, types: Callable[[str, Any], Any] | None = None, base: type[FileModel] = FileModel) -> type[FileModel]:
    """Return the model of files for a frozen dataclass; its docstring describes the fields, their names determine the units.

    types   type of a field, by name and annotation, where a file has it in another form; None: the default type
    base    base model with the remedies
    """
    definitions: dict[str, Any] = {}
    _add_fields(definitions, record, types)
    doc = (record.__doc__ or record.__name__).partition("\n\n")[0]
    return create_model(record.__name__, __base__=base, __doc__=doc, **definitions)


def _add_fields(definitions: dict[str, Any], record: type, types: Callable[[str, Any], Any] | None) -> None:
    hints, about = typing.get_type_hints(record), descriptions(record)
    for field in dataclasses.fields(record):
        name, hint = field.name, hints[field.name]
        if field.metadata == INLINE:
            _add_fields(definitions, hint, types)
            continue
        more: dict[str, Any] = {}
        if field.default is not dataclasses.MISSING:
            more["default"] = record_to_data(field.default, name=name)
        elif field.default_factory is not dataclasses.MISSING:
            more["default"] = record_to_data(field.default_factory(), name=name)
        kind = types(name, hint) if types else None
        definitions[name] = (_type_of(hint, name) if kind is None else kind, Field(description=about.get(name, ""), **more))


def _type_of(hint: object, name: str) -> Any:
    """Return the type of a file's value that `records.record_from_data` converts to `hint` in a field of this name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        item: object = Text if name == "peaks" else _type_of(arguments[1], name)  # the name of each peak determines its unit
        return dict[_type_of(arguments[0], ""), item]  # type: ignore[misc]
    if origin is tuple:
        item = list[_type_of(arguments[0], name)]  # type: ignore[misc]
        return item if arguments[-1] is Ellipsis else Annotated[item, Field(min_length=len(arguments), max_length=len(arguments))]
    if dataclasses.is_dataclass(hint):
        return model_of(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Annotated[str, OneOf(hint)]
    if hint is float:
        kind = quantity_of(name)
        return Annotated[str, quantity(kind)] if kind else Number
    if hint in (str, int, bool):
        return hint
    raise TypeError(f"{name}: no file holds {hint}")


#: `name, other_name   description`
_ROW = re.compile(r" *([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*)  +(\S.*)")


def descriptions(record: type) -> dict[str, str]:
    """Return the descriptions of a record's fields from the table in its docstring; a row may name several fields."""
    names = {field.name for field in dataclasses.fields(record)}
    texts: dict[str, str] = {}
    current: list[str] = []
    for line in (record.__doc__ or "").splitlines():
        row = _ROW.fullmatch(line)
        if row and set(row[1].split(", ")) <= names:
            current = row[1].split(", ")
            texts.update(dict.fromkeys(current, row[2]))
        elif current and line.startswith("     "):
            texts.update({name: f"{texts[name]} {line.strip()}" for name in current})
        else:
            current = []
    return {name: re.sub(" +", " ", text) for name, text in texts.items()}


def check(model: type[BaseModel], data: object, *, where: str = "", within: str = "") -> Any:
    """Return `data` if the model accepts it. Raises InputError as `validated` does."""
    validated(model, data, where=where, within=within)
    return data


def validated(model: type[Model], data: object, *, where: str = "", within: str = "") -> Model:
    """Return the model of `data`. Raises InputError that names every fault.

    where    the file; "" if the caller names it
    within   prefix of the fields in messages
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = sorted(
            error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden"
        )  # an unknown field first, then the missing one that it may stand for
        sentences = list(dict.fromkeys(_sentence(fault, model, within) for fault in faults))
        raise InputError(f"{where}: {listed(sentences)}" if where else listed(sentences)) from None


def checked_record(cls: type[Record], data: object, *, where: str) -> Record:
    """Return a frozen dataclass from the data of a user's file. Raises InputError that names every fault. where: prefix of the fields."""
    return record_from_data(cls, check(model_of(typing.cast(type, cls)), data, within=where), where=where)


#: Remedies for required fields whose values do not follow from their names.
_WHAT_TO_WRITE = {
    "source": "say where the numbers are from, such as source: 'data sheet, read 2026-01-15'",
    "provenance": "write read, recalled, mixed or measured",
}

#: Rule and remedy for each type of pydantic error; braces hold values of its context.
_RULES = {
    "string_type": ("must be a text", "write one text"),
    "string_too_short": ("must not be empty", "write a text"),
    "int_type": ("must be a whole number", "write a number without quotes or unit"),
    "float_type": ("must be a number without a unit", "write a number without quotes or unit"),
    "finite_number": ("must be a finite number", "correct it"),
    "bool_type": ("must be true or false", "write true or false"),
    "greater_than_equal": ("must be at least {ge}", "correct it"),
    "less_than_equal": ("must be at most {le}", "correct it"),
    "list_type": ("must be a list", "write a list: [a, b], or a line '- a' for each"),
    "too_short": ("must have at least {min_length} entries, not {actual_length}", "add what is missing"),
    "too_long": ("must have at most {max_length} entries, not {actual_length}", "take out the others"),
    "dict_type": ("must be a mapping", "write a line 'name: value' for each entry"),
    "model_type": ("must be a mapping", "write a line 'name: value' for each entry"),
}


def _sentence(fault: ErrorDetails, model: type[BaseModel], within: str) -> str:
    """Return a pydantic error as field, value, rule and remedy."""
    path, kind, value = fault["loc"], fault["type"], fault["input"]
    is_key = bool(path) and path[-1] == "[key]"
    path = path[:-1] if is_key else path
    steps = ([within] if within else []) + [one_line(step, 60) for step in path]
    field = ".".join(steps)
    if kind in ("extra_forbidden", "invalid_key"):
        of = _type_at(model, path[:-1])
        return f"{field}: unknown field{suggest(steps[-1], of.model_fields if of else ()) or '; take it out'}"
    if kind == "missing":
        of = _type_at(model, path[:-1]) or FileModel
        return f"{field}: required field is missing; {_WHAT_TO_WRITE.get(steps[-1], of.ADD)}"
    if kind == "sentence":
        try:
            fault["ctx"]["read"](value, field)
        except InputError as error:
            return str(error)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", fault["ctx"]["expected"])
        near = suggest(value, choices) if isinstance(value, str) else f"; use one of {', '.join(choices)}"
        if is_key:
            return f"{field}: unknown name{near}"
        return str(
            bad_field(field, shown(value), f"must be one of {', '.join(choices)}", near[2:] if "mean" in near else "use one of these")
        )
    rule, remedy = _RULES.get(kind, (fault["msg"], "correct it"))
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        remedy = f"write '{shown(value)}' in quotes"
    return str(bad_field(field or "file", shown(value), rule.format_map(fault.get("ctx", {})), remedy))


def _type_at(kind: object, path: tuple[int | str, ...]) -> Any:
    """Return the model of the value at a path; None if it has none."""
    for step in path:
        while kind is not None and typing.get_origin(kind) in (typing.Union, types.UnionType, Annotated):
            kind = typing.get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(step)].annotation if step in kind.model_fields else None
        else:
            kind = (typing.get_args(kind) or (None,))[-1]
    while typing.get_origin(kind) in (typing.Union, types.UnionType, Annotated):
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
