"""What of a model is trained: all of it, or low-rank adapters beside linear operators whose weights are frozen."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from perfmodel.foundation.errors import bad_field, shown
from perfmodel.workload.config import TransformerConfig

#: What is meant by no names: every linear operator of a layer, not the output matrix. NeMo's default (linear_qkv, linear_proj, linear_fc1,
#: linear_fc2 of nemo.collections.llm.peft.LoRA), PEFT's target_modules="all-linear", and what QLoRA (arXiv 2305.14314, section 4) found
#: to be needed to match full training. PEFT's own default for Llama is narrower: q_proj and v_proj.
ALL_LINEAR = "all-linear"

MAX_RANK = 65536

#: NF4 with double quantisation: 4 bits, an 8-bit scale for each block of 64, a float32 scale for each 256 of these. [byte]
#: Source: QLoRA, section 3.
NF4_BYTES = (4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0)) / 8.0

_TEXT = re.compile(r"(lora|qlora):(\d{1,9})(?::([\w.+-]+))?", re.ASCII)
_EXAMPLES = "full, lora:16, qlora:16 or lora:16:q_proj+v_proj"


class Method(StrEnum):
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a job trains: `full`, `lora:RANK`, `qlora:RANK`, with `:q_proj+v_proj` adapters beside these operators alone.

    rank      columns of an adapter's first matrix, rows of its second
    targets   names of linear operators in a layer; none: all of them
    """

    method: Method = Method.FULL
    rank: int = 0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise bad_field("train", shown(self.method), "not known", f"write {_EXAMPLES}")
        if self.is_full:
            if self.rank or self.targets:
                raise bad_field("train", "full", "has no adapters, so no rank and no targets", f"write {_EXAMPLES}")
        elif isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= MAX_RANK:
            raise bad_field("train", f"{self.method}:{shown(self.rank)}", f"the rank must be from 1 to {MAX_RANK}", f"write {_EXAMPLES}")
        if len(set(self.targets)) != len(self.targets):
            raise bad_field("train", str(self), "names an operator twice", "name each once")

    @property
    def is_full(self) -> bool:
        return self.method is Method.FULL

    @property
    def quantizes_base(self) -> bool:
        return self.method is Method.QLORA

    def __str__(self) -> str:
        if self.is_full:
            return str(self.method)
        return ":".join((str(self.method), str(self.rank), *(("+".join(self.targets),) if self.targets else ())))

    def check_targets(self, known: Collection[str], model: str) -> None:
        """InputError for a target that is none of the linear operators of the model's layers."""
        for name in self.targets:
            if name not in known:
                rule = f"{name}: is no linear operator of a layer of {model}"
                raise bad_field("train", str(self), rule, f"use {', '.join(known)}, joined by +, or leave the names out for all of them")


FULL_TRAINING = Training()


def training_of(value: object, field: str = "train") -> Training:
    """What a text such as `lora:16` means."""
    if isinstance(value, Training):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text == Method.FULL:
        return FULL_TRAINING
    match = _TEXT.fullmatch(text)
    if match is None:
        if text in (Method.LORA, Method.QLORA):
            raise bad_field(field, text, "has no rank", f"write {text}:16")
        raise bad_field(field, text or shown(value), "not known", f"write {_EXAMPLES}")
    method, rank, targets = match.groups()
    named = () if targets in (None, ALL_LINEAR) else tuple(targets.split("+"))
    return Training(method=Method(method), rank=int(rank), targets=named)


def linear_operators(model: TransformerConfig) -> tuple[str, ...]:
    """Names of the linear operators of a layer."""
    gate = ("gate_proj",) if model.gated_mlp else ()
    scale = ("q_gate_proj",) if model.attention_gate else ()
    return ("q_proj", "k_proj", "v_proj", *scale, "o_proj", *gate, "up_proj", "down_proj")


def num_trained_parameters(model: TransformerConfig, training: Training) -> int:
    """Of adapters the elements of both matrices: rank (in + out) for each linear operator that has one."""
    if training.is_full:
        return model.num_parameters
    adapted = training.targets or linear_operators(model)
    sizes = {shape.name.removesuffix(".weight"): sum(shape.shape) for shape in model.layer_shapes() if len(shape.shape) == 2}
    return model.num_hidden_layers * training.rank * sum(sizes[name] for name in adapted)


def frozen_parameter_bytes(model: TransformerConfig, training: Training, parameter_bytes: float) -> float:
    """Of the weights that are there beside adapters; nothing where all are trained."""
    if training.is_full:
        return 0.0
    quantized = 0
    if training.quantizes_base:
        matrices = {f"{name}.weight" for name in linear_operators(model)}
        quantized = model.num_hidden_layers * sum(shape.num_elements for shape in model.layer_shapes() if shape.name in matrices)
    return quantized * NF4_BYTES + (model.num_parameters - quantized) * parameter_bytes
