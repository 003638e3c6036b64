"""The verb `serve`, for Python: latencies, concurrency, throughput and bottlenecks of a service.

import perfmodel

found = perfmodel.serve(model="llama-3.3-70b", cluster="dgx-h100", chips=8, input_len=1024, output_len=1024, concurrency=64, tp=4)
print(found.ttft.mean, found.tpot.mean, found.tokens_per_second_per_chip)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import check_name, is_path, read_integer
from perfmodel.foundation.words import Words, takes, words_of
from perfmodel.frameworks.engine_formats import format_on, require_format
from perfmodel.hardware.assumptions import load_assumptions, read_assumed
from perfmodel.hardware.mixed import chips_of, is_mixed, joined_pools
from perfmodel.parallel.serving.plan import Pools, ServingPlan, StatedWorkers, cluster_text
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.verbs.requests import needs_chips
from perfmodel.verbs.serving_remedies import MOST_REMEDIES, find_remedies, narrower_formats
from perfmodel.verbs.setting import find_cluster
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.imported.decoder import ARCHITECTURE, decoder_of, description_of
from perfmodel.workload.imported.graph import ImportedGraph
from perfmodel.workload.models import hub_id_of
from perfmodel.workload.quantization import Quantization, published_format, quantization_named
from perfmodel.workload.serving import ServingJob, Speculation

if TYPE_CHECKING:
    from perfmodel.cost.serving.boundness import OperatorRow
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import Engine
    from perfmodel.hardware.assumptions import Assumptions
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.planner.serving.launch import LaunchLine
    from perfmodel.planner.serving.result import RankedPlan, ServingSearchResult
    from perfmodel.planner.serving.search import NothingFoundError
    from perfmodel.planner.serving.space import Format, ServingSpace

Name: TypeAlias = str | Path

DEFAULT_ACCEPTANCE = 0.7
WIDENED = "fp8-weights"
"""Format of an 8-bit checkpoint on a chip without 8-bit units, under an engine whose formats are not known."""
MOST_CHIPS = 2**20
"""Limit of a service: with the usual number of sequences per chip, requests in flight are counted in 32 bits."""
#: Required fields, and their meaning.
NEEDED = {
    "model": "a name from `perfmodel models` or the path of a config.json",
    "cluster": "a name from `perfmodel clusters` or the path of a cluster file",
    "chips": "how many chips serve",
    "input_len": "the tokens of a prompt",
    "output_len": "the tokens of an answer",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingSetting:
    """A job on a cluster under an engine, with the estimator of its plans.

    price         of a chip, 0 if unknown   [USD/h]
    chip_watts    mean of the chips at full load; 0: unknown   [W]
    assumptions   constants of energy and carbon
    notes         notes for the user on how it was assembled
    """

    estimator: ServingEstimator
    job: ServingJob
    reference: str
    num_chips: int
    assumptions: Assumptions
    price: float = 0.0
    chip_watts: float = 0.0
    notes: tuple[str, ...] = ()


@takes(asked=Words(ServingRequest, needed="model input_len output_len"))
def serve(*, asked: ServingRequest) -> ServingPrediction:
    """Predict a served load on one plan: time to first token, time per output token, throughput and memory.

    Defaults: tp is the smallest that fits, replicas fill the chips, formats are those of the published model. Without concurrency and rate,
    the largest number of requests that fits runs concurrently.
    """
    return serve_asked(asked)[1]


def serve_asked(asked: ServingRequest) -> tuple[ServingSetting, ServingPrediction]:
    """Return the result of `serve` with its setting; for a plan that does not fit also the smallest changes that fit."""
    setting, prediction = _served(asked)
    if prediction.fits:
        return setting, prediction
    of = setting.estimator
    remedies = find_remedies(
        asked, prediction, engine=of.engine, cluster=of.cluster, predict=lambda changed: _served(changed, simulates=False)[1]
    )
    return setting, replace(prediction, remedies=remedies)


def _served(asked: ServingRequest, *, simulates: bool = True) -> tuple[ServingSetting, ServingPrediction]:
    """Return the prediction of a request with its setting. simulates: whether its times are those of a simulation."""
    from perfmodel.cost.serving.pools import predict_plan
    from perfmodel.cost.serving.simulated import predict_served

    setting = serving_setting(asked)
    plan, notes = serving_plan(setting, asked) if asked.workers is None else (pools_plan(setting, asked), ())
    prediction = (predict_served if simulates else predict_plan)(setting.estimator, setting.job, plan)
    return setting, with_notes(_priced(setting, prediction), (*setting.notes, *notes))


def _priced(setting: ServingSetting, prediction: ServingPrediction) -> ServingPrediction:
    """Return the prediction with cost, energy and carbon of output tokens, on all given chips: idle ones cost and draw as much."""
    from perfmodel.cost.training_run import carbon_of, energy_of

    tokens, watts = prediction.tokens_per_second_per_chip * prediction.plan.num_chips, setting.chip_watts
    if not (tokens > 0.0 and prediction.fits):
        return replace(prediction, price_per_hour=setting.price)
    chip_hours = 1e6 / 3600.0 * setting.num_chips / tokens
    energy = float(energy_of(chip_hours, watts, setting.assumptions))
    return replace(
        prediction,
        price_per_hour=setting.price,
        cost_per_million=chip_hours * setting.price or None,
        energy_per_million=energy or None,
        carbon_per_million=float(carbon_of(energy, setting.assumptions)) or None,
    )


def simulated_in(
    setting: ServingSetting, prediction: ServingPrediction, *, limits: Mapping[str, Any] | None = None, seed: int = 0
) -> ServingPrediction:
    """Return the prediction of a step-by-step simulation of the engine, also at a rate; goodput counts requests within the limits."""
    from perfmodel.cost.serving.simulated import with_simulation
    from perfmodel.cost.serving.simulated_metrics import GoodputLimits

    seed = read_integer(seed, "seed", least=0)
    simulated = with_simulation(setting.estimator, prediction, limits=GoodputLimits(**limits_of(limits or {})), seed=seed)
    return _priced(setting, simulated)


def limit_of(value: object, name: str) -> float:
    """Return a time limit from `500ms`, `.5s` or seconds; infinite if none is given. [s]"""
    from perfmodel.foundation.units import parse_quantity

    if value in (None, ""):
        return float("inf")
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*", value):
        number = value.strip()
        raise bad_field(name, number, "a time needs its unit", f"write {number}ms or {number}s")
    seconds = float(value) if isinstance(value, (int, float)) else parse_quantity(value, "time", field=name)
    if not seconds > 0:
        raise bad_field(name, value, "must be positive", "write 500ms")
    return seconds


def limits_of(given: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> limit, for the given limits. [s]"""
    times = {name: limit_of(value, name) for name, value in given.items()}
    return {name: time for name, time in times.items() if time < float("inf")}


def launch_of(setting: ServingSetting, prediction: ServingPrediction) -> tuple[LaunchLine, ...]:
    """Return the commands that start a plan; empty for one that does not fit or run, or for an engine without a known command."""
    from perfmodel.planner.serving.launch import launch_lines

    if not prediction.fits or prediction.not_runnable:
        return ()
    node = setting.estimator.cluster.chips_per_node
    try:
        hub_id = hub_id_of(prediction.job.model.name)
        model = hub_id if "/" in hub_id else "MODEL"
        return launch_lines(prediction.plan, prediction.job, setting.estimator.engine, model=model, chips_per_node=node)
    except InputError:
        return ()


def with_notes(prediction: ServingPrediction, notes: tuple[str, ...]) -> ServingPrediction:
    return replace(prediction, notes=(*prediction.notes, *notes))


def serving_setting(asked: ServingRequest) -> ServingSetting:
    """Return the job, the cluster, the engine and their estimator. Raise InputError with all missing fields."""
    from perfmodel.cost.resolve import choose_calibration
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import DEFAULT_ENGINE, load_engine
    from perfmodel.hardware.calibration import Calibration, Provenance, typical_fractions

    asked = with_workers_chips(asked)
    absent = [f"{name}: is missing; give {meaning}" for name, meaning in NEEDED.items() if getattr(asked, name) is None]
    if absent:
        raise InputError("; ".join(absent))
    given = _read(asked, "chips", "input_len", "output_len", "concurrency", "rate", "prefix_hit", "quantization", "acceptance")
    if given["chips"] > MOST_CHIPS:
        raise bad_field(
            "chips", given["chips"], f"must be at most {MOST_CHIPS:,}", "predict a part of the service; replicas do not slow one another"
        )
    model = _model(asked.model, "model")
    quantization = given.get("quantization") or published_format(model.architecture)
    reference, cluster = find_cluster(asked.cluster, given["chips"])
    pools = _two_pools(cluster, asked)
    assumptions = load_assumptions().with_given(read_assumed(asked.assume)).on(cluster)
    engine = load_engine(asked.engine or DEFAULT_ENGINE)
    is_given = asked.quantization is not None
    quantization, notes = _format_that_runs(engine, cluster.chip, quantization, model.name, is_given=is_given)
    if model.architecture == ARCHITECTURE:
        rule = "where its masks are not known, attention is taken to be causal and to see all earlier tokens"
        notes.append(f"model: {model.name} is an imported module, read as {description_of(model)}; {rule}")
    speculation = _speculation(asked, model)
    job = ServingJob(
        model=model,
        input_len=given["input_len"],
        output_len=given["output_len"],
        concurrency=given.get("concurrency"),
        rate=given.get("rate"),
        prefix_hit=given.get("prefix_hit", 0.0),
        quantization=quantization,
        speculation=speculation,
        **_read(asked, "kv_precision"),
    )

    def estimator(on: Cluster, prefill: ServingEstimator | None = None) -> ServingEstimator:
        calibration = (
            asked.calibration if isinstance(asked.calibration, Calibration) else choose_calibration(on.chip, asked.calibration or "")
        )
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
        )

    price = cluster.mean_chip(lambda chip: chip.price_per_hour)
    return ServingSetting(
        estimator=estimator(pools[1], estimator(pools[0])) if pools else estimator(cluster),
        job=job,
        reference=reference,
        num_chips=cluster.num_chips,
        assumptions=assumptions,
        chip_watts=cluster.mean_chip(lambda chip: chip.tdp_watts),
        price=_read(asked, "price").get("price", assumptions.price or price),
        notes=tuple(notes),
    )


def with_workers_chips(asked: ServingRequest) -> ServingRequest:
    """Return the request with the cluster that its workers name, and with the chips of a cluster text that contains them."""
    text = asked.cluster
    if asked.workers is not None and (named := cluster_text(_read(asked, "workers")["workers"])):
        if text not in (None, named):
            raise bad_field("workers", asked.workers, f"names its chips, and cluster={text} others", "leave out one of the two")
        text = named
    if asked.chips is not None or not isinstance(text, (str, Path)):
        return asked
    if is_mixed(str(text)):
        return replace(asked, cluster=text, chips=chips_of(str(text)))
    if not is_path(text) or needs_chips(text):
        return asked
    cluster = find_cluster(text, None)[1]
    return replace(asked, cluster=text, chips=cluster.num_chips) if cluster.pools else asked


def _two_pools(cluster: Cluster, asked: ServingRequest) -> tuple[Cluster, ...]:
    """Return the clusters of prefill and of decode workers, for a cluster of two kinds of chips."""
    if cluster.pools and (asked.workers is None or len(cluster.pools) != 2):
        rule = "has several kinds of chips, of which one replica has one"
        raise bad_field(
            "cluster", cluster.name, rule, "give prefill and decode workers of one kind each, such as --workers 3x4@h20:1x8@h200"
        )
    return joined_pools(cluster.pools) if cluster.pools else ()


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
    given = _read(asked, "draft_tokens", "acceptance")
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


def _read(asked: ServingRequest, *names: str) -> dict[str, Any]:
    """Return the given values of these fields. Raises InputError."""
    words = words_of(ServingRequest)
    return {name: words[name].value(getattr(asked, name), name) for name in names if getattr(asked, name) is not None}


def _model(name: Any, field: str) -> TransformerConfig:
    from perfmodel.workload.models import load_model

    if isinstance(name, ImportedGraph):
        return decoder_of(name)
    if isinstance(name, str) and ":" in name and not Path(name).exists():
        file = f"perfmodel import '{name}' --inputs 'int64[1,2048]' --save graph.json"
        raise bad_field(field, name, "a module is served by the file that import saves", f"run {file} and give graph.json")
    check_name(name, field, TransformerConfig, "see `perfmodel models`")
    return name if isinstance(name, TransformerConfig) else load_model(name)


def serving_plan(setting: ServingSetting, asked: ServingRequest) -> tuple[ServingPlan, tuple[str, ...]]:
    """Return the requested plan, with the smallest tp that fits as the default, and notes."""
    read = _read(asked, "tp", "pp", "ep", "attention_dp", "dcp", "pcp", "max_batch", "max_tokens", "replicas")
    fixed: dict[str, Any] = {"engine": str(asked.engine or setting.estimator.engine.name)}
    fixed |= {name: value for name, value in read.items() if name != "replicas"}
    notes: tuple[str, ...] = ()
    if "tp" not in read:
        fixed["tp"], reason = default_tp(setting, fixed)
        notes = (f"tp: not given; {fixed['tp']} {reason}",)
    one = ServingPlan(**fixed)
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
    return ServingPlan(**{**fixed, "replicas": replicas}), notes


def pools_plan(setting: ServingSetting, asked: ServingRequest) -> ServingPlan:
    """Return the plan of prefill and decode workers.

    Open degrees follow the other fields: dcp of decode workers, pcp of prefill workers. By default attention and experts use all chips of a
    worker (tp over all of them for a dense model).
    """
    read = _read(asked, "workers", "tp", "ep", "max_batch", "max_tokens")
    prefill, decode = read.pop("workers")
    for name in ("replicas", "attention_dp", "pp"):
        if getattr(asked, name) is not None:
            raise bad_field(name, getattr(asked, name), "workers says how many chips and copies there are", f"leave {name} out")
    used = prefill.count * prefill.chips + decode.count * decode.chips
    prefill_estimator = setting.estimator.prefill
    kinds = (
        ()
        if prefill_estimator is None
        else (("prefill", prefill, prefill_estimator.cluster), ("decode", decode, setting.estimator.cluster))
    )
    for name, group, cluster in kinds:
        if group.count * group.chips > cluster.num_chips:
            rule = f"{name} workers take more than the {cluster.num_chips} chips of {cluster.name}"
            raise bad_field("workers", asked.workers, rule, "use fewer or smaller workers")
    if used > setting.num_chips:
        raise bad_field("workers", asked.workers, f"take {used} chips of {setting.num_chips}", "use fewer or smaller workers")
    limits = {name: read.pop(name) for name in ("max_batch", "max_tokens") if name in read}
    shared = _read(asked, "dcp", "pcp")
    engine = str(asked.engine or setting.estimator.engine.name)

    def worker(group: StatedWorkers, **more: int) -> ServingPlan:
        degrees: dict[str, Any] = worker_degrees(
            group.chips, {**more, **read, **group.degrees}, has_experts=setting.job.model.experts is not None
        )
        return ServingPlan(engine=engine, **degrees, **limits)

    pools = Pools(
        prefill=worker(prefill, **{name: shared[name] for name in ("pcp",) if name in shared}),
        decode=worker(decode, **{name: shared[name] for name in ("dcp",) if name in shared}),
        prefill_workers=prefill.count,
        decode_workers=decode.count,
    )
    return ServingPlan(engine=engine, pools=pools)


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
    plans = [ServingPlan(**{**fixed, "tp": tp, "replicas": int(copies)}) for tp, copies in zip(tried, replicas, strict=True)]
    memory = estimator.memory(plans, job.input_len.mean + job.output_len.mean, job.speculation)
    capacity, keeps_up = memory.sequences * replicas, "leave room for these requests"
    enough = memory.fits & (capacity >= (job.concurrency or _USUAL_REQUESTS * replicas))
    nearest, reason = capacity, "leaves most room of all that can be"
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


@takes(asked=Words(ServingRequest, needed="model cluster input_len output_len"))
def find_serving(
    *,
    asked: ServingRequest,
    ttft: float | str | None = None,
    tpot: float | str | None = None,
    request_latency: float | str | None = None,
    p99: bool = False,
    limit_headroom: float | str | None = None,
    objective: str = "throughput",
    top: int = 10,
    quantizations: Sequence[str] = (),
    disaggregated: bool = False,
) -> ServingSearchResult:
    """Find the best plans of a service on these chips under limits, reasons of others, and the front of tokens/s a chip against a user's.

    ttft, tpot, request_latency   limits: seconds, or `500ms`; p99: of the 99th percentile over requests, not of the mean
    limit_headroom  share of each limit that a plan is predicted to stay below it; None: 1.5 %
    objective       throughput (output tokens/s a chip), latency, or cost (of a million output tokens)
    quantizations   formats of weights that may be used; none: the model's own
    disaggregated   also plans with separate prefill and decode workers
    Knobs that are given are fixed. Without concurrency and rate each plan runs at its best load; with one of them and without chips the
    search uses the fewest chips that sustain it.
    """
    return search_asked(
        asked,
        limits={"ttft": ttft, "tpot": tpot, "request_latency": request_latency},
        p99=p99,
        limit_headroom=limit_headroom,
        objective=objective,
        top=top,
        quantizations=quantizations,
        disaggregated=disaggregated,
    )[1]


def search_asked(
    asked: ServingRequest,
    *,
    limits: Mapping[str, Any],
    p99: bool,
    limit_headroom: float | str | None = None,
    objective: str,
    top: int,
    quantizations: Sequence[str] = (),
    disaggregated: bool = False,
) -> tuple[ServingSetting, ServingSearchResult]:
    """Return the result of `find_serving` with its setting."""
    from perfmodel.foundation.values import choice_of, several, share
    from perfmodel.planner.serving.result import LIMIT_HEADROOM, ServingLimits, ServingObjective
    from perfmodel.planner.serving.search import NothingFoundError, find_fewest_chips, find_serving_plans
    from perfmodel.planner.serving.space import KNOBS, ServingSpace

    if asked.workers is not None:
        raise bad_field("workers", asked.workers, "is what a search finds", "leave it out and give --disaggregated")
    is_sized = asked.chips is None and (asked.concurrency is not None or asked.rate is not None)
    setting = serving_setting(replace(asked, chips=1) if is_sized else asked)
    setting, formats = _formats_allowed(setting, several(quantizations))
    headroom = LIMIT_HEADROOM if limit_headroom is None else share(limit_headroom, "limit_headroom")
    arguments: dict[str, Any] = {
        "space": ServingSpace(fixed=_read(asked, *KNOBS), formats=formats),
        "limits": ServingLimits(**limits_of(limits), is_p99=p99, headroom=headroom),
        "objective": choice_of(ServingObjective, objective, "objective"),
        "top": read_integer(top, "top"),
        "price_per_hour": setting.price,
    }
    of = setting.estimator
    if is_sized:
        chips = find_fewest_chips(setting.job, of.cluster, of.calibration, of.engine, **arguments | {"top": 1}).num_chips
        setting, _ = _formats_allowed(serving_setting(replace(asked, chips=chips)), several(quantizations))
        note = f"chips: not given; {chips:,} are the fewest that hold the load"
        setting = replace(setting, notes=(*setting.notes, note))
    try:
        search = find_serving_plans(
            setting.job, setting.estimator.cluster, of.calibration, of.engine, **arguments, with_pools=disaggregated
        )
    except NothingFoundError as error:
        would = _changes_that_fit(setting, asked, formats) if not error.fits else _changes_within_limits(setting, arguments, error)
        raise (NothingFoundError(f"{error.summary}; would {'meet them' if error.fits else 'fit'}", would) if would else error) from error

    def priced(plans: tuple[RankedPlan, ...]) -> tuple[RankedPlan, ...]:
        return tuple(replace(ranked, prediction=_priced(setting, ranked.prediction)) for ranked in plans)

    baselines = tuple(replace(baseline, plans=priced(baseline.plans)) for baseline in search.baselines)
    return setting, replace(search, plans=priced(search.plans), disaggregated=priced(search.disaggregated), baselines=baselines)


def _changes_that_fit(setting: ServingSetting, asked: ServingRequest, formats: Sequence[Format]) -> str:
    """Return the smallest changes after which a search finds a plan that fits, as flags; empty if there are none."""
    from perfmodel.report.serving import remedy_text

    narrowest = min((quantization for quantization, _ in formats), key=lambda quantization: quantization.weight_bytes, default=None)
    plan = replace(asked, chips=setting.num_chips, quantization=narrowest.name if narrowest else asked.quantization)
    try:
        remedies = serve_asked(plan)[1].remedies
    except InputError:
        remedies = ()
    renamed = {"quantization": "allow"} if formats else {}
    changes = [{name: value for name, value in change.items() if name != "tp" or asked.tp is not None} for change in remedies]
    return " or ".join(remedy_text(change, renamed) for change in changes)


def _changes_within_limits(setting: ServingSetting, arguments: Mapping[str, Any], error: NothingFoundError) -> str:
    """Return the smallest changes with which the same search finds a plan within limits and load, as flags; empty if there are none."""
    from perfmodel.planner.serving.search import find_serving_plans

    of, job, space = setting.estimator, setting.job, arguments["space"]
    formats = space.formats or ((job.quantization, job.kv_precision),)

    def is_found(job: ServingJob, chips: int, space: ServingSpace) -> bool:
        more = {**arguments, "space": space, "top": 1, "names_pools": False, "with_baselines": False}
        try:
            find_serving_plans(job, of.cluster.with_chips(chips), of.calibration, of.engine, **more)
        except InputError:
            return False
        return True

    chips = setting.num_chips
    least = min(quantization.weight_bytes for quantization, _ in formats)
    allowed = ",".join(quantization.name for quantization, _ in formats)
    kinds: list[Iterator[str]] = [
        (
            f"--allow {allowed},{quantization.name}"
            for quantization in narrower_formats(of.engine, of.cluster.chip, 0.75 * least)
            if is_found(job, chips, replace(space, formats=(*formats, (quantization, job.kv_precision))))
        ),
        (
            f"--chips {chips * times}"
            for times in (2, 4, 8)
            if chips * times <= of.cluster.max_chips and is_found(job, chips * times, space)
        ),
        (
            f"--concurrency {job.concurrency // times}"
            for times in (2, 4, 8, 16)
            if job.concurrency is not None
            if job.concurrency >= times and is_found(replace(job, concurrency=job.concurrency // times), chips, space)
        ),
        (f"--rate {job.rate / times:g}" for times in (2, 4, 8) if job.rate if is_found(replace(job, rate=job.rate / times), chips, space)),
    ]
    changes = [*error.remedies, *(change for kind in kinds for change in islice(kind, 1))]
    return " or ".join(changes[:MOST_REMEDIES])


def _formats_allowed(setting: ServingSetting, names: Sequence[str]) -> tuple[ServingSetting, tuple[Format, ...]]:
    """Return the allowed formats of a search as they run; those that do not run are noted. Raises InputError if none runs."""
    engine, chip = setting.estimator.engine, setting.estimator.cluster.chip
    allowed = [quantization_named(name) for name in names]
    runs = [format_on(engine.kernels.formats, chip, quantization) for quantization in allowed]
    names_that_run = tuple(dict.fromkeys(quantization.name for quantization in runs if quantization is not None))
    if allowed and not names_that_run:
        require_format(engine.name, engine.kernels.formats, chip, allowed[0])
    left = [quantization.name for quantization, ran in zip(allowed, runs, strict=True) if ran is None]
    notes = (f"allow: {engine.name} does not run {', '.join(left)} on {chip.name}; left out",) if left else ()
    cache = setting.job.kv_precision
    return replace(setting, notes=(*setting.notes, *notes)), tuple((quantization_named(name), cache) for name in names_that_run)


@takes(asked=Words(ServingRequest, needed="model cluster chips input_len output_len"))
def serve_operators(*, asked: ServingRequest) -> list[OperatorRow]:
    """Return every operator of a decode step and of the prefill of a prompt, as `serve` has them: shape, FLOP, bytes, time, bound."""
    return operators_asked(asked)[2]


def operators_asked(asked: ServingRequest) -> tuple[ServingSetting, ServingPrediction, list[OperatorRow]]:
    """Return the plan with every operator of a decode step and of a prefill: shape, work, time and bottleneck."""
    setting, prediction = serve_asked(asked)
    if prediction.plan.pools is not None:
        raise bad_field("workers", prediction.plan.label(), "--operators is of workers that do both", "leave one of them out")
    return setting, prediction, operators_of(setting, prediction)


def operators_of(setting: ServingSetting, prediction: ServingPrediction) -> list[OperatorRow]:
    """Return every operator of a decode step and of a prefill in the prediction's formats; empty for disaggregated serving."""
    from perfmodel.cost.serving.boundness import operator_rows

    if prediction.plan.pools is not None:
        return []
    job = prediction.job
    estimator = replace(setting.estimator, quantization=job.quantization, cache=job.kv_precision)  # a search chooses among formats
    costs = estimator.times([prediction.plan])
    rows = operator_rows(costs, phase="decode", sequences=max(prediction.running, 1.0), cached=job.mean_context)
    rows += operator_rows(costs, phase="prefill", tokens=job.new_tokens, cached=job.input_len.mean - job.new_tokens)
    return rows
