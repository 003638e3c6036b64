"""The verb `find_serving`: a search for the best plans of a service, and the changes after which it finds one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import read_integer
from perfmodel.foundation.words import Words, read_words, takes
from perfmodel.frameworks.engine_formats import format_on, require_format
from perfmodel.parallel.request import Service
from perfmodel.parallel.serving.plan import COLUMNS
from perfmodel.verbs.serving.predict import limits_of, priced, serve_asked
from perfmodel.verbs.serving.setting import ServingSetting, serving_setting
from perfmodel.workload.quantization import quantization_named
from perfmodel.workload.serving import ServingJob

if TYPE_CHECKING:
    from perfmodel.planner.serving.result import RankedPlan, ServingSearchResult
    from perfmodel.planner.serving.search import NothingFoundError
    from perfmodel.planner.serving.space import Format, ServingSpace


@takes(service=Words(Service, needed="model cluster input_len output_len"))
def find_serving(
    *,
    service: Service,
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
        service,
        limits={"ttft": ttft, "tpot": tpot, "request_latency": request_latency},
        p99=p99,
        limit_headroom=limit_headroom,
        objective=objective,
        top=top,
        quantizations=quantizations,
        disaggregated=disaggregated,
    )[1]


def search_asked(
    service: Service,
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
    from perfmodel.planner.serving.space import ServingSpace

    asked, knobs = service.request, service.knobs
    if knobs.workers is not None:
        raise bad_field("workers", knobs.workers, "is what a search finds", "leave it out and give --disaggregated")
    is_sized = asked.chips is None and (asked.concurrency is not None or asked.rate is not None)
    setting = serving_setting(service.having({"chips": 1}) if is_sized else service)
    setting, formats = _formats_allowed(setting, several(quantizations))
    headroom = LIMIT_HEADROOM if limit_headroom is None else share(limit_headroom, "limit_headroom")
    arguments: dict[str, Any] = {
        "space": ServingSpace(fixed=read_words(knobs, *COLUMNS), formats=formats),
        "limits": ServingLimits(**limits_of(limits), is_p99=p99, headroom=headroom),
        "objective": choice_of(ServingObjective, objective, "objective"),
        "price_per_hour": setting.price,
    }
    top, of = read_integer(top, "top"), setting.estimator
    if is_sized:
        chips = find_fewest_chips(setting.job, of.cluster, of.calibration, of.engine, **arguments)
        setting, _ = _formats_allowed(serving_setting(service.having({"chips": chips})), several(quantizations))
        note = f"chips: not given; {chips:,} are the fewest that hold the load"
        setting = replace(setting, notes=(*setting.notes, note))
    try:
        search = find_serving_plans(
            setting.job, setting.estimator.cluster, of.calibration, of.engine, **arguments, top=top, with_pools=disaggregated
        )
    except NothingFoundError as error:
        would = _changes_that_fit(setting, service, formats) if not error.fits else _changes_within_limits(setting, arguments, error)
        raise (NothingFoundError(f"{error.summary}; would {'meet them' if error.fits else 'fit'}", would) if would else error) from error

    def all_priced(plans: tuple[RankedPlan, ...]) -> tuple[RankedPlan, ...]:
        return tuple(replace(ranked, prediction=priced(setting, ranked.prediction)) for ranked in plans)

    baselines = tuple(replace(baseline, plans=all_priced(baseline.plans)) for baseline in search.baselines)
    return setting, replace(search, plans=all_priced(search.plans), disaggregated=all_priced(search.disaggregated), baselines=baselines)


def _changes_that_fit(setting: ServingSetting, service: Service, formats: Sequence[Format]) -> str:
    """Return the smallest changes after which a search finds a plan that fits, as flags; empty if there are none."""
    from perfmodel.parallel.framework_ref import flags_text

    narrowest = min((quantization for quantization, _ in formats), key=lambda quantization: quantization.weight_bytes, default=None)
    narrowed = {"quantization": narrowest.name} if narrowest else {}
    try:
        remedies = serve_asked(service.having({"chips": setting.num_chips, **narrowed}))[1].remedies
    except InputError:
        remedies = ()
    renamed = {"quantization": "allow"} if formats else {}
    changes = (
        {renamed.get(name, name): value for name, value in change.items() if name != "tp" or service.knobs.tp is not None}
        for change in remedies
    )
    return " or ".join(map(flags_text, changes))


def _changes_within_limits(setting: ServingSetting, arguments: Mapping[str, Any], error: NothingFoundError) -> str:
    """Return the smallest changes with which the same search finds a plan within limits and load, as flags; empty if there are none."""
    from perfmodel.planner.remedies import MOST, narrower_formats
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
    return " or ".join(changes[:MOST])


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
