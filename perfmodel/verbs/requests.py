"""Requests: one or several values of the job, the cluster and the framework. Every combination is one request.

The verbs take single values, lists, and texts such as `64,128`; the command line hands on what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.memory_headroom import check_risk
from perfmodel.foundation.values import check_name, is_path, optional_share, read_integer, several, share
from perfmodel.foundation.words import words_of
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import NotPredicted, Prediction, first_reasons
from perfmodel.parallel.request import Request
from perfmodel.verbs.overrides import Change, changes, overridden
from perfmodel.verbs.setting import (
    Setting,
    default_recompute,
    find_cluster,
    make_job,
    make_setting,
    plan_in,
    predict_in_columns,
    setting_of_plan,
)
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.routing import BALANCED, Routing
from perfmodel.workload.training import FULL_TRAINING


def make_requests(given: Request, *, of_plan: bool = False, spelled: Callable[[str], str] = str) -> list[Request]:
    """Every combination of the values, the last named varying fastest. What is missing is refused all at once.

    of_plan   a plan says what is left out
    spelled   how a field is written where the values come from: the command line's flags
    """
    headroom, risk = optional_share(given.memory_headroom, "memory_headroom"), read_risk(given.risk)
    if risk is not None and headroom is not None:
        rule = f"cannot be given with {spelled('memory_headroom')}, which it replaces"
        raise InputError(f"{spelled('risk')}: {rule}; leave out one of them")
    _refuse_millions(given.global_batch, spelled)
    asked: dict[str, list[Any]] = {}
    for name, each in words_of(Request).items():
        if each.several:
            value = getattr(given, name)
            asked[name] = [each.read(one, name) for one in each.values(value, name)] if each.read else _names(value)
    for one, other in (("chips", "nodes"), ("global_batch", "batch_tokens")):
        if asked[one] and asked[other]:
            raise InputError(f"{spelled(one)}: cannot be given with {spelled(other)}, which means the same; leave out one of them")
    if not of_plan:
        _check_complete(asked, spelled)
    for name in asked["cluster"]:
        check_name(name, "cluster", Cluster, "see `perfmodel clusters`")
    for name in asked["model"]:
        check_name(name, "model", TransformerConfig, "see `perfmodel models`")
    distinct = [_once(each) or [None] for each in asked.values()]
    given = replace(given, memory_headroom=headroom, risk=risk, settings=given.stated())
    requests = [replace(given, **dict(zip(asked, values, strict=True))) for values in product(*distinct)]
    return requests if of_plan else on_one_framework(requests)


def on_one_framework(requests: list[Request]) -> list[Request]:
    """The requests of one table under one framework: `generic` where none is named and the usual ones of their chips differ.

    Different frameworks would compare the frameworks and not the chips. CPUs keep theirs: no accelerator runs it.
    """
    from perfmodel.cost.resolve import ACCELERATOR_PROFILE, CPU_PROFILE

    clusters = _once([each.cluster for each in requests if each.profile is None])
    usual = [_usual_framework(each) for each in clusters]
    if len(set(usual) - {CPU_PROFILE, ""}) < 2:
        return requests
    sharing = [cluster for cluster, framework in zip(clusters, usual, strict=True) if framework not in (CPU_PROFILE, "")]
    return [replace(each, profile=ACCELERATOR_PROFILE) if each.profile is None and each.cluster in sharing else each for each in requests]


def _usual_framework(cluster: Any) -> str:
    """Empty for an unknown cluster, which is reported where it is loaded."""
    from perfmodel.cost.resolve import default_profile

    try:
        return default_profile(find_cluster(cluster, 1)[1].chip)
    except InputError:
        return ""


def read_risk(given: object) -> float | None:
    if given is None:
        return None
    found = share(given, "risk")
    check_risk(found)
    return found


def _refuse_millions(given: object, spelled: Callable[[str], str]) -> None:
    """A batch of millions is one of tokens, whatever the field: taken as sequences it would give days where seconds are meant."""
    for value in several(given):
        if isinstance(value, str) and value.strip()[-1:] in ("m", "M", "g", "G") and value.strip()[:1].isdigit():
            rule = f"counts sequences, of which no batch has millions; for tokens give {spelled('batch_tokens')} {value.strip()}"
            raise InputError(f"{spelled('global_batch')}={value.strip()}: {rule}")


def _once(values: list[Any]) -> list[Any]:
    """Each value once; an object that a user made may have no hash."""
    try:
        return list(dict.fromkeys(values))
    except TypeError:
        pass
    return [value for index, value in enumerate(values) if not any(value is other or value == other for other in values[:index])]


def _names(value: object) -> list[Any]:
    """Names and paths; a text that is a file's path is one, whatever commas it has."""
    if isinstance(value, str) and "," in value and Path(value).exists():
        return [value]
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in _names(each)]
    return several(value)


def _check_complete(asked: Mapping[str, list[Any]], spelled: Callable[[str], str]) -> None:
    needed = {name: each.missing for name, each in words_of(Request).items() if each.missing}
    absent = {name for name in needed if not asked[name]}
    if asked["nodes"] or (asked["cluster"] and not any(needs_chips(each) for each in asked["cluster"])):
        absent.discard("chips")
    if asked["batch_tokens"]:
        absent.discard("global_batch")
    if absent:
        others = {name: spelled(name) for name in ("nodes", "batch_tokens")}
        meanings = ((spelled(name), meaning.format(**others)) for name, meaning in needed.items() if name in absent)
        raise InputError("; ".join(f"{name}: is missing; give {meaning}" for name, meaning in meanings))


def needs_chips(cluster: Any) -> bool:
    """A shipped cluster has any number of chips; this machine has its own, and so has a file or a cluster object."""
    from perfmodel.hardware.chip_cluster import chip_cluster
    from perfmodel.hardware.mixed import is_mixed
    from perfmodel.hardware.reader import LOCALHOST

    if not isinstance(cluster, (str, Path)) or str(cluster) == LOCALHOST:
        return False
    return not (is_mixed(str(cluster)) or (is_path(cluster) and chip_cluster(str(cluster)) is None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A prediction, what it was made with, and in what it differs from the plan's file."""

    setting: Setting
    prediction: Prediction
    changes: tuple[Change, ...] = ()


def predict_requests(
    requests: list[Request], knobs: Sequence[Knobs], *, plan: Plan | None = None
) -> tuple[list[Answer], list[NotPredicted]]:
    """Return predictions of every request with every set of knobs, and why others cannot be; where there is none, raise the first reason.

    An unknown name is refused: it is no line of a table. A combination that cannot be, such as too many chips, is one.
    """
    if len(requests) > 1:
        check_names(requests)
        if plan is not None:  # one framework for all rows
            own = plan.framework.name
            requests = [each if each.profile is not None else replace(each, profile=own) for each in requests]
    made: dict[tuple[int, ...], Setting] = {}
    cases = list(product(requests, knobs))
    placed: dict[int, _Placed] = {}
    refused: dict[int, InputError] = {}
    for place, (request, chosen) in enumerate(cases):
        try:
            placed[place] = _placed(request, chosen, plan, made)
        except InputError as error:
            refused[place] = error
    predictions: dict[int, Prediction] = {}
    for together in _in_columns(placed):
        for place, found in zip(together, _predicted([placed[place] for place in together]), strict=True):
            if isinstance(found, InputError):
                refused[place] = found
            else:
                predictions[place] = found
    if refused and len(cases) == 1:
        raise refused[0]
    varied = varied_knobs(knobs)
    failures = []
    for place in sorted(refused):
        request, chosen = cases[place]
        asked = request.described() | {name: getattr(chosen, name) for name in varied}
        failures.append(NotPredicted(asked=asked, reason=str(refused[place])))
    if not predictions:
        raise InputError(first_reasons(failures))
    return [_answer(placed[place], predictions[place], plan) for place in sorted(predictions)], failures


def varied_knobs(knobs: Sequence[Knobs]) -> list[str]:
    """The names of the knobs in which several sets of them differ."""
    return [name for name in words_of(Knobs) if any(getattr(each, name) != getattr(knobs[0], name) for each in knobs)]


def check_names(requests: Iterable[Request]) -> None:
    """An unknown model, cluster or profile is refused before anything is computed."""
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.hardware.reader import load_cluster
    from perfmodel.workload.models import load_model

    requests = list(requests)
    for field, load in (("model", load_model), ("cluster", load_cluster), ("profile", load_profile)):
        for name in _once([getattr(each, field) for each in requests]):
            if isinstance(name, (str, Path)):
                load(name)  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placed:
    """A plan that a request and a set of knobs describe, in its setting."""

    request: Request
    knobs: Knobs
    setting: Setting
    plan: Plan


def _placed(request: Request, knobs: Knobs, plan: Plan | None, made: dict[tuple[int, ...], Setting]) -> _Placed:
    setting = _setting(request, plan, made)
    notes = setting.notes
    if plan is None:
        wanted = plan_in(setting, knobs)
        if default := default_recompute(setting, knobs):
            notes = (*notes, f"recompute={default}: not given, so the default of {setting.profile}")
    else:
        wanted = overridden(plan, setting, knobs)
    setting = replace(setting, notes=(*notes, *_notes_on(knobs, wanted)))
    return _Placed(request=request, knobs=knobs, setting=setting, plan=wanted)


_MOST_COLUMNS = 512
"""Sequence lengths that are evaluated together, a few MB of arrays."""


def _in_columns(placed: Mapping[int, _Placed]) -> Iterator[list[int]]:
    """Places of plans that are predicted together: those that differ in their sequence length alone."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, each in placed.items():
        rule = each.request.memory_headroom, each.request.risk
        alike.setdefault((*rule, *each.setting.estimator.shared_by_columns(each.plan)), []).append(place)
    for places in alike.values():
        yield from (places[begin : begin + _MOST_COLUMNS] for begin in range(0, len(places), _MOST_COLUMNS))


def _predicted(together: Sequence[_Placed]) -> list[Prediction | InputError]:
    """Predictions of plans that are columns of one evaluation, or why there are none."""
    asked = together[0].request
    try:
        placed = [(each.setting, each.plan) for each in together]
        return list(predict_in_columns(placed, memory_headroom=asked.memory_headroom, risk=asked.risk))
    except InputError as error:
        return [error] if len(together) == 1 else [found for each in together for found in _predicted([each])]


def _answer(placed: _Placed, prediction: Prediction, plan: Plan | None) -> Answer:
    knobs, request = placed.knobs, placed.request
    given = {*knobs.given(), *request.described()} | ({"recompute"} if knobs.recompute_modules else set())
    return Answer(setting=placed.setting, prediction=prediction, changes=changes(plan, prediction.plan, given) if plan is not None else ())


#: What of a request says how many sequences a step has, and how long they are.
_SEQUENCES = ("global_batch", "batch_tokens", "seq_len")


def _setting(request: Request, plan: Plan | None, made: dict[tuple[int, ...], Setting]) -> Setting:
    """Return `setting_of_request`, made once for requests that differ in nothing but the number of sequences and their length.

    made   settings of former requests of one call, whose values are the same objects
    """
    key = tuple(id(getattr(request, name)) for name in words_of(Request) if name not in _SEQUENCES)
    known = made.get(key)
    if known is None or known.estimator.profile.release:  # recipes of a release differ with the batch
        made[key] = setting = setting_of_request(request, plan=plan)
        return setting
    seq_len = known.job.seq_len if request.seq_len is None else read_integer(request.seq_len, "seq_len")
    batch = request.global_batch if request.batch_tokens is None else _sequences(request.batch_tokens, seq_len)
    global_batch = known.job.global_batch if batch is None else read_integer(batch, "global_batch")
    if (global_batch, seq_len) == (known.job.global_batch, known.job.seq_len):
        return known
    return replace(known, estimator=known.estimator.for_job(replace(known.job, global_batch=global_batch, seq_len=seq_len)))


def setting_of_request(request: Request, *, plan: Plan | None = None) -> Setting:
    """The job on the cluster; what the request leaves out is the plan's."""
    from perfmodel.hardware.reader import load_cluster

    chips = request.chips
    if request.nodes is not None:
        place = request.cluster if request.cluster is not None or plan is None else plan.cluster
        chips = request.nodes * (place if isinstance(place, Cluster) else load_cluster(place)).chips_per_node
    job, calibration = _job_of(request, plan), request.calibration
    assumed = {"profile": request.profile, "settings": request.settings}
    if plan is None:
        return make_setting(job, request.cluster, chips=chips, calibration=calibration, **assumed)
    return setting_of_plan(plan, job=job, chips=chips, cluster=request.cluster, calibration=calibration, **assumed)


def _routing(request: Request, own: Routing) -> Routing:
    """The routing of a request over that of its plan."""
    routing = own if request.routing is None else request.routing.with_capacity(own.capacity_factor)
    return routing if request.capacity_factor is None else routing.with_capacity(request.capacity_factor)


def _job_of(request: Request, plan: Plan | None) -> TrainingJob:
    own = plan.job if plan is not None else None
    seq_len = request.seq_len if request.seq_len is not None or own is None else own.seq_len
    batch = request.global_batch
    if request.batch_tokens is not None:
        batch = _sequences(request.batch_tokens, seq_len or 1)
    model = request.model if request.model is not None or own is None else own.transformer
    return make_job(
        model,
        global_batch=batch if batch is not None or own is None else own.global_batch,  # type: ignore[arg-type]
        seq_len=seq_len,  # type: ignore[arg-type]
        precision=request.precision or (own.precision if own else Precision.BF16_MIXED),
        optimizer=request.optimizer or (own.optimizer if own else Optimizer.ADAMW),
        train=request.train or (own.train if own else FULL_TRAINING),
        routing=_routing(request, own.routing if own else BALANCED),
    )


def _sequences(tokens: int, seq_len: int) -> int:
    if tokens % seq_len:
        fewer = tokens - tokens % seq_len
        near = [count for count in (fewer, fewer + seq_len) if count]
        remedy = f"use {' or '.join(str(count) for count in near)} (4M is 4194304), or give global_batch in sequences"
        raise bad_field("batch_tokens", tokens, f"must be whole sequences of seq_len={seq_len} tokens", remedy)
    return tokens // seq_len


def _notes_on(knobs: Knobs, plan: Plan) -> list[str]:
    """Knobs that were given and do nothing in this plan."""
    notes = []
    if knobs.schedule and plan.layout.pp == 1:
        notes.append(f"schedule={knobs.schedule} does nothing without a pipeline (pp=1)")
    if (knobs.zero or knobs.fsdp) and not int(plan.zero):
        notes.append(f"zero={knobs.searched()['zero']} does nothing: one data-parallel rank holds the whole state, as with zero=0")
    return notes
