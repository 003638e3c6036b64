"""Requests: one or several values of the job, the cluster and the framework. Every combination is one request.

The verbs accept single values, lists, and texts such as `64,128`; the command line passes its arguments unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.memory_headroom import check_risk
from perfmodel.foundation.values import check_name, is_path, optional_share, read_integer, several, share
from perfmodel.foundation.words import check_none_missing, combinations, is_list, missing_words, words_of
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.choices import OFFLOADS, read_context_form, read_offloads
from perfmodel.parallel.compression import read_compression
from perfmodel.parallel.framework_ref import read_settings
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import NotPredicted, Prediction, first_reasons
from perfmodel.parallel.request import Request
from perfmodel.verbs.overrides import Change, changes, overridden
from perfmodel.verbs.setting import (
    Setting,
    default_recompute,
    find_cluster,
    make_setting,
    plan_in,
    predict_in_columns,
    setting_of_plan,
)
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.routing import BALANCED
from perfmodel.workload.training import FULL_TRAINING


def make_requests(given: Request, *, of_plan: bool = False, spelled: Callable[[str], str] = str) -> list[Request]:
    """Return every combination of the values, the last named varying fastest. Raise InputError with all missing fields.

    of_plan   missing fields are supplied by a plan
    spelled   spelling of a field in the caller's interface: the command line's flags
    """
    headroom = None if given.memory_headroom is None else optional_share(given.memory_headroom, "memory_headroom")
    risk = None if given.risk is None else read_risk(given.risk)
    if risk is not None and headroom is not None:
        rule = f"cannot be given with {spelled('memory_headroom')}, which it replaces"
        raise InputError(f"{spelled('risk')}: {rule}; leave out one of them")
    for value in several(given.global_batch):  # millions are meant in tokens; as sequences they would give days instead of seconds
        if isinstance(value, str) and value.strip()[-1:] in ("m", "M", "g", "G") and value.strip()[:1].isdigit():
            rule = f"counts sequences, of which no batch has millions; for tokens give {spelled('batch_tokens')} {value.strip()}"
            raise InputError(f"{spelled('global_batch')}={value.strip()}: {rule}")
    asked: dict[str, list[Any]] = {}
    for name, word in words_of(Request).items():
        if word.several:
            asked[name], value = [], getattr(given, name)
        if word.several and value is not None:
            asked[name] = [*map(word.read, word.values(value, name), repeat(name))] if word.read else names_in(value)
    for one, other in (("chips", "nodes"), ("global_batch", "batch_tokens")):
        if asked[one] and asked[other]:
            raise InputError(f"{spelled(one)}: cannot be given with {spelled(other)}, which means the same; leave out one of them")
    if not (of_plan or (asked["model"] and asked["cluster"] and asked["chips"] and asked["global_batch"] and asked["seq_len"])):
        others = {name: spelled(name) for name in ("nodes", "batch_tokens")}
        check_none_missing({name: meaning.format(**others) for name, meaning in absent_fields(asked).items()}, spelled=spelled)
    given = replace(given, memory_headroom=headroom, risk=risk, settings=stated_settings(given))
    for name, values in asked.items():
        asked[name] = (_once(values) if len(values) > 1 else values) or [None]
    requests = [replace(given, **chosen) for chosen in combinations(asked)]
    return requests if of_plan or len(requests) == 1 else with_one_framework(requests)


_SEVERAL = attrgetter(*(name for name, word in words_of(Request).items() if word.several))


def has_lists(asked: Request) -> bool:
    """Return whether any of the words was given as a list, even of one value."""
    return any(map(is_list, _SEVERAL(asked)))


def stated_settings(asked: Request) -> dict[str, Any]:
    """Return the settings that a request states, by the word of settings and by words of their own."""
    settings: dict[str, Any] = {} if asked.settings is None else read_settings(asked.settings)
    words: dict[str, Any] = {}
    if asked.cp_form is not None:
        words["cp_form"] = read_context_form(asked.cp_form, "cp_form")
    if asked.offload is not None:
        words |= {OFFLOADS[name]: True for name in read_offloads(asked.offload)}
    if asked.gradient_compression is not None:
        words["gradient_compression"] = read_compression(asked.gradient_compression)
    return read_settings(settings | words) if words else settings


def with_one_framework(requests: list[Request]) -> list[Request]:
    """Return the requests of one table with one framework: `generic` if none is named and the defaults of their chips differ.

    Different frameworks would compare the frameworks and not the chips. CPUs keep their default: it runs on no accelerator.
    """
    from perfmodel.cost.resolve import ACCELERATOR_PROFILE, CPU_PROFILE, default_profile

    clusters = _once([request.cluster for request in requests if request.profile is None])
    usual = []
    for cluster in clusters:
        try:
            usual.append(default_profile(find_cluster(cluster, 1)[1].chip))
        except InputError:
            usual.append("")  # an unknown cluster is reported when it is loaded
    if len(set(usual) - {CPU_PROFILE, ""}) < 2:
        return requests
    sharing = [cluster for cluster, framework in zip(clusters, usual, strict=True) if framework not in (CPU_PROFILE, "")]
    return [
        replace(request, profile=ACCELERATOR_PROFILE) if request.profile is None and request.cluster in sharing else request
        for request in requests
    ]


def read_risk(given: object) -> float | None:
    if given is None:
        return None
    risk = share(given, "risk")
    check_risk(risk)
    return risk


def _once(values: list[Any]) -> list[Any]:
    """Return the values without duplicates; objects of a user may not be hashable."""
    try:
        return list(dict.fromkeys(values))
    except TypeError:
        pass
    return [value for index, value in enumerate(values) if not any(value is other or value == other for other in values[:index])]


def names_in(value: object) -> list[Any]:
    """Return names and paths; the path of an existing file is one name, even if it contains commas."""
    if isinstance(value, str) and "," in value and Path(value).exists():
        return [value]
    if isinstance(value, (list, tuple)):
        return [name for entry in value for name in names_in(entry)]
    return several(value)


def absent_fields(asked: Mapping[str, list[Any]]) -> dict[str, str]:
    """Return the required fields of a request that have no value, with their meaning."""
    absent = missing_words(Request, [*filter(asked.get, asked)])
    if asked.get("nodes") or (asked.get("cluster") and not any(needs_chips(cluster) for cluster in asked["cluster"])):
        absent.pop("chips", None)
    if asked.get("batch_tokens"):
        absent.pop("global_batch", None)
    return absent


def needs_chips(cluster: object) -> bool:
    """Return whether a request needs a number of chips: a shipped cluster has any number; this machine, a file or an object has its own."""
    from perfmodel.hardware.cluster_text import chip_cluster, is_mixed
    from perfmodel.hardware.reader import LOCALHOST

    if not isinstance(cluster, (str, Path)) or str(cluster) == LOCALHOST:
        return False
    return not (is_mixed(str(cluster)) or (is_path(cluster) and chip_cluster(str(cluster)) is None))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A prediction, its setting, and the changes from the plan's file."""

    setting: Setting
    prediction: Prediction
    changes: tuple[Change, ...] = ()


def predict_requests(
    requests: list[Request], knobs: Sequence[Knobs], *, plan: Plan | None = None
) -> tuple[list[Answer], list[NotPredicted]]:
    """Return predictions of every request with every set of knobs, and the reasons of failures; raise the first reason if all fail.

    An unknown name raises InputError. An invalid combination, such as too many chips, is a failure.
    """
    if len(requests) > 1:
        check_names(requests)
        if plan is not None:  # one framework for all rows
            framework = plan.framework.name
            requests = [request if request.profile is not None else replace(request, profile=framework) for request in requests]
    cases = list(product(requests, knobs))
    outcomes = predict_cases(cases, plan=plan)
    answers, failures = [], []
    for (request, chosen), outcome in zip(cases, outcomes, strict=True):
        if isinstance(outcome, Answer):
            answers.append(outcome)
        elif len(cases) == 1:
            raise outcome
        else:
            asked = request.described() | {name: getattr(chosen, name) for name in varied_knobs(knobs)}
            failures.append(NotPredicted(asked=asked, reason=str(outcome)))
    if not answers:
        raise InputError(first_reasons(failures))
    return answers, failures


def predict_cases(cases: Sequence[tuple[Request, Knobs]], *, plan: Plan | None = None) -> list[Answer | InputError]:
    """Return the prediction of each request with its knobs, or why there is none. Plans that share a program are columns."""
    settings: dict[tuple[int, ...], Setting] = {}
    placed: dict[int, _Placed] = {}
    outcomes: dict[int, Answer | InputError] = {}
    order: Sequence[int] = range(len(cases))
    if len(cases) > 1:  # in rising order, so that one network serves all numbers of chips
        order = sorted(order, key=lambda index: cases[index][0].chips or cases[index][0].nodes or 0)
    for index in order:
        try:
            request = cases[index][0]
            setting = _setting(request, plan, settings) if len(cases) > 1 else setting_of_request(request, plan=plan)
            placed[index] = _placed(*cases[index], plan, setting)
        except InputError as error:
            outcomes[index] = error
    groups: dict[tuple[Any, ...], list[int]] = {}  # plans of a group differ in sizes that are columns of one program
    for index, case in placed.items():
        rule = case.request.memory_headroom, case.request.risk
        shared = case.setting.estimator.shared_by_columns(case.plan) if len(placed) > 1 else ()
        groups.setdefault((*rule, *shared), []).append(index)
    for indices in groups.values():
        for begin in range(0, len(indices), _MOST_COLUMNS):
            columns = indices[begin : begin + _MOST_COLUMNS]
            outcomes |= zip(columns, _answers([*map(placed.__getitem__, columns)], plan), strict=True)
    return [*map(outcomes.__getitem__, range(len(cases)))]


def varied_knobs(knobs: Sequence[Knobs]) -> list[str]:
    """Return the names of the knobs that are not equal in all sets."""
    return [name for name in words_of(Knobs) if any(getattr(other, name) != getattr(knobs[0], name) for other in knobs)]


def check_names(requests: Iterable[Request]) -> None:
    """Raise InputError for an unknown model, cluster or profile before anything is computed."""
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.hardware.reader import load_cluster
    from perfmodel.workload.models import load_model

    requests = list(requests)
    for field, load in (("model", load_model), ("cluster", load_cluster), ("profile", load_profile)):
        for name in _once([getattr(request, field) for request in requests]):
            if isinstance(name, (str, Path)):
                load(name)  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placed:
    """The plan of a request and a set of knobs, in its setting."""

    request: Request
    knobs: Knobs
    setting: Setting
    plan: Plan


def _placed(request: Request, knobs: Knobs, plan: Plan | None, setting: Setting) -> _Placed:
    notes = setting.notes
    if plan is None:
        wanted = plan_in(setting, knobs)
        if default := default_recompute(setting, knobs):
            notes = (*notes, f"recompute={default}: not given, so the default of {setting.profile}")
    else:
        wanted = overridden(plan, setting, knobs)
    if knobs.schedule and wanted.layout.pp == 1:
        notes = (*notes, f"schedule={knobs.schedule} does nothing without a pipeline (pp=1)")
    if (knobs.zero or knobs.fsdp) and not int(wanted.zero):
        idle = f"zero={knobs.searched()['zero']} does nothing"
        notes = (*notes, f"{idle}: one data-parallel rank holds the whole state, as with zero=0")
    return _Placed(request=request, knobs=knobs, setting=replace(setting, notes=notes), plan=wanted)


_MOST_COLUMNS = 512
"""Plans that are evaluated together, a few MB of arrays."""


def _answers(columns: Sequence[_Placed], plan: Plan | None) -> list[Answer | InputError]:
    """Return the predictions of plans that are columns of one evaluation, or the errors."""
    asked = columns[0].request
    try:
        predictions = predict_in_columns(
            [*map(attrgetter("setting", "plan"), columns)], memory_headroom=asked.memory_headroom, risk=asked.risk
        )
    except InputError as error:
        return [error] if len(columns) == 1 else [answer for case in columns for answer in _answers([case], plan)]
    answers: list[Answer | InputError] = []
    for case, prediction in zip(columns, predictions, strict=True):
        changed: tuple[Change, ...] = ()
        if plan is not None:
            given = {*case.knobs.given(), *case.request.described()} | ({"recompute"} if case.knobs.recompute_modules else set())
            changed = changes(plan, prediction.plan, given)
        answers.append(Answer(setting=case.setting, prediction=prediction, changes=changed))
    return answers


#: Fields of a request that determine the number of chips, and the number of sequences of a step and their length.
_SIZES = ("chips", "nodes", "global_batch", "batch_tokens", "seq_len")


def _setting(request: Request, plan: Plan | None, settings: dict[tuple[int, ...], Setting]) -> Setting:
    """Return `setting_of_request`, shared by requests that differ only in the number of chips, of sequences and their length.

    settings   settings of former requests of one call, whose values are the same objects
    """
    key = tuple(id(getattr(request, name)) for name in words_of(Request) if name not in _SIZES)
    known = settings.get(key)
    if known is not None and known.estimator.profile.release:  # recipes of a release depend on the batch
        known = None
    if known is not None and (request.chips is not None or request.nodes is not None):
        chips = request.chips if request.nodes is None else request.nodes * known.cluster.chips_per_node
        if chips != known.cluster.num_chips:
            estimator = known.estimator.on_chips(chips)  # None if more than the number differs
            known = None if estimator is None else replace(known, cluster=estimator.cluster, estimator=estimator)
    if known is None:
        settings[key] = setting = setting_of_request(request, plan=plan)
        return setting
    seq_len = known.job.seq_len if request.seq_len is None else read_integer(request.seq_len, "seq_len")
    batch = request.global_batch if request.batch_tokens is None else _sequences(request.batch_tokens, seq_len)
    global_batch = known.job.global_batch if batch is None else read_integer(batch, "global_batch")
    if (global_batch, seq_len) == (known.job.global_batch, known.job.seq_len):
        return known
    return replace(known, estimator=known.estimator.for_job(replace(known.job, global_batch=global_batch, seq_len=seq_len)))


def setting_of_request(request: Request, *, plan: Plan | None = None) -> Setting:
    """Return the setting of a request; fields that it lacks are the plan's."""
    from perfmodel.hardware.reader import load_cluster
    from perfmodel.workload.models import load_model

    chips = request.chips
    if request.nodes is not None:
        cluster = request.cluster if request.cluster is not None or plan is None else plan.cluster
        chips = request.nodes * (cluster if isinstance(cluster, Cluster) else load_cluster(cluster)).chips_per_node
    plan_job = plan.job if plan is not None else None
    seq_len = request.seq_len if request.seq_len is not None or plan_job is None else plan_job.seq_len
    batch = request.global_batch
    if request.batch_tokens is not None:
        batch = _sequences(request.batch_tokens, seq_len or 1)
    model = request.model if request.model is not None or plan_job is None else plan_job.transformer
    plan_routing = plan_job.routing if plan_job else BALANCED
    routing = plan_routing if request.routing is None else request.routing.with_capacity(plan_routing.capacity_factor)
    train = request.train or (plan_job.train if plan_job else FULL_TRAINING)
    if not isinstance(model, TransformerConfig):
        train = train if train.is_full else train.on_checkpoint(str(model))
        check_name(model, "model", TransformerConfig, "see `perfmodel models`")
        model = load_model(model)
    job = TrainingJob(
        model=model,
        global_batch=batch if batch is not None or plan_job is None else plan_job.global_batch,  # type: ignore[arg-type]
        seq_len=seq_len,  # type: ignore[arg-type]
        precision=request.precision or (plan_job.precision if plan_job else Precision.BF16_MIXED),
        optimizer=request.optimizer or (plan_job.optimizer if plan_job else Optimizer.ADAMW),
        train=train,
        routing=routing if request.capacity_factor is None else routing.with_capacity(request.capacity_factor),
    )
    assumed = {"calibration": request.calibration, "profile": request.profile, "settings": request.settings}
    if plan is None:
        return make_setting(job, request.cluster, chips=chips, **assumed)
    return setting_of_plan(plan, job=job, chips=chips, cluster=request.cluster, **assumed)


def _sequences(tokens: int, seq_len: int) -> int:
    if tokens % seq_len:
        fewer = tokens - tokens % seq_len
        near = [count for count in (fewer, fewer + seq_len) if count]
        remedy = f"use {' or '.join(str(count) for count in near)} (4M is 4194304), or give global_batch in sequences"
        raise bad_field("batch_tokens", tokens, f"must be whole sequences of seq_len={seq_len} tokens", remedy)
    return tokens // seq_len
