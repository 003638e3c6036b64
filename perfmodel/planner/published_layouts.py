"""Published parallel layouts of models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.parallel.plan_file import list_plans, read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDegrees:
    """Published degrees for any number of chips; data parallelism takes the rest. ep: 1 for models without experts."""

    tp: int
    cp: int
    pp: int
    zero: int
    source: str
    ep: int = 1


def published_degrees(model: str) -> PublishedDegrees | None:
    """Return the published degrees of a shipped model by name; None if none are known."""
    degrees = _degrees().get(model)
    if degrees is not None or model not in list_plans():
        return degrees
    plan = read_plan(model)
    if plan.job.model.name != model:  # named after something else, as `fsdp` is
        return None
    layout = plan.layout
    return PublishedDegrees(tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=plan.ep, zero=plan.zero, source=f"strategies/plans/{model}.yaml")


@lru_cache(maxsize=1)
def _degrees() -> dict[str, PublishedDegrees]:
    path = resource_dir("strategies") / "published_layouts.yaml"
    data: Any = read_yaml(path)
    return {name: record_from_data(PublishedDegrees, record, where=f"{path.name}: {name}") for name, record in data["models"].items()}
