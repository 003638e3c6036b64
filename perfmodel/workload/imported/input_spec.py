"""Input specs of a module: `tokens=int64[1,2048]`, or `float32[8,3,224,224]` for the next positional argument."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from perfmodel.foundation.errors import bad_field, shown, suggest, whole_number

#: Type names of torch, and perfmodel's short names.
_TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_SPEC = re.compile(r"(?:([A-Za-z_]\w*)=)?([A-Za-z]\w*)\[([^\[\]]*)\]")
_HOW = "write name=type[size,size], such as tokens=int64[1,2048]; several with spaces between them"
_MOST_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An argument of `forward`; an empty `name` is the next positional one. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{self.name}={self.dtype}[{sizes}]" if self.name else f"{self.dtype}[{sizes}]"


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    """Return the specs of all texts, each of which has one or several separated by spaces or semicolons; no sizes: a scalar."""
    specs: list[InputSpec] = []
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise bad_field("inputs", shown(texts), "must be a text or a list of texts", "write tokens=int64[1,2048]")
    for text in texts:
        for part in re.sub(r"\s*(\]|[\[,=]\s*)", lambda match: match[1].strip(), text).replace(";", " ").split():
            match = _SPEC.fullmatch(part)
            if match is None:
                raise bad_field("inputs", part, "is not an input", _HOW)
            name, dtype, sizes = match.groups(default="")
            dtype = _SHORT.get(dtype, dtype)
            if dtype not in _TYPES:
                raise bad_field("inputs", part, f"{dtype} is no type{suggest(dtype, (*_TYPES, *_SHORT))}")
            shape = []
            for size in sizes.split(",") if sizes else []:
                count = whole_number(size)
                if not count:
                    raise bad_field("inputs", part, f"{size or 'nothing'} is no size: must be a whole number of at least 1", _HOW)
                shape.append(count)
            if prod(shape) > _MOST_ELEMENTS:
                raise bad_field("inputs", part, "has more elements than can be counted", "use smaller sizes")
            if name and name in {earlier.name for earlier in specs}:
                raise bad_field("inputs", part, f"{name} is given twice", "give each argument once")
            if not name and specs and specs[-1].name:
                raise bad_field("inputs", part, "has no name and follows one that has", "put those without a name first")
            specs.append(InputSpec(name=name, dtype=dtype, shape=tuple(shape)))
    return tuple(specs)
