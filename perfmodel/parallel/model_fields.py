"""The model in a plan file: a name, all of its fields, or a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import listed
from perfmodel.workload.config import FIELDS, TransformerConfig
from perfmodel.workload.layer_specs import PARTS, part_from_plain, part_to_plain
from perfmodel.workload.network_model import NetworkModel


def model_to_dict(model: TransformerConfig | NetworkModel) -> dict[str, Any]:
    """Return all fields of a model as plain values."""
    if isinstance(model, TransformerConfig):
        values = model.values
        parts = {name: values.pop(name) for name in (*PARTS, "kinds")}
        return values | {name: part_to_plain(part) for name, part in parts.items() if part}
    sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in model.sizes.items()}
    return {"network": model.name, "sizes": sizes, "inputs": list(model.inputs)}


def read_model(value: object, field: str) -> TransformerConfig | NetworkModel:
    """Return a shipped model by name, or the model of all its fields, or a network. Raises InputError with all faults."""
    if isinstance(value, str):
        from perfmodel.workload.models import load_model

        return load_model(value)
    if not isinstance(value, Mapping):
        raise bad_field(field, shown(value), "must be a model's name or its fields", "see `perfmodel models`")
    is_network = "network" in value
    known = ("network", "sizes", "inputs") if is_network else tuple(FIELDS)
    faults = [
        f"unknown field {shown(name)}{suggest(one_line(name), known)}; remove it or correct it" for name in value if name not in known
    ]
    if is_network:
        name, sizes, inputs = value["network"], value.get("sizes", {}), value.get("inputs", [])
        if not isinstance(name, str):
            faults.append(f"network={shown(name)}: must be a text; give one")
        if not isinstance(sizes, Mapping):
            faults.append(f"sizes={shown(sizes)}: must be a mapping; write {{name: value}}")
        if not isinstance(inputs, list) or not all(isinstance(entry, str) for entry in inputs):
            faults.append(f"inputs={shown(inputs)}: must be a list of names; write it as [a, b]")
        _refuse(faults, field)
        plain = {str(size): tuple(entry) if isinstance(entry, list) else entry for size, entry in sizes.items()}
        return NetworkModel(name=name, sizes=plain, inputs=tuple(inputs))
    values: dict[str, Any] = dict(value)
    for name, entry in value.items():
        if name in PARTS or name == "kinds":
            try:
                values[name] = part_from_plain(name, entry)
            except InputError as error:
                faults.append(str(error))
        elif not isinstance(entry, (str, int, float, bool)):
            faults.append(f"{one_line(name)}={shown(entry)}: must be a single value; correct it")
    for name, field_of_model in FIELDS.items():
        if name not in value and field_of_model.default is MISSING:
            faults.append(f"{name}: is missing; give every field of the model, or its name")
    _refuse(faults, field)
    return TransformerConfig.of(**values)


def _refuse(faults: list[str], field: str) -> None:
    if faults:
        raise InputError(f"{field}: {listed(faults)}")
