"""Published training runs in the form that fits read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.cases import planned_cases
from perfmodel.foundation.errors import InputError
from perfmodel.validation.case_plan import PlannedCase
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.framework_patterns import framework_of
from perfmodel.validation.plan_choice import Choice, choice_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published step.

    model     architecture and size, independent of its name: the label of a fold
    choice    the run in its group of compared plans, without a prediction
    """

    id: str
    model: str
    planned: PlannedCase
    settings: Mapping[str, Any]
    choice: Choice

    @property
    def source(self) -> str:
        return self.choice.labels.source

    @property
    def measured(self) -> float:
        """[s]"""
        return self.choice.measured

    @property
    def profile(self) -> str:
        return self.planned.framework.profile


def read_runs(path: str | Path) -> tuple[PublishedRun, ...]:
    """Return the training runs of dense decoders of more than one layer that have a step time, without Megatron-LM's tests.

    Only primary runs count, except for NVIDIA's recipes: none of their tables states the recomputation.
    """
    runs = tuple(_run(case, planned) for case, planned in planned_cases(read_cases(path), _is_scored))
    if not runs:
        raise InputError(f"cases={path}: holds no primary training run of a dense decoder that can be predicted; give another file")
    return runs


def _is_scored(case: Case) -> bool:
    model = case.inputs.get("model")
    if case.reason or case.is_apart or case.group == "mcore" or not np.isfinite(case.measured("step_time")) or not isinstance(model, dict):
        return False
    if case.tier != "primary" and framework_of(case.inputs.get("framework")).profile != "nemo":
        return False
    return not model.get("num_experts") and model.get("kind") == "decoder" and (model.get("num_hidden_layers") or 0) > 1


def _run(case: Case, planned: PlannedCase) -> PublishedRun:
    model = planned.plan.job.transformer
    return PublishedRun(
        id=case.id,
        model=f"L{model.num_hidden_layers} h{model.hidden_size} a{model.num_attention_heads}/{model.num_key_value_heads} "
        f"f{model.intermediate_size}",
        planned=planned,
        settings=planned.framework.options.setup(case.inputs.get("settings")),
        choice=choice_of(case, planned),
    )
