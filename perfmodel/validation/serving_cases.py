"""Plan of a published serving run: its inputs become job, plan, cluster and engine.

Missing inputs follow the engine's defaults and are listed. A run that cannot be predicted raises `InputError` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.engine import GENERIC_ENGINE, version_of
from perfmodel.hardware.reader import chip_called, list_chips
from perfmodel.parallel.serving_plan import Pools, ServiceLayout, ServingLayout
from perfmodel.validation.case_plan import HardwareOfCase
from perfmodel.validation.fields import CACHES, SERVED_PRECISIONS, optional_count, stated_count, stated_or
from perfmodel.validation.published_models import model_of_case
from perfmodel.validation.schemas import ServingCaseFile, checked_inputs
from perfmodel.workload.quantization import QUANTIZATIONS
from perfmodel.workload.serving import Lengths, ServingJob, Speculation, constant

OFFERED_AT_ONCE = 4096
"""Requests of a run at maximum load: more than any engine runs concurrently."""
ACCEPTANCE = 0.75
"""Acceptance rate of a drafted token; benchmarks with speculative decoding do not publish theirs.

DeepSeek-V3 states 85 to 90 % for its second token (arXiv 2412.19437, section 5.4.3); later models with one module have lower rates.
"""

#: Families whose fp8 checkpoints have scales of 128-blocks (`weight_block_size` of their configs); others have a scale per tensor.
_BLOCK_FAMILIES = ("deepseek", "kimi", "glm", "minimax", "qwen3")
#: Engines whose quantized checkpoints (of TensorRT Model Optimizer) state an fp8 cache.
_FP8CACHES = ("tensorrt-llm", "tensorrt-llm-2024", "nim")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedServing:
    """A run ready to be predicted.

    kind      determines the compared metrics (`fields.SERVING_KINDS`)
    engine    name of a profile; version: of the engine, () if not stated
    distinct_experts   active experts of a layer if all sequences are the same prompt; 0: by routing
    assumed   inputs that the run does not state
    """

    hardware: HardwareOfCase
    engine: str
    version: tuple[int, ...] = ()
    job: ServingJob
    layout: ServiceLayout
    kind: str
    distinct_experts: float = 0.0
    assumed: tuple[str, ...]


def plan_of_serving(inputs: Mapping[str, Any]) -> PlannedServing:
    """Return the job and the plan of the run that `inputs` describe. Reads nothing but its arguments."""
    inputs = checked_inputs(ServingCaseFile, inputs)
    assumed: list[str] = []
    kind = stated_or(inputs, "kind", "max_throughput" if inputs.get("batch") is None else "serving", assumed)
    stated, description = inputs.get("chip_id"), inputs.get("chip")
    chip = str(stated) if stated in list_chips() else None
    for text in filter(None, (stated, description)):
        with suppress(InputError):
            chip = chip or chip_called(text)
    if not chip:
        shown = one_line(stated or description or "", 60)
        raise InputError(
            f"chip_id={shown}: no chip of this name is known; it cannot be predicted" if shown else "chip_id: the run does not state it"
        )
    framework = stated_or(inputs, "framework", "", assumed)
    engine, version = engine_of(framework, chip=chip), version_of(str(framework))
    launch = launch_of(inputs, engine, chip, version)
    layout, chips = _layout(inputs, assumed)
    if isinstance(layout, ServingLayout):
        layout = replace(layout, max_batch=launch.max_batch, max_tokens=launch.max_tokens)
    job = _job(inputs, kind, engine, assumed)
    if launch.cache is not None:
        job = replace(job, kv_precision=launch.cache)
    hardware = HardwareOfCase(chip=chip, num_chips=chips)
    experts = job.model.parts.experts  # equal sequences are routed to equal experts
    return PlannedServing(
        hardware=hardware,
        engine=engine,
        version=version,
        job=job,
        layout=layout,
        kind=kind,
        distinct_experts=float(experts.top_k) if inputs.get("repeated_prompts") and experts is not None else 0.0,
        assumed=tuple(assumed),
    )


# ---------------------------------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------------------------------


def _layout(inputs: Mapping[str, Any], assumed: list[str]) -> tuple[ServiceLayout, int]:
    """Return (layout, total number of chips).

    In disaggregated serving, experts are sharded over all chips of a worker. Attention is data-parallel in prefill workers of such models,
    and in decode workers if the run states it.
    """
    is_moe = bool((inputs.get("model") or {}).get("moe"))
    if inputs.get("disaggregated") or inputs.get("disagg"):
        split = inputs.get("disagg")
        if not split:
            raise InputError("disagg: the run does not state how many chips its workers have; it cannot be predicted without it")
        names = ("prefill_workers", "chips_per_prefill_worker", "decode_workers", "chips_per_decode_worker")
        prefill_workers, prefill_chips, decode_workers, decode_chips = (stated_count(split, name) for name in names)
        pools = Pools(
            prefill=_worker(prefill_chips, is_moe, spreads=is_moe),
            decode=_worker(decode_chips, is_moe, spreads=bool(split.get("decode_attention_dp"))),
            prefill_workers=prefill_workers,
            decode_workers=decode_workers,
        )
        return pools, pools.num_chips
    parallel = inputs.get("parallel") or {}
    attention_dp = stated_count(parallel, "attention_dp", default=1)
    stated, pp, tp = optional_count(inputs, "chips"), stated_count(inputs, "pp", default=1), optional_count(inputs, "tp")
    if tp is None:
        assumed.append("tp")
        tp = max((stated or 1) // (pp * attention_dp), 1)
    ways = tp * pp * attention_dp
    chips = ways if stated is None else stated
    if chips % ways:
        raise bad_field("chips", chips, f"must be a multiple of tp * pp * attention_dp = {ways}", "correct it in the case")
    ep, expert_tp, expert_ways = optional_count(parallel, "moe_ep"), optional_count(parallel, "moe_tp"), tp * attention_dp
    if not is_moe:  # even if the run states another degree
        ep = 1
    elif ep is None:
        ep = expert_ways // expert_tp if expert_tp is not None and expert_ways % expert_tp == 0 else 1
    if expert_ways % ep:
        raise bad_field("moe_ep", ep, f"must divide tp * attention_dp = {expert_ways}", "correct it in the case")
    return ServingLayout(tp=tp, pp=pp, attention_dp=attention_dp, ep=ep, replicas=chips // ways), chips


def _worker(chips: int, is_moe: bool, *, spreads: bool) -> ServingLayout:
    ep = chips if is_moe else 1
    return ServingLayout(tp=1 if spreads else chips, attention_dp=chips if spreads else 1, ep=ep)


# ---------------------------------------------------------------------------------------------------------------------------------
# The job
# ---------------------------------------------------------------------------------------------------------------------------------


def _job(inputs: Mapping[str, Any], kind: str, engine: str, assumed: list[str]) -> ServingJob:
    prompt = _lengths(inputs, "input_len")
    answer = constant(1) if kind == "ttft_only" else _lengths(inputs, "output_len")
    drafted, speculation = optional_count(inputs, "draft_tokens"), None
    if inputs.get("speculative") or drafted is not None:
        assumed.append("acceptance")
        speculation = Speculation(draft_tokens=min(drafted or 1, 64), acceptance=ACCEPTANCE)
    model = model_of_case(inputs.get("model"), longest=prompt.most + answer.most, drafts=speculation is not None)
    name = SERVED_PRECISIONS[stated_or(inputs, "precision", "bf16", assumed)]
    quantization = QUANTIZATIONS["fp8-block" if name == "fp8" and model.origin.architecture.startswith(_BLOCK_FAMILIES) else name]
    concurrency = stated_count(inputs, "batch", default=OFFERED_AT_ONCE if kind == "max_throughput" else None)
    cache = CACHES[inputs.get("kv_precision") or "auto"]
    if cache is None:
        assumed.append("kv_precision")
        cache = Dtype.FP16 if quantization.product is Dtype.FP16 else Dtype.BF16
        if quantization.product in (Dtype.FP8, Dtype.FP4) and engine in _FP8CACHES:
            cache = Dtype.FP8
    return ServingJob(
        model=model,
        input_len=prompt,
        output_len=answer,
        concurrency=concurrency,
        quantization=quantization,
        kv_precision=cache,
        speculation=speculation,
        is_static=kind in ("static_batch", "ttft_only"),
    )


def _lengths(inputs: Mapping[str, Any], field: str) -> Lengths:
    """Return nominal lengths, or a uniform distribution up to the nominal length with the stated mean."""
    mean = inputs.get(f"{field}_mean")
    most = stated_count(inputs, field, default=None if mean is None else round(mean))
    if mean is None or not 0.5 * (most + 1) <= mean <= most:
        return constant(most)
    return Lengths(least=max(round(2.0 * mean - most), 1), most=most)


# --- Engine and launch options, by strategies/serving_patterns.yaml ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch options of an engine.

    max_batch, max_tokens   of an attention rank; 0: the engine's defaults
    cache                   replaces the cache's stated dtype; None: as stated
    """

    max_batch: int = 0
    max_tokens: int = 0
    cache: Dtype | None = None


@cache
def _patterns() -> Mapping[str, Any]:
    return read_yaml(resource_dir("strategies") / "serving_patterns.yaml")


def _applies(entry: Mapping[str, Any], chip: str, version: tuple[int, ...]) -> bool:
    """Return whether an entry is of this chip and of this version of the engine; () for an unknown version."""
    since, before = (version_of(entry[name]) if name in entry else limit for name, limit in (("since", ()), ("before", (99,))))
    return chip.startswith(tuple(entry.get("chips", ("",)))) and since <= version < before


def engine_of(framework: object, *, chip: str = "") -> str:
    """Return the name of a profile in `strategies/engines/`; `generic` if no engine is named.

    framework   "vllm 0.10.2", "TensorRT-LLM v0.17 (in-flight batching)", ...
    """
    text = framework.lower()[:200] if isinstance(framework, str) else ""
    for entry in _patterns()["engines"]:
        if re.search(entry["pattern"], text) and _applies(entry, chip, version_of(text)):
            return str(entry["engine"])
    return GENERIC_ENGINE


def launch_of(inputs: Mapping[str, Any], engine: str, chip: str, version: tuple[int, ...]) -> Launch:
    """Return the launch options of the run that `inputs` describe."""
    name = (inputs.get("model") or {}).get("name")
    if inputs.get("input_len_mean") is None or not name:
        return Launch()
    for entry in _patterns()["launches"]:
        if engine == entry["engine"] and name.startswith(entry["model"]) and _applies(entry, chip, version):
            clients = optional_count(inputs, "batch") if entry.get("of_clients") else None
            cache = Dtype(entry["cache"]) if "cache" in entry else None
            return Launch(max_batch=clients or entry.get("max_batch", 0), max_tokens=entry.get("max_tokens", 0), cache=cache)
    return Launch()
