"""Serving plans in plan files: written from a plan, read as the request that reproduces it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfmodel.parallel.model_fields import model_to_dict, read_model
from perfmodel.parallel.plan import SCHEMA_VERSION
from perfmodel.parallel.serving.plan import SERVING_KIND, Pools, ServingPlan
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.workload.serving import Lengths


def serving_plan_to_dict(plan: ServingPlan) -> dict[str, Any]:
    """Return the plan as plain values, in an order for readers."""
    job, drafts, layout = plan.job, plan.job.speculation, plan.layout
    load: dict[str, Any] = {"concurrency": job.concurrency, "rate": job.rate, "prefix_hit": job.prefix_hit or None}
    if drafts is not None:
        draft = None if drafts.draft is None else model_to_dict(drafts.draft)
        load |= {"draft_tokens": drafts.draft_tokens, "acceptance": drafts.acceptance, "draft_model": draft}
    limits = layout.decode if isinstance(layout, Pools) else layout  # workers share them
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": SERVING_KIND,
        "job": {
            "model": model_to_dict(job.model),
            "input_len": _lengths(job.input_len),
            "output_len": _lengths(job.output_len),
            **{name: value for name, value in load.items() if value is not None},
            "quantization": job.quantization.name,
            "kv_precision": str(job.kv_precision),
        },
        "cluster": plan.cluster,
        "num_chips": plan.num_chips,
        "engine": plan.engine,
        **({"workers": layout.text} if isinstance(layout, Pools) else {"layout": layout.degrees | {"replicas": layout.replicas}}),
        **{name: value for name, value in (("max_batch", limits.max_batch), ("max_tokens", limits.max_tokens)) if value},
        "calibration": plan.calibration,
    }


def _lengths(lengths: Lengths) -> int | str:
    return lengths.least if lengths.least == lengths.most else f"{lengths.least}:{lengths.most}"


def serving_request_of(data: Mapping[str, Any], *, where: str = "plan") -> ServingRequest:
    """Return the request of a file's contents. Raises InputError that names the field."""
    from perfmodel.foundation.schema import check
    from perfmodel.parallel.serving.schemas import ServingPlanFile

    check(ServingPlanFile, data, where=where)
    words = dict(data["job"])
    for name in ("model", "draft_model"):
        if name in words:
            words[name] = read_model(words[name], f"job.{name}")
    words |= {name: data[name] for name in ("cluster", "engine", "workers", "max_batch", "max_tokens") if name in data}
    return ServingRequest(**words, **data.get("layout", {}), chips=data["num_chips"], calibration=data.get("calibration") or None)
