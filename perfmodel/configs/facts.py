"""Facts of a plan: the names in a table's expressions for exported keys."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.context_forms import ULYSSES, ULYSSES_RULES
from perfmodel.parallel.framework_ref import SETTING_NAMES
from perfmodel.parallel.plan import Plan, plan_facts
from perfmodel.parallel.recompute_modules import MODULES
from perfmodel.parallel.stage_cuts import default_stage_layers
from perfmodel.workload.models import hub_id_of


def facts_of_plan(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    job, layout, model = plan.job, plan.layout, plan.job.transformer
    per_node = min(cluster.chips_per_node, plan.num_chips)
    facts: dict[str, Any] = dict.fromkeys((*SETTING_NAMES, "lora_rank", "lora_modules", "base_format", "adapters"))
    facts |= plan_facts(plan) | dict(plan.framework.settings)
    facts |= {
        "chips_per_node": per_node,
        "nodes": -(-plan.num_chips // per_node),
        "dp": layout.data_parallel,
        "ep": plan.ep,
        "etp": plan.etp,
        "dispatcher": str(plan.dispatcher),
        "accumulation": plan.num_microbatches,
        "stage_layers": list(plan.stage_layers),
        "even_stages": len(set(plan.stage_layers)) == 1 and plan.stage_layers == default_stage_layers(job, layout.pp, plan.virtual_stages),
        "recompute_operators": list(plan.recompute_operators),
        "recompute_modules": [name for name, operators in MODULES.items() if set(operators) <= set(plan.recompute_operators)],
        "fp8": str(job.precision).startswith(("fp8", "mxfp8")),
        "capacity_factor": job.routing.capacity_factor or None,
        "model_id": hub_id_of(model.name),
        "chip": cluster.chip.name,
        "vendor": cluster.chip.vendor,
        "pools": len(cluster.pools),
        "has_latent": model.latent is not None,
        "has_states": model.mamba is not None or model.delta is not None,
        "dense_layers": sum(kind.count for kind in model.kinds if kind.feed_forward == "dense"),
    }
    if facts["cp_form"] is None and plan.rule_set in ULYSSES_RULES:
        facts["cp_form"] = ULYSSES
    if not job.train.is_full:
        facts |= {"lora_rank": job.train.rank, "lora_modules": list(job.train.targets) or None, "base_format": job.train.base or None}
        facts["adapters"] = "dora" if job.train.decomposes else "lora"
    facts |= {f"model.{field.name}": getattr(model, field.name) for field in fields(model)}
    if model.experts is not None:
        facts |= {f"experts.{field.name}": getattr(model.experts, field.name) for field in fields(model.experts)}
    return facts
