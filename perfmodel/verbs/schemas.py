"""Schemas of the files that users write, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from perfmodel.foundation.errors import bad_field, one_line, suggest
from perfmodel.foundation.schemas import FileModel, json_schema


def _hardware(kind: str) -> type[FileModel]:
    from perfmodel.hardware.schemas import hardware_model

    return hardware_model(kind)


def _profile() -> type[FileModel]:
    from perfmodel.frameworks.profile import ExecutionProfile
    from perfmodel.frameworks.schemas import profile_model

    return profile_model(ExecutionProfile)


def _engine() -> type[FileModel]:
    from perfmodel.frameworks.engine import Engine
    from perfmodel.frameworks.schemas import engine_model

    return engine_model(Engine)


#: Kind of file -> what makes its model.
KINDS: Mapping[str, Callable[[], type[FileModel]]] = {
    "chip": partial(_hardware, "chip"),
    "cluster": partial(_hardware, "cluster"),
    "calibration": partial(_hardware, "calibration"),
    "profile": _profile,
    "engine": _engine,
}


def model_of_kind(kind: str) -> type[FileModel]:
    """The model of a kind of file. Raises InputError."""
    if kind not in KINDS:
        raise bad_field("kind", one_line(kind), f"is not known{suggest(kind, KINDS)}", f"use {', '.join(KINDS)}")
    return KINDS[kind]()


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind of file: chip, cluster, calibration, profile or engine. Raises InputError."""
    return json_schema(model_of_kind(kind))
