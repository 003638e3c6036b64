"""Plans of `serve`: the requested degrees and workers, with defaults for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.words import given_words
from perfmodel.parallel.serving.plan import DEGREES, Pools, ServiceLayout, ServingLayout, StatedWorkers
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.verbs.serving.setting import ServingSetting, read_given

#: Words of a plan in addition to its job, its cluster and its engine.
_OF_LAYOUT = (*DEGREES, "replicas", "workers", "max_batch", "max_tokens")


def with_plan(asked: ServingRequest, plan: ServingRequest, *, is_searched: bool = False) -> ServingRequest:
    """Return the request with missing fields taken from a plan.

    Another load replaces that of the plan, other workers or chips its degrees or replicas. is_searched: the layout is not taken.
    """
    held = given_words(plan)
    without = list(_OF_LAYOUT) if is_searched else []
    given = given_words(asked)
    if given.keys() & {"concurrency", "rate"}:
        without += ["concurrency", "rate"]
    if "workers" in given:
        without += [*DEGREES, "replicas"]
    elif given.keys() & {"chips", "cluster", *DEGREES}:
        without += ["replicas"]
    if "model" in given:
        without += ["draft_tokens", "acceptance", "draft_model", "quantization"]
    return replace(asked, **{name: value for name, value in held.items() if name not in {*given, *without}})


def serving_layout(setting: ServingSetting, asked: ServingRequest) -> tuple[ServiceLayout, tuple[str, ...]]:
    """Return the requested layout, of replicas or workers, with notes."""
    return replicas_of(setting, asked) if asked.workers is None else (pools_of(setting, asked), ())


def replicas_of(setting: ServingSetting, asked: ServingRequest) -> tuple[ServingLayout, tuple[str, ...]]:
    """Return the requested replicas, with the smallest tp that fits as the default, and notes."""
    read = read_given(asked, "tp", "pp", "ep", "attention_dp", "dcp", "pcp", "max_batch", "max_tokens", "replicas")
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


def pools_of(setting: ServingSetting, asked: ServingRequest) -> Pools:
    """Return the requested prefill and decode workers.

    Open degrees follow the other fields: dcp of decode workers, pcp of prefill workers. By default attention and experts use all chips of a
    worker (tp over all of them for a dense model).
    """
    read = read_given(asked, "workers", "tp", "ep", "max_batch", "max_tokens")
    prefill, decode = read.pop("workers")
    for name in ("replicas", "attention_dp", "pp"):
        if getattr(asked, name) is not None:
            raise bad_field(name, getattr(asked, name), "workers says how many chips and copies there are", f"leave {name} out")
    used = prefill.count * prefill.chips + decode.count * decode.chips
    if (of_prefill := setting.estimator.prefill) is not None:
        for name, group, cluster in (("prefill", prefill, of_prefill.cluster), ("decode", decode, setting.estimator.cluster)):
            if group.count * group.chips > cluster.num_chips:
                rule = f"{name} workers take more than the {cluster.num_chips} chips of {cluster.name}"
                raise bad_field("workers", asked.workers, rule, "use fewer or smaller workers")
    if used > setting.num_chips:
        raise bad_field("workers", asked.workers, f"take {used} chips of {setting.num_chips}", "use fewer or smaller workers")
    limits = {name: read.pop(name) for name in ("max_batch", "max_tokens") if name in read}
    of_decode, of_prompts = read_given(asked, "dcp"), read_given(asked, "pcp")

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
