"""Published training runs as the commands of this folder read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError
from perfmodel.validation.case_plan import PlannedCase, plan_of_case
from perfmodel.validation.cases import Case, read_cases
from perfmodel.validation.framework_patterns import framework_of
from perfmodel.validation.plan_choice import BROKEN_NVLINK, Choice, choice_of
from perfmodel.validation.rows import NO_TIMES


def is_primary(case: Case) -> bool:
    """Whether every important input of a run is known, and its time is meaningful."""
    counts = case.tier == "primary" and not (case.reason or case.is_apart or case.group in NO_TIMES)
    return counts and not (math.isnan(case.measured("step_time")) or case.noted_all_reduce < BROKEN_NVLINK)


def planned_cases(cases: Iterable[Case], keep: Callable[[Case], bool]) -> Iterator[tuple[Case, PlannedCase]]:
    """Yield the kept training runs that can be planned, with their plans."""
    for case in cases:
        if not case.is_serving and keep(case):
            with suppress(InputError):
                yield case, plan_of_case(case.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A planned run that fits read.

    planned   under the framework that it names, or without it
    profile   of that framework
    measured  its step time [s], or the memory that it reported [byte]
    choice    the run in its group of compared plans, without a prediction
    """

    case: Case
    planned: PlannedCase
    profile: str
    settings: Mapping[str, Any]
    measured: float
    choice: Choice

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def model(self) -> str:
        """Architecture and size, independent of the name: the label of a fold."""
        model = self.planned.plan.job.transformer
        heads = f"a{model.num_attention_heads}/{model.num_key_value_heads}"
        return f"L{model.num_hidden_layers} h{model.hidden_size} {heads} f{model.intermediate_size}"

    @property
    def source(self) -> str:
        return self.choice.labels.source


def published_runs(cases: Iterable[Case], keep: Callable[[Case], bool], metric: str = "step_time") -> Iterator[PublishedRun]:
    """Yield the kept runs that can be planned, with what was measured."""
    for case, planned in planned_cases(cases, keep):
        yield PublishedRun(
            case=case,
            planned=planned,
            profile=planned.framework.profile,
            settings=planned.framework.options.setup(case.inputs.get("settings")),
            measured=case.measured(metric),
            choice=choice_of(case, planned),
        )


def read_runs(path: str | Path) -> tuple[PublishedRun, ...]:
    """Return the training runs of dense decoders of more than one layer that have a step time, without Megatron-LM's tests.

    Only primary runs count, except for NVIDIA's recipes: none of their tables states the recomputation.
    """
    runs = tuple(published_runs(read_cases(path), _is_fitted))
    if not runs:
        raise InputError(f"cases={path}: holds no primary training run of a dense decoder that can be predicted; give another file")
    return runs


def _is_fitted(case: Case) -> bool:
    model = case.inputs.get("model")
    if case.reason or case.is_apart or case.group in NO_TIMES or math.isnan(case.measured("step_time")) or not isinstance(model, dict):
        return False
    if case.tier != "primary" and framework_of(case.inputs.get("framework")).profile != "nemo":
        return False
    return not model.get("num_experts") and model.get("kind") == "decoder" and (model.get("num_hidden_layers") or 0) > 1
