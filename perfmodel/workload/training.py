"""Training method of a job: full, low-rank adapters on frozen linear operators, or full with low-rank gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.workload.base_formats import BASE_FORMATS, BaseFormat
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import ParameterShape

#: Meaning of empty targets: every linear operator of a layer, not the output matrix. NeMo's default (linear_qkv, linear_proj, linear_fc1,
#: linear_fc2 of nemo.collections.llm.peft.LoRA), PEFT's target_modules="all-linear", and the set that QLoRA (arXiv 2305.14314, section 4)
#: needed to match full training. PEFT's own default for Llama is narrower: q_proj and v_proj.
ALL_LINEAR = "all-linear"

MAX_RANK = 65536

#: Format of the frozen weights where `qlora` sets none.
DEFAULT_BASE = "nf4-dq"

MAX_ADAPTERS = 1024

#: Groups of linear operators that targets may name.
_ATTENTION, _MLP, _EXPERTS = "attention", "mlp", "experts"

_TEXT = re.compile(r"(q?[ld]ora|galore):(\d{1,9})(?:x(\d{1,9}))?(?::([\w.+-]*))?(?::([\w-]+))?", re.ASCII)
_EXAMPLES = "full, lora:16, qlora:16, dora:16, galore:128, lora:16:q_proj+v_proj or qlora:16:all-linear:int8"


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    DORA = "dora"
    QDORA = "qdora"
    GALORE = "galore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training method: `full`, `lora:RANK`, `qlora:RANK`, `dora:RANK`, `qdora:RANK`, `galore:RANK`.

    `:q_proj+v_proj` after the rank: adapters (or projected gradients) for these operators only.

    rank          columns of an adapter's first matrix, rows of its second
    targets       linear operators of a layer, or groups of them: attention, mlp, experts; none: all
    num_adapters  loaded adapters, of which a batch trains one (`lora:16x4`)
    base          format of the frozen layer matrices; empty: the dtype of the computation
    is_full       all weights are trained; quantizes_base: the frozen layer matrices are quantised
    """

    method: Method = Method.FULL
    rank: int = 0
    targets: tuple[str, ...] = ()
    num_adapters: int = 1
    base: str = ""
    is_full: bool = field(init=False, repr=False, compare=False)
    quantizes_base: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_full", self.method in (Method.FULL, Method.GALORE))
        object.__setattr__(self, "quantizes_base", self.method in (Method.QLORA, Method.QDORA))
        if not isinstance(self.method, Method):
            raise bad_field("train", shown(self.method), "not known", f"write {_EXAMPLES}")
        if self.method is Method.FULL:
            if self.rank or self.targets or self.base or self.num_adapters != 1:
                raise bad_field("train", "full", "has no adapters, so no rank, no targets and no base format", f"write {_EXAMPLES}")
        elif isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= MAX_RANK:
            raise bad_field("train", f"{self.method}:{shown(self.rank)}", f"the rank must be from 1 to {MAX_RANK}", f"write {_EXAMPLES}")
        elif not 1 <= self.num_adapters <= MAX_ADAPTERS:
            text = f"{self.method}:{self.rank}x{self.num_adapters}"
            raise bad_field("train", text, f"adapters at a time must be from 1 to {MAX_ADAPTERS}", "write lora:16x4 for four")
        if self.method is Method.GALORE and (self.base or self.num_adapters > 1):
            raise bad_field("train", f"galore:{self.rank}", "has no adapters to count and no base format", f"write {_EXAMPLES}")
        if not self.is_full and not self.quantizes_base and self.base:
            rule = f"{self.method} keeps the base in the dtype of the computation, not in {self.base}"
            raise bad_field("train", str(self), rule, f"write q{self.method}:{self.rank}:all-linear:{self.base}")
        if self.quantizes_base:
            if not self.base:
                object.__setattr__(self, "base", DEFAULT_BASE)
            if self.base not in BASE_FORMATS:
                raise bad_field(
                    "train", f"{self.method}:{self.rank}", f"{self.base} is no format of a base", f"use {', '.join(BASE_FORMATS)}"
                )
        if len(set(self.targets)) != len(self.targets):
            raise bad_field("train", str(self), "names an operator twice", "name each once")

    @property
    def decomposes(self) -> bool:
        """Whether a magnitude for each matrix row is trained too (DoRA)."""
        return self.method in (Method.DORA, Method.QDORA)

    def on_checkpoint(self, name: str) -> Training:
        """Return the training of a named checkpoint: adapters on one in 4 bits (`unsloth/Qwen3-8B-bnb-4bit`) have a quantised base."""
        if self.method in (Method.LORA, Method.DORA) and name.lower().endswith("-bnb-4bit"):
            return replace(self, method=Method(f"q{self.method}"))
        return self

    @property
    def base_format(self) -> BaseFormat:
        return BASE_FORMATS[self.base]

    def __str__(self) -> str:
        if self.method is Method.FULL:
            return str(self.method)
        count = f"x{self.num_adapters}" if self.num_adapters > 1 else ""
        base = self.base if self.quantizes_base and self.base != DEFAULT_BASE else ""
        targets = "+".join(self.targets) or (ALL_LINEAR if base else "")
        return ":".join((str(self.method), f"{self.rank}{count}", *((targets,) if targets else ()), *((base,) if base else ())))

    def adapts(self, operator: str) -> bool:
        """Return whether a linear operator of a layer has an adapter."""
        return not self.targets or operator in self.targets or group_of(operator) in self.targets

    def check_targets(self, known: Collection[str], model: str) -> None:
        """Raise InputError for a target that is none of the linear operators of the model's layers."""
        groups = {group_of(name) for name in known}
        for name in self.targets:
            if name not in known and name not in groups:
                rule = f"{name}: is no linear operator of a layer of {model}"
                options = f"{', '.join((*known, *sorted(groups)))}"
                remedy = f"use {options} (+ joins several), or leave them out for all"
                if name in BASE_FORMATS:
                    remedy = f"write {self.method}:{self.rank}:{ALL_LINEAR}:{name} for a base in {name}"
                raise bad_field("train", str(self), rule, remedy)


FULL_TRAINING = Training()


def training_of(value: object, field: str = "train") -> Training:
    """Return the training method of a text such as `lora:16`."""
    if isinstance(value, Training):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text == Method.FULL:
        return FULL_TRAINING
    match = _TEXT.fullmatch(text)
    if match is None:
        if text in [*Method]:
            raise bad_field(field, text, "has no rank", f"write {text}:16")
        raise bad_field(field, text or shown(value), "not known", f"write {_EXAMPLES}; a comma parts several values, + joins operators")
    method, rank, count, targets, base = match.groups()
    named = () if targets in (None, "", ALL_LINEAR) else tuple(targets.split("+"))
    return Training(method=Method(method), rank=int(rank), targets=named, num_adapters=int(count or 1), base=base or "")


def is_linear_name(operator: str) -> bool:
    """Return whether the operator, by its name in the layer, is a linear one that adapters and quantised bases apply to.

    Routers and gates with one column are not: PEFT's defaults and the trainers' target lists exclude them.
    """
    if "_lora_" in operator:
        return False
    return operator.endswith("_proj") or operator.startswith("in_proj_") or operator in ("experts_up", "experts_down")


def group_of(operator: str) -> str:
    """Return the group name that targets may use for a linear operator."""
    if operator in ("experts_up", "experts_down"):
        return _EXPERTS
    return _MLP if operator.removeprefix("shared_") in ("gate_proj", "up_proj", "down_proj") else _ATTENTION


def linear_shapes(model: TransformerConfig, training: Training | None = None) -> Iterator[tuple[int, ParameterShape]]:
    """Yield the matrices of linear operators of each layer kind, with the number of its layers.

    training   only the operators that it adapts, or whose gradients it projects; None: all
    """
    for kind in model.layer_kinds:
        for shape in model.layer_shapes(kind):
            operator = shape.name.removesuffix(".weight")
            if operator != shape.name and is_linear_name(operator) and (training is None or training.adapts(operator)):
                yield kind.count, shape


def linear_operators(model: TransformerConfig) -> tuple[str, ...]:
    """Return the names of the linear operators in layers of all kinds."""
    return tuple(dict.fromkeys(shape.name.removesuffix(".weight") for _, shape in linear_shapes(model)))


def num_trained_parameters(model: TransformerConfig, training: Training) -> int:
    """Return the elements of the trained adapter: rank (in + out) per adapted matrix; DoRA adds out."""
    if training.is_full:
        return model.num_parameters
    total = 0
    for count, shape in linear_shapes(model, training):
        *experts, rows, columns = shape.shape
        elements = training.rank * (rows + columns) + training.decomposes * rows
        total += count * math.prod(experts) * elements
    return total


def frozen_parameter_bytes(model: TransformerConfig, training: Training, parameter_bytes: float) -> float:
    """Return the bytes of the frozen weights and of idle adapters; 0 where all weights are trained."""
    if training.is_full:
        return 0.0
    idle = (training.num_adapters - 1) * num_trained_parameters(model, training) * parameter_bytes
    if not training.quantizes_base:
        return idle + model.num_parameters * parameter_bytes
    quantized = sum(count * shape.num_elements for count, shape in linear_shapes(model))
    return idle + quantized * training.base_format.bytes_per_weight + (model.num_parameters - quantized) * parameter_bytes
