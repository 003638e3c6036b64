"""Plan of a published serving run: its inputs become job, plan, cluster and engine.

Missing inputs follow the engine's defaults and are listed. A run that cannot be predicted raises `InputError` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.frameworks.engine import version_of
from perfmodel.hardware.reader import chip_called, list_chips
from perfmodel.parallel.serving.plan import Pools, ServingPlan
from perfmodel.validation.case_plan import HardwareOfCase
from perfmodel.validation.fields import MAX_COUNT, not_stated, optional_count, stated_count
from perfmodel.validation.serving.launches import launch_of
from perfmodel.validation.serving.measured import KINDS
from perfmodel.validation.serving.models import model_of_case
from perfmodel.validation.serving.software import engine_of
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization
from perfmodel.workload.serving import Lengths, ServingJob, Speculation, constant

OFFERED_AT_ONCE = 4096
"""Requests of a run at maximum load: more than any engine runs concurrently."""
ACCEPTANCE = 0.75
"""Acceptance rate of a drafted token; benchmarks with speculative decoding do not publish theirs.

DeepSeek-V3 states 85 to 90 % for its second token (arXiv 2412.19437, section 5.4.3); later models with one module have lower rates.
"""

#: Families whose fp8 checkpoints have scales of 128-blocks (`weight_block_size` of their configs); others have a scale per tensor.
_BLOCK_FAMILIES = ("deepseek", "kimi", "glm", "minimax", "qwen3")
#: Precision of a run -> format of its weights.
PRECISIONS: Mapping[str, str] = {
    "bf16": "bf16", "fp16": "fp16", "fp32": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4", "int4": "w4a16",
    "w4a16": "w4a16", "awq": "w4a16", "gptq": "w4a16", "int8-wo": "int8-weights", "int8": "int8", "w4a8": "w4a8",
}  # fmt: skip
_CACHES = {"bf16": Dtype.BF16, "fp16": Dtype.FP16, "fp8": Dtype.FP8, "auto": None}
#: Engines whose quantized checkpoints (of TensorRT Model Optimizer) state an fp8 cache.
_FP8_CACHES = ("tensorrt-llm", "tensorrt-llm-2024", "nim")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedServing:
    """A run ready to be predicted.

    kind      determines the compared metrics (`measured.KINDS`)
    engine    name of a profile; version: of the engine, () if not stated
    distinct_experts   active experts of a layer if all sequences are the same prompt; 0: by routing
    assumed   inputs that the run does not state
    """

    hardware: HardwareOfCase
    engine: str
    version: tuple[int, ...] = ()
    job: ServingJob
    plan: ServingPlan
    kind: str
    distinct_experts: float = 0.0
    assumed: tuple[str, ...]


def plan_of_serving(inputs: Mapping[str, Any]) -> PlannedServing:
    """Return the job and the plan of the run that `inputs` describe. Reads nothing but its arguments."""
    assumed: list[str] = []
    kind = _kind(inputs, assumed)
    chip = _chip(inputs)
    if inputs.get("framework") is None:
        assumed.append("framework")
    engine = engine_of(inputs.get("framework"), chip=chip)
    version = version_of(str(inputs.get("framework") or ""))
    launch = launch_of(inputs, engine, chip, version)
    plan, chips = _plan(inputs, engine, assumed)
    plan = replace(plan, max_batch=launch.max_batch, max_tokens=launch.max_tokens)
    job = _job(inputs, kind, engine, assumed)
    if launch.cache is not None:
        job = replace(job, kv_precision=launch.cache)
    hardware = HardwareOfCase(chip=chip, chips_per_node=None, num_chips=chips, inter_node_bandwidth_per_chip=None)
    return PlannedServing(
        hardware=hardware,
        engine=engine,
        version=version,
        job=job,
        plan=plan,
        kind=kind,
        distinct_experts=_distinct_experts(inputs, job),
        assumed=tuple(assumed),
    )


def _kind(inputs: Mapping[str, Any], assumed: list[str]) -> str:
    kind = inputs.get("kind")
    if kind is None:
        assumed.append("kind")
        return "serving" if inputs.get("batch") is not None else "max_throughput"
    if kind not in KINDS:
        raise bad_field("kind", one_line(kind, 40), "is not known", f"use one of {', '.join(KINDS)}")
    return str(kind)


def _chip(inputs: Mapping[str, Any]) -> str:
    stated, description = inputs.get("chip_id"), inputs.get("chip")
    if isinstance(stated, str) and stated in list_chips():
        return stated
    for text in (stated, description):
        chip_id = _chip_id_of(text) if isinstance(text, str) else ""
        if chip_id:
            return chip_id
    shown = one_line(stated or description or "", 60)
    raise InputError(
        f"chip_id={shown}: no chip of this name is known; it cannot be predicted" if shown else "chip_id: the run does not state it"
    )


def _chip_id_of(text: str) -> str:
    try:
        return chip_called(text)
    except InputError:
        return ""


# ---------------------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------------------


def _plan(inputs: Mapping[str, Any], engine: str, assumed: list[str]) -> tuple[ServingPlan, int]:
    """Return (plan, total number of chips)."""
    if inputs.get("disaggregated") is True or isinstance(inputs.get("disagg"), Mapping):
        return _pools(inputs, engine)
    parallel = inputs.get("parallel")
    parallel = parallel if isinstance(parallel, Mapping) else {}
    attention_dp = stated_count(parallel, "attention_dp", default=1)
    stated, pp, tp = optional_count(inputs, "chips"), stated_count(inputs, "pp", default=1), optional_count(inputs, "tp")
    if tp is None:
        assumed.append("tp")
        tp = max((stated or 1) // (pp * attention_dp), 1)
    ways = tp * pp * attention_dp
    chips = ways if stated is None else stated
    if chips % ways:
        raise bad_field("chips", chips, f"must be a multiple of tp * pp * attention_dp = {ways}", "correct it in the case")
    ep = _ep(inputs, parallel, tp * attention_dp)
    plan = ServingPlan(engine=engine, tp=tp, pp=pp, attention_dp=attention_dp, ep=ep, replicas=chips // ways)
    return plan, chips


def _ep(inputs: Mapping[str, Any], parallel: Mapping[str, Any], ways: int) -> int:
    """Return the expert-parallel degree; 1 for a model without experts, even if the run states another."""
    model = inputs.get("model")
    if not (isinstance(model, Mapping) and isinstance(model.get("moe"), Mapping)):
        return 1
    ep, expert_tp = optional_count(parallel, "moe_ep"), optional_count(parallel, "moe_tp")
    if ep is None:
        ep = ways // expert_tp if expert_tp is not None and ways % expert_tp == 0 else 1
    if ways % ep:
        raise bad_field("moe_ep", ep, f"must divide tp * attention_dp = {ways}", "correct it in the case")
    return ep


def _pools(inputs: Mapping[str, Any], engine: str) -> tuple[ServingPlan, int]:
    """Return the plan of disaggregated serving, and its number of chips.

    Experts are sharded over all chips of a worker. Attention is data-parallel in prefill workers of such models, and in decode workers if
    the run states it.
    """
    split = inputs.get("disagg")
    if not isinstance(split, Mapping):
        raise InputError("disagg: the run does not state how many chips its workers have; it cannot be predicted without it")
    names = ("prefill_workers", "chips_per_prefill_worker", "decode_workers", "chips_per_decode_worker")
    prefill_workers, prefill_chips, decode_workers, decode_chips = (stated_count(split, name) for name in names)
    model = inputs.get("model")
    is_moe = isinstance(model, Mapping) and isinstance(model.get("moe"), Mapping)
    pools = Pools(
        prefill=_worker(engine, prefill_chips, is_moe, spreads=is_moe),
        decode=_worker(engine, decode_chips, is_moe, spreads=split.get("decode_attention_dp") is True),
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
    )
    return ServingPlan(engine=engine, pools=pools), pools.num_chips


def _worker(engine: str, chips: int, is_moe: bool, *, spreads: bool) -> ServingPlan:
    ep = chips if is_moe else 1
    return ServingPlan(engine=engine, tp=1 if spreads else chips, attention_dp=chips if spreads else 1, ep=ep)


# ---------------------------------------------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------------------------------------------


def _job(inputs: Mapping[str, Any], kind: str, engine: str, assumed: list[str]) -> ServingJob:
    prompt = _lengths(inputs, "input_len")
    answer = constant(1) if kind == "ttft_only" else _lengths(inputs, "output_len")
    speculation = _speculation(inputs, assumed)
    model = model_of_case(inputs.get("model"), longest=prompt.most + answer.most, drafts=speculation is not None)
    quantization = _quantization(inputs, model.architecture.startswith(_BLOCK_FAMILIES), assumed)
    return ServingJob(
        model=model,
        input_len=prompt,
        output_len=answer,
        concurrency=_concurrency(inputs, kind),
        quantization=quantization,
        kv_precision=_cache(inputs, quantization, engine, assumed),
        speculation=speculation,
        is_static=kind in ("static_batch", "ttft_only"),
    )


def _distinct_experts(inputs: Mapping[str, Any], job: ServingJob) -> float:
    """Return the active experts of repeated prompts: equal sequences are routed to equal experts."""
    experts = job.model.experts
    return float(experts.top_k) if inputs.get("repeated_prompts") is True and experts is not None else 0.0


def _concurrency(inputs: Mapping[str, Any], kind: str) -> int:
    batch = optional_count(inputs, "batch")
    if batch is None:
        if kind != "max_throughput":
            raise not_stated("batch")
        return OFFERED_AT_ONCE
    return batch


def _lengths(inputs: Mapping[str, Any], field: str) -> Lengths:
    """Return nominal lengths, or a uniform distribution up to the nominal length with the stated mean."""
    most, mean = optional_count(inputs, field), inputs.get(f"{field}_mean")
    is_mean = isinstance(mean, (int, float)) and not isinstance(mean, bool) and 1.0 <= mean <= MAX_COUNT
    if most is None:
        if not is_mean:
            raise not_stated(field)
        return constant(round(float(mean)))  # type: ignore[arg-type]
    if not is_mean or not 0.5 * (most + 1) <= float(mean) <= most:  # type: ignore[arg-type]
        return constant(most)
    return Lengths(least=max(round(2.0 * float(mean) - most), 1), most=most)  # type: ignore[arg-type]


def _quantization(inputs: Mapping[str, Any], in_blocks: bool, assumed: list[str]) -> Quantization:
    value = inputs.get("precision")
    if value is None:
        assumed.append("precision")
        value = "bf16"
    name = PRECISIONS.get(value.lower()) if isinstance(value, str) else None
    if name is None:
        raise bad_field("precision", one_line(value, 40), "is not known", f"use one of {', '.join(PRECISIONS)}")
    return QUANTIZATIONS["fp8-block" if name == "fp8" and in_blocks else name]


def _cache(inputs: Mapping[str, Any], quantization: Quantization, engine: str, assumed: list[str]) -> Dtype:
    value = inputs.get("kv_precision")
    if value is not None and value not in _CACHES:
        raise bad_field("kv_precision", one_line(value, 40), "is not known", f"use one of {', '.join(_CACHES)}")
    stated = _CACHES[value] if value is not None else None
    if stated is not None:
        return stated
    assumed.append("kv_precision")
    if quantization.product in (Dtype.FP8, Dtype.FP4) and engine in _FP8_CACHES:
        return Dtype.FP8
    return Dtype.FP16 if quantization.product is Dtype.FP16 else Dtype.BF16


def _speculation(inputs: Mapping[str, Any], assumed: list[str]) -> Speculation | None:
    drafted = optional_count(inputs, "draft_tokens")
    if inputs.get("speculative") is not True and drafted is None:
        return None
    assumed.append("acceptance")
    return Speculation(draft_tokens=min(drafted or 1, 64), acceptance=ACCEPTANCE)
