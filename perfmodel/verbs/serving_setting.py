"""Settings of `serve`: job, cluster, engine, the estimator of its plans, and the layout that knobs describe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.values import check_name, is_path
from perfmodel.foundation.words import check_none_missing, missing_words, read_words
from perfmodel.frameworks.engine_formats import format_on, require_format
from perfmodel.hardware.assumptions import load_assumptions, read_assumed
from perfmodel.hardware.cluster_text import chips_of, is_mixed, joined_pools
from perfmodel.parallel.knobs import ServingKnobs
from perfmodel.parallel.request import Service, ServingRequest
from perfmodel.parallel.serving_plan import Pools, ServiceLayout, ServingLayout, StatedWorkers, cluster_text, parse_workers
from perfmodel.verbs.requests import needs_chips
from perfmodel.verbs.setting import file_reference, find_cluster
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.imported.decoder import ARCHITECTURE, decoder_of, description_of
from perfmodel.workload.imported.graph import ImportedGraph
from perfmodel.workload.models import is_hub_id
from perfmodel.workload.quantization import Quantization, format_in_name, published_format, quantization_named
from perfmodel.workload.serving import ServingJob, Speculation

if TYPE_CHECKING:
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import Engine
    from perfmodel.hardware.assumptions import Assumptions
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster

DEFAULT_ACCEPTANCE = 0.7
WIDENED = "fp8-weights"
"""Format of an 8-bit checkpoint on a chip without 8-bit units, under an engine whose formats are not known."""
MOST_CHIPS = 2**20
"""Limit of a service: with the usual number of sequences per chip, requests in flight are counted in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingSetting:
    """A job on a cluster under an engine, with the estimator of its plans.

    price         of a chip, 0 if unknown   [USD/h]
    chip_watts    mean of the chips at full load; 0: unknown   [W]
    assumptions   constants of energy and carbon
    notes         notes for the user on how it was assembled
    hub_id        of the model, as it was given; empty if it was given otherwise
    """

    estimator: ServingEstimator
    job: ServingJob
    reference: str
    num_chips: int
    assumptions: Assumptions
    price: float = 0.0
    chip_watts: float = 0.0
    notes: tuple[str, ...] = ()
    hub_id: str = ""


def serving_setting(service: Service) -> ServingSetting:
    """Return the job, the cluster, the engine and their estimator. Raise InputError with all missing fields."""
    from perfmodel.cost.resolve import choose_calibration
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import DEFAULT_ENGINE, Engine, load_engine
    from perfmodel.hardware.calibration import Calibration, Provenance, typical_fractions

    service = with_workers_chips(service)
    asked, workers = service.request, service.knobs.workers
    check_none_missing(missing_words(Service, service.given()))
    given = read_words(asked, "chips", "input_len", "output_len", "concurrency", "rate", "prefix_hit", "quantization", "acceptance")
    if given["chips"] > MOST_CHIPS:
        raise bad_field(
            "chips", given["chips"], f"must be at most {MOST_CHIPS:,}", "predict a part of the service; replicas do not slow one another"
        )
    model = _model(asked.model, "model")
    called = None if isinstance(asked.model, TransformerConfig) else format_in_name(str(asked.model))
    published = quantization_named(called) if called else published_format(model.origin.architecture)
    quantization = given.get("quantization") or published
    reference, cluster = find_cluster(asked.cluster, given["chips"])
    if cluster.pools and (workers is None or len(cluster.pools) != 2):
        rule = "has several kinds of chips, of which one replica has one"
        raise bad_field(
            "cluster", cluster.name, rule, "give prefill and decode workers of one kind each, such as --workers 3x4@h20:1x8@h200"
        )
    pools = joined_pools(cluster.pools) if cluster.pools else ()
    assumptions = load_assumptions().with_given(read_assumed(asked.assume)).on(cluster)
    engine = load_engine(asked.engine or DEFAULT_ENGINE)
    is_given = asked.quantization is not None
    name = str(asked.model) if called else model.name
    quantization, notes = _format_that_runs(engine, cluster.chip, quantization, name, is_given=is_given)
    if model.origin.architecture == ARCHITECTURE:
        rule = "where its masks are not known, attention is taken to be causal and to see all earlier tokens"
        notes.append(f"model: {model.name} is an imported module, read as {description_of(model)}; {rule}")
    speculation = _speculation(asked, model)
    load: dict[str, Any] = {name: given[name] for name in ("input_len", "output_len", "concurrency", "rate", "prefix_hit") if name in given}
    load |= read_words(asked, "kv_precision")
    job = ServingJob(model=model, quantization=quantization, speculation=speculation, **load)

    plan_names = {"cluster": reference}
    if asked.engine is not None and not isinstance(asked.engine, Engine):
        plan_names["engine"] = file_reference(asked.engine)
    if asked.calibration is not None and not isinstance(asked.calibration, Calibration):
        plan_names["calibration"] = file_reference(asked.calibration)

    def estimator(on: Cluster, prefill: ServingEstimator | None = None) -> ServingEstimator:
        calibration = choose_calibration(on.chip, asked.calibration)
        if calibration.provenance is Provenance.SPEC_SHEET:
            notes.append(f"chip: neither {on.chip.name} nor a chip like it was measured; {typical_fractions()}, as measured GPUs reach")
        return ServingEstimator(
            model=model,
            cluster=on,
            calibration=calibration,
            engine=engine,
            quantization=quantization,
            cache=job.kv_precision,
            prefill=prefill,
            plan_names=plan_names,
        )

    price = cluster.mean_chip(lambda chip: chip.price_per_hour)
    return ServingSetting(
        estimator=estimator(pools[1], estimator(pools[0])) if pools else estimator(cluster),
        job=job,
        reference=reference,
        num_chips=cluster.num_chips,
        assumptions=assumptions,
        chip_watts=cluster.mean_chip(lambda chip: chip.tdp_watts),
        price=read_words(asked, "price").get("price", assumptions.price or price),
        notes=tuple(notes),
        hub_id=asked.model if is_hub_id(asked.model) else "",
    )


def with_workers_chips(service: Service) -> Service:
    """Return the service with the cluster that its workers name, and with the chips of a cluster text that contains them."""
    chips, text, workers = service.request.chips, service.request.cluster, service.knobs.workers
    if workers is not None and (named := cluster_text(parse_workers(workers))):
        if text not in (None, named):
            raise bad_field("workers", workers, f"names its chips, and cluster={text} others", "leave out one of the two")
        text = named
    if chips is not None or not isinstance(text, (str, Path)):
        return service
    if is_mixed(str(text)):
        return service.having({"cluster": text, "chips": chips_of(str(text))})
    if not is_path(text) or needs_chips(text):
        return service
    cluster = find_cluster(text, None)[1]
    return service.having({"cluster": text, "chips": cluster.num_chips}) if cluster.pools else service


def _format_that_runs(
    engine: Engine, chip: Chip, quantization: Quantization, model: str, *, is_given: bool
) -> tuple[Quantization, list[str]]:
    """Return the format that an engine runs, with notes. A default format that does not run is widened, or the model runs in 16 bits."""
    notes: list[str] = []
    if not is_given and not quantization.is_plain:
        notes.append(f"quantization: not given, and {model} is published in {quantization.name}")
    runs = format_on(engine.kernels.formats, chip, quantization)
    if runs is None and is_given:
        require_format(engine.name, engine.kernels.formats, chip, quantization)
    if runs is None:
        runs = quantization_named("bf16" if engine.kernels.formats else WIDENED)
    if runs.name != quantization.name:
        fallback = f"weights are widened inside the products ({runs.name})" if not runs.is_plain else f"it is taken in {runs.name}"
        notes.append(f"quantization: {engine.name} on {chip.name} has no products in {quantization.name}; {fallback}")
    return runs, notes


def _speculation(asked: ServingRequest, model: TransformerConfig) -> Speculation | None:
    """Return speculative decoding with a draft model, or with the model's own multi-token-prediction module."""
    given = read_words(asked, "draft_tokens", "acceptance")
    if "draft_tokens" not in given:
        for name in ("acceptance", "draft_model"):
            if getattr(asked, name) is not None:
                raise bad_field(name, getattr(asked, name), "is of drafts, of which there are none", "give draft_tokens")
        return None
    draft = None if asked.draft_model is None else _model(asked.draft_model, "draft_model")
    if draft is None and not model.num_mtp_layers:
        rule = f"{model.name} has no module for further tokens"
        raise bad_field("draft_tokens", asked.draft_tokens, rule, "name a model that drafts with draft_model")
    return Speculation(**{"acceptance": DEFAULT_ACCEPTANCE, **given, "draft": draft})


def _model(name: Any, field: str) -> TransformerConfig:
    from perfmodel.workload.models import load_model

    if isinstance(name, ImportedGraph):
        return decoder_of(name)
    if isinstance(name, str) and ":" in name and not Path(name).exists():
        file = f"perfmodel import '{name}' --inputs 'int64[1,2048]' --save graph.json"
        raise bad_field(field, name, "a module is served by the file that import saves", f"run {file} and give graph.json")
    check_name(name, field, TransformerConfig, "see `perfmodel models`")
    return name if isinstance(name, TransformerConfig) else load_model(name)


# --- From knobs to a layout ---------------------------------------------------------------------------------------


def serving_layout(setting: ServingSetting, knobs: ServingKnobs) -> tuple[ServiceLayout, tuple[str, ...]]:
    """Return the requested layout, of replicas or workers, with notes."""
    return replicas_of(setting, knobs) if knobs.workers is None else (pools_of(setting, knobs), ())


def replicas_of(setting: ServingSetting, knobs: ServingKnobs) -> tuple[ServingLayout, tuple[str, ...]]:
    """Return the requested replicas, with the smallest tp that fits as the default, and notes."""
    read = read_words(knobs, "tp", "pp", "ep", "attention_dp", "dcp", "pcp", "max_batch", "max_tokens", "replicas")
    fixed: dict[str, Any] = {name: value for name, value in read.items() if name != "replicas"}
    notes: tuple[str, ...] = ()
    if "tp" not in read:
        fixed["tp"], reason = default_tp(setting, fixed)
        notes = (f"tp: not given; {fixed['tp']} {reason}",)
    one = ServingLayout(**fixed)
    if setting.num_chips < one.chips_per_replica:
        raise bad_field(
            "chips", setting.num_chips, f"a replica takes {one.chips_per_replica} ({one.label()})", "use more chips or lower degrees"
        )
    most = setting.num_chips // one.chips_per_replica
    replicas = read.get("replicas", most)
    if replicas > most:
        raise bad_field("replicas", replicas, f"{setting.num_chips} chips hold {most} of {one.chips_per_replica} chips each", f"use {most}")
    idle = setting.num_chips - replicas * one.chips_per_replica
    if idle:
        notes = (*notes, f"{idle} of {setting.num_chips} chips are idle; figures a chip count those that serve")
    return ServingLayout(**{**fixed, "replicas": replicas}), notes


def pools_of(setting: ServingSetting, knobs: ServingKnobs) -> Pools:
    """Return the requested prefill and decode workers.

    Open degrees follow the other fields: dcp of decode workers, pcp of prefill workers. By default attention and experts use all chips of a
    worker (tp over all of them for a dense model).
    """
    read = read_words(knobs, "workers", "tp", "ep", "max_batch", "max_tokens")
    prefill, decode = read.pop("workers")
    for name in ("replicas", "attention_dp", "pp"):
        if getattr(knobs, name) is not None:
            raise bad_field(name, getattr(knobs, name), "workers says how many chips and copies there are", f"leave {name} out")
    used = prefill.count * prefill.chips + decode.count * decode.chips
    if (of_prefill := setting.estimator.prefill) is not None:
        for name, group, cluster in (("prefill", prefill, of_prefill.cluster), ("decode", decode, setting.estimator.cluster)):
            if group.count * group.chips > cluster.num_chips:
                rule = f"{name} workers take more than the {cluster.num_chips} chips of {cluster.name}"
                raise bad_field("workers", knobs.workers, rule, "use fewer or smaller workers")
    if used > setting.num_chips:
        raise bad_field("workers", knobs.workers, f"take {used} chips of {setting.num_chips}", "use fewer or smaller workers")
    limits = {name: read.pop(name) for name in ("max_batch", "max_tokens") if name in read}
    of_decode, of_prompts = read_words(knobs, "dcp"), read_words(knobs, "pcp")

    def worker(group: StatedWorkers, shared: Mapping[str, int]) -> ServingLayout:
        given = {**shared, **read, **group.degrees}
        degrees: dict[str, Any] = worker_degrees(group.chips, given, has_experts=setting.job.model.parts.experts is not None)
        return ServingLayout(**degrees, **limits)

    return Pools(
        prefill=worker(prefill, of_prompts),
        decode=worker(decode, of_decode),
        prefill_workers=prefill.count,
        decode_workers=decode.count,
    )


def worker_degrees(chips: int, given: Mapping[str, int], *, has_experts: bool) -> dict[str, int]:
    """Return all degrees of a worker: the given ones, and the others by the kind of model. Raises InputError."""
    degrees = {"pcp": 1, **given}
    left = chips
    for name in ("pcp", "pp", "attention_dp", "tp"):
        degree = degrees.get(name, 1)
        if degree < 1 or left % degree:
            raise bad_field(name, degree, f"must divide the {left} chips of a worker that the other degrees leave", "use a divisor")
        left //= degree
    if "tp" not in degrees:
        over_all = not has_experts or degrees["pcp"] > 1 or "attention_dp" in degrees
        degrees["tp"], left = (left, 1) if over_all else (1, left)
    if has_experts:
        degrees.setdefault("pp" if "attention_dp" in degrees else "attention_dp", left)
        degrees.setdefault("ep", chips // degrees.get("pp", 1))
    else:
        degrees.setdefault("pp", left)
    taken = math.prod(degrees.get(name, 1) for name in ("tp", "pp", "attention_dp", "pcp"))
    if taken != chips:
        rule = f"its tp * pp * attention_dp * pcp is {taken}"
        raise bad_field("workers", f"{chips} chips", rule, f"give {taken} chips or other degrees")
    return degrees


#: Default number of concurrent requests of a replica that must fit.
_USUAL_REQUESTS = 8.0


#: Share of the rate that a replica of the default plan could answer in addition: waits grow without bound towards saturation.
_RATE_HEADROOM = 0.25


def default_tp(setting: ServingSetting, fixed: Mapping[str, Any]) -> tuple[int, str]:
    """Return the default tp and its reason.

    It is the smallest power of two that divides the heads and whose replicas hold all concurrent requests, and at a given rate serve them
    with headroom. If there is none, it is the closest one.
    """
    import numpy as np

    from perfmodel.frameworks.engine_layouts import cache_copies

    estimator, job = setting.estimator, setting.job
    pcp, shared = fixed.get("pcp", 1), fixed.get("dcp", 1)
    stage_chips_per_tp = pcp * fixed.get("attention_dp", 1)
    chips_per_tp = stage_chips_per_tp * fixed.get("pp", 1)
    fitting = [tp for tp in (1, 2, 4, 8, 16, 32, 64) if job.model.num_attention_heads % tp == 0 and tp * chips_per_tp <= setting.num_chips]
    cuts = [tp for tp in fitting if cache_copies(job.model, tp) * pcp % shared == 0 and (pcp == 1 or shared in (1, pcp, tp * pcp))]
    tried = [tp for tp in cuts if tp * stage_chips_per_tp % fixed.get("ep", 1) == 0] or [shared]
    replicas = np.array([max(setting.num_chips // (tp * chips_per_tp), 1) for tp in tried])
    plans = [ServingLayout(**{**fixed, "tp": tp, "replicas": int(copies)}) for tp, copies in zip(tried, replicas, strict=True)]
    memory = estimator.memory(plans, job.input_len.mean + job.output_len.mean, job.speculation)
    capacity, keeps_up = memory.sequences * replicas, "leave room for these requests"
    enough = memory.fits & (capacity >= (job.concurrency or _USUAL_REQUESTS * replicas))
    nearest, reason = capacity, "leaves the most room"
    if job.rate is not None and memory.fits.any():
        for headroom in (_RATE_HEADROOM, 0.0):
            load = estimator.serve(replace(job, rate=job.rate * (1 + headroom)), plans).load
            keeping = enough & np.logical_not(load.is_saturated)
            if keeping.any():
                break
        enough, keeps_up = keeping, f"leave room for these requests and keep up with {f'{headroom:.0%} more' if headroom else 'them'}"
        nearest, reason = np.where(memory.fits, load.requests_per_second * replicas, 0.0), "answers most of them"
    if enough.any():
        return tried[int(enough.argmax())], f"is the fewest chips of a replica that {keeps_up}"
    return tried[int(nearest.argmax()) if nearest.max() > 0 else -1], reason
