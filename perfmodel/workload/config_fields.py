"""Keys of a Hugging Face `config.json` with type checks, and readers that several families share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.workload.activations import ACTIVATIONS
from perfmodel.workload.config import MAX_LAYERS, printable, quoted
from perfmodel.workload.layer_specs import FeedForward, Mixer, kinds_of_layers

Values = dict[str, Any]


_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


def _noted(
    placeholder: _Value,
) -> Callable[[Callable[Concatenate[ConfigFields, _Given], _Value]], Callable[Concatenate[ConfigFields, _Given], _Value]]:
    """Return a decorator that records a key's fault and returns a placeholder, so that all faults are reported at once."""

    def wrap(read: Callable[Concatenate[ConfigFields, _Given], _Value]) -> Callable[Concatenate[ConfigFields, _Given], _Value]:
        @wraps(read)
        def noting(self: ConfigFields, /, *given: _Given.args, **named: _Given.kwargs) -> _Value:
            try:
                return read(self, *given, **named)
            except InputError as error:
                self.faults.append(str(error))
                return placeholder

        return noting

    return wrap


_NO_WORDS: tuple[str, ...] = ()
_NO_NUMBERS: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """Keys of a config, read with type checks. A JSON null counts as a missing key, as in Hugging Face's classes.

    faults   messages about the keys that were read
    """

    data: Mapping[str, Any]
    model_type: str
    defaults: Mapping[str, int]
    faults: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def nested(self, key: str) -> ConfigFields:
        """Return the keys of a nested mapping; none where there is no mapping. Faults are collected in one list."""
        inside = self.data.get(key)
        return ConfigFields(data=inside if isinstance(inside, Mapping) else {}, model_type=self.model_type, defaults={}, faults=self.faults)

    def record(self, make: Callable[..., _Value], **values: Any) -> _Value | None:
        """Return a record of the values; record a broken rule as a fault."""
        try:
            return make(**values)
        except InputError as error:
            self.faults.append(str(error))
            return None

    @_noted(_NO_WORDS)
    def of_each_layer(self, key: str, known: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
        """Return one word per layer; empty where the key is missing."""
        words = self.data.get(key)
        if words is None:
            return ()
        if not isinstance(words, (list, tuple)) or any(not isinstance(word, str) or word not in known for word in words):
            raise bad_field(key, printable(words), f"must list {' or '.join(known)} for every layer", "other kinds are not modelled")
        if len(words) != num_layers:
            raise bad_field(key, printable(words), f"must have one entry for each of the {printable(num_layers)} layers", "correct it")
        return tuple(words)

    @_noted(_NO_NUMBERS)
    def indices(self, key: str, num_layers: int) -> tuple[int, ...]:
        """Return layer indices, from 0; empty where the key is missing."""
        numbers = self.data.get(key)
        if numbers is None:
            return ()
        if not isinstance(numbers, (list, tuple)) or any(
            not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < num_layers for n in numbers
        ):
            rule = f"must list numbers of layers from 0 to {printable(num_layers - 1)}"
            raise bad_field(key, printable(numbers), rule, "correct it in the config")
        return tuple(numbers)

    def entries(self, key: str) -> Sequence[object]:
        """Return the entries of a list, of any type; empty where there is no list."""
        value = self.data.get(key)
        return value if isinstance(value, (list, tuple)) else ()

    def refuse(self, key: str, rule: str, remedy: str) -> None:
        """Record that a key's value is not modelled."""
        self.faults.append(str(bad_field(key, printable(self.data.get(key)), rule, remedy)))

    def num_layers(self) -> int:
        """Return the number of layers, limited to `MAX_LAYERS`; a larger one is refused with the model."""
        return min(max(1, self.count("num_hidden_layers")), MAX_LAYERS)

    @_noted(1)
    def count(self, *keys: str, default: int | None = None) -> int:
        """Return a size; further keys are older names of the first, and all present ones must agree."""
        counts: dict[str, int] = {}
        for key in filter(self.has, keys):
            counts[key] = value = self.data[key]
            if not isinstance(value, int) or isinstance(value, bool):
                raise bad_field(key, quoted(value), "must be a whole number", "correct it in the config")
        if len(set(counts.values())) > 1:
            (first, value), (other, another) = list(counts.items())[:2]
            raise bad_field(first, value, f"contradicts {other}={another}", "keep one of the two")
        if counts:
            return next(iter(counts.values()))
        if default is None:
            default = self.defaults.get(keys[0])
        if default is None:
            raise InputError(f"{keys[0]}: is missing, and model_type={self.model_type} needs it; add it to the config")
        return default

    @_noted(False)
    def flag(self, key: str, *, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_field(key, quoted(value), "must be true or false", "write one of them")
        return value

    @_noted(0.0)
    def share(self, key: str, *, default: float = 0.0) -> float:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise bad_field(key, quoted(value), "must be a share from 0 to below 1", "correct it in the config")
        return float(value)

    @_noted("")
    def choice(self, key: str, known: tuple[str, ...], *, default: str) -> str:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in known:
            raise bad_field(key, quoted(value), "is not modelled", f"known are {', '.join(known)}")
        return value

    @_noted("gelu")
    def activation(self, key: str, *, default: str) -> str:
        value = self.data.get(key) if self.has(key) else default
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise bad_field(key, printable(value), "this activation is not modelled", f"known are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    @_noted(None)
    def must_be(self, key: str, expected: object, lacking: str) -> None:
        """Check a switch that selects an unsupported variant."""
        value = self.data.get(key)
        if value is not None and value != expected:
            raise bad_field(key, printable(value), f"{lacking} not modelled yet", f"only {key}={json.dumps(expected)} is")


_ACTIVATIONS = {name: activation for activation, spec in ACTIVATIONS.items() for name in spec.names}


def head_dim_of(hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise bad_field("num_attention_heads", printable(heads), f"must divide hidden_size={printable(hidden)}", "or give head_dim")
    return hidden // heads


def window_of(fields: ConfigFields, *, used: bool, every: int) -> Values:
    """Return the window and the period of layers that ignore it; `layer_types`, where present, lists the layers one by one."""
    switched_off = "sliding_window" in fields.data and not fields.has("sliding_window")  # null
    window = fields.count("sliding_window") if used and not switched_off else 0
    kinds = fields.data.get("layer_types")
    if kinds is None or not window:
        return {"sliding_window": window, "full_attention_every": every if window else 0}
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, (list, tuple)) or not kinds or any(not isinstance(kind, str) or kind not in known for kind in kinds):
        raise bad_field("layer_types", printable(kinds), f"must list {' or '.join(known)} for every layer", "other kinds are not modelled")
    full = [kind == "full_attention" for kind in kinds]
    if all(full):
        return {"sliding_window": 0, "full_attention_every": 0}
    return {"sliding_window": window, "full_attention_every": every_of(fields, "layer_types", full)}


def layer_parts(layers: Sequence[tuple[Mixer, FeedForward]], **parts: object) -> Values:
    """Return the specs of the layers' parts, and the layer kinds where there are several."""
    used = {word for layer in layers for word in layer}
    kinds = kinds_of_layers(layers)
    plain = len(kinds) == 1 and kinds[0].mixer in ("attention", "latent") and kinds[0].feed_forward != "none"
    return {**{name: part if name in used else None for name, part in parts.items()}, "kinds": () if plain else kinds}


def no_rotary_every_of(fields: ConfigFields) -> int:
    """Return the period of layers without rotary positions: `no_rope_layers` has a 1 for each layer with them."""
    kinds = fields.data.get("no_rope_layers")
    if kinds is None:
        return fields.count("no_rope_layer_interval", default=4)
    if not isinstance(kinds, (list, tuple)) or not kinds or any(kind not in (0, 1) for kind in kinds):
        raise bad_field("no_rope_layers", printable(kinds), "must list 1 or 0 for every layer", "1 is a layer with rotary positions")
    return every_of(fields, "no_rope_layers", [kind == 0 for kind in kinds])


def every_of(fields: ConfigFields, key: str, marked: list[bool]) -> int:
    """Return the period of marked layers; 0: none is marked."""
    every = marked.index(True) + 1 if any(marked) else 0
    repeats = all(is_marked == (every > 0 and (i + 1) % every == 0) for i, is_marked in enumerate(marked))
    if not repeats or len(marked) != fields.count("num_hidden_layers"):
        rule = "must have one entry for each layer and repeat with a fixed period"
        raise bad_field(key, printable(fields.data[key]), rule, "other orders are not modelled")
    return every
