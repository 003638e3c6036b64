"""Schema of measured runs: the columns of a table, or the fields of a JSON line.

Names are compared in lower case, with `_` for every other character. Unknown names are skipped and reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model

from perfmodel.fitting.columns import flag_of, integer_of, mapping_of, positive, size_of, time_of, times_of
from perfmodel.foundation.errors import bad_field, shown
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.schema import OMITTED, FileModel, ReadBy
from perfmodel.parallel.framework_ref import SETTINGS
from perfmodel.parallel.plan import Plan
from perfmodel.workload.config import TransformerConfig


def _of(types: tuple[type, ...], words: str, schema: dict[str, Any]) -> ReadBy:
    """Return the annotation of a value of these types."""

    def read(value: object, field: str) -> None:
        if not isinstance(value, types):
            raise bad_field(field, shown(value), f"must be {words}", "correct it")

    return ReadBy(read, schema)


def _measured(read: Callable[[Any, str], Any], unit: str) -> ReadBy:
    return ReadBy(read, {"type": ["number", "string"], "unit": unit})


#: Forms of the values of a column, as `run_columns.yaml` names them.
_FORMS: Mapping[str, ReadBy] = {
    "text": _of((str,), "a text", {"type": "string"}),
    "object": _of((str, Mapping, Plan, TransformerConfig), "a text or a mapping", {"type": ["string", "object"]}),
    "any": ReadBy(lambda value, field: value, {"type": ["string", "number", "boolean"]}),
    "count": ReadBy(lambda value, field: integer_of(value, field), {"type": ["integer", "string"], "minimum": 1}),
    "stage": ReadBy(lambda value, field: integer_of(value, field, least=0), {"type": ["integer", "string"], "minimum": 0}),
    "settings": ReadBy(mapping_of, {"type": ["string", "object"]}),
    "flag": ReadBy(flag_of, {"type": ["boolean", "string"]}),
    "measured": ReadBy(lambda value, field: value, {"type": "object"}),
    "seconds": _measured(time_of, "s"),
    "times": ReadBy(times_of, {"type": ["array", "string"], "unit": "s"}),
    "milliseconds": _measured(positive, "ms"),
    "rate": _measured(positive, "1/s"),
    "link": _measured(positive, "Gbit/s"),
    "size": _measured(size_of, "byte"),
    "gib": _measured(positive, "GiB"),
}
_COLUMNS = read_yaml(Path(__file__).with_name("run_columns.yaml"))


def _column(column: Mapping[str, str]) -> Any:
    """Return the type of a column, and its field with the other names of the column."""
    aliases = column.get("also", "").split()
    also = f"; also `{'`, `'.join(aliases)}`" if aliases else ""
    return Annotated[Any, _FORMS[column["is"]]], Field(
        OMITTED, description=column["about"] + also, json_schema_extra={"aliases": [*aliases]}
    )


MeasuredRunFile: type[FileModel] = create_model(
    "MeasuredRunFile",
    __base__=FileModel,
    __doc__="A measured run: its plan, and its step time or its peak of memory.",
    **{name: _column(column) for name, column in _COLUMNS.items()},
)

#: Columns that describe a run and are neither inputs nor measurements.
_EXTRA_COLUMNS = frozenset(
    (
        *("id", "source", "source_ref", "notes", "note", "comment", "inferred", "tier", "suspect", "date"),
        *("memory", "loss", "mfu", "hfu", "tflops", "kind", "ep"),
    )
)
_NAMES = {alias: name for name, column in _COLUMNS.items() for alias in (name, *column.get("also", "").split())}


def name_of(column: str) -> str:
    """Return the standard name of a column; empty for an unknown one."""
    plain = _plain(column)
    if plain in _NAMES:
        return _NAMES[plain]
    return f"settings.{plain}" if plain in SETTINGS else ""


def is_extra(column: str) -> bool:
    """Return whether a column is known and irrelevant for a fit."""
    return _plain(column) in _EXTRA_COLUMNS


def _plain(column: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")
