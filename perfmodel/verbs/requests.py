"""What is asked for: one value or several of the job, the cluster and the framework. Every combination is one request.

The verbs take single values, lists, and texts such as `64,128`; the command line hands on what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.memory_room import DEFAULT_HEADROOM
from perfmodel.foundation.values import check_name, is_path, several, whole
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import NotPredicted, Prediction, first_reasons
from perfmodel.verbs.overrides import Change, changes, overridden
from perfmodel.verbs.setting import (
    Knobs,
    Setting,
    choice_of,
    make_job,
    make_setting,
    plan_in,
    predict_in,
    setting_of_plan,
)
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob

if TYPE_CHECKING:
    from perfmodel.hardware.calibration import Calibration

#: What a request cannot do without, and what each means; `chips` may be left out for this machine and for a cluster's own file.
_NEEDED = {
    "model": "a name from `perfmodel models` or the path of a config.json",
    "cluster": "a name from `perfmodel clusters` or the path of a cluster file",
    "chips": "how many chips the job runs on, for example 64 (or {nodes})",
    "global_batch": "the sequences of a step (or its tokens as {batch_tokens})",
    "seq_len": "the tokens of a sequence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One value of everything; None is the default, or what the plan says."""

    model: Any = None
    cluster: Any = None
    chips: int | None = None
    nodes: int | None = None
    global_batch: int | None = None
    batch_tokens: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    profile: Any = None

    def described(self) -> dict[str, Any]:
        """What was asked for, as plain values; what was left out is not in it."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        named = {name: getattr(value, "name", value) for name, value in given.items() if value is not None}
        return {name: str(value) if isinstance(value, Path) else value for name, value in named.items()}


def make_requests(
    *,
    model: Any = None,
    cluster: Any = None,
    chips: Any = None,
    nodes: Any = None,
    global_batch: Any = None,
    batch_tokens: Any = None,
    seq_len: Any = None,
    precision: Any = None,
    optimizer: Any = None,
    profile: Any = None,
    of_plan: bool = False,
    spelled: Callable[[str], str] = str,
) -> list[Request]:
    """Every combination of the values, the last named varying fastest. What is missing is refused all at once.

    of_plan   a plan says what is left out
    spelled   how a field is written where the values come from: the command line's flags
    """
    asked: dict[str, list[Any]] = {
        "model": _names(model),
        "cluster": _names(cluster),
        "chips": [whole(each, "chips", most=10**7) for each in several(chips)],
        "nodes": [whole(each, "nodes", most=10**7) for each in several(nodes)],
        "global_batch": [_global_batch(each, spelled) for each in several(global_batch)],
        "batch_tokens": [whole(each, "batch_tokens", most=2**60) for each in several(batch_tokens)],
        "seq_len": [whole(each, "seq_len") for each in several(seq_len)],
        "precision": [choice_of(Precision, each, "precision") for each in several(precision)],
        "optimizer": [choice_of(Optimizer, each, "optimizer") for each in several(optimizer)],
        "profile": _names(profile),
    }
    for one, other in (("chips", "nodes"), ("global_batch", "batch_tokens")):
        if asked[one] and asked[other]:
            raise InputError(f"{spelled(one)}: cannot be given beside {spelled(other)}, which says the same; leave out one of them")
    if not of_plan:
        _check_complete(asked, spelled)
    for name in asked["cluster"]:
        check_name(name, "cluster", Cluster, "see `perfmodel clusters`")
    for name in asked["model"]:
        check_name(name, "model", TransformerConfig, "see `perfmodel models`")
    distinct = [_once(each) or [None] for each in asked.values()]
    return [Request(**dict(zip(asked, values, strict=True))) for values in product(*distinct)]


def _global_batch(value: Any, spelled: Callable[[str], str]) -> int:
    """A batch of millions is one of tokens, whatever the field: taken as sequences it would give days where seconds are meant."""
    if isinstance(value, str) and value.strip()[-1:] in ("m", "M", "g", "G") and value.strip()[:1].isdigit():
        rule = f"counts sequences, of which no batch has millions; for tokens give {spelled('batch_tokens')} {value.strip()}"
        raise InputError(f"{spelled('global_batch')}={value.strip()}: {rule}")
    return whole(value, "global_batch")


def _once(values: list[Any]) -> list[Any]:
    """Each value once; clusters and models given as objects have no hash."""
    return [value for index, value in enumerate(values) if not any(value is other or value == other for other in values[:index])]


def _names(value: Any) -> list[Any]:
    """Names and paths; a text that is a file's path is one, whatever commas it has."""
    if isinstance(value, str) and "," in value and Path(value).exists():
        return [value]
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in _names(each)]
    return several(value)


def _check_complete(asked: Mapping[str, list[Any]], spelled: Callable[[str], str]) -> None:
    absent = {name for name in _NEEDED if not asked[name]}
    if asked["nodes"] or (asked["cluster"] and not any(_needs_chips(each) for each in asked["cluster"])):
        absent.discard("chips")
    if asked["batch_tokens"]:
        absent.discard("global_batch")
    if absent:
        others = {name: spelled(name) for name in ("nodes", "batch_tokens")}
        meanings = ((spelled(name), meaning.format(**others)) for name, meaning in _NEEDED.items() if name in absent)
        raise InputError("; ".join(f"{name}: is missing; give {meaning}" for name, meaning in meanings))


def _needs_chips(cluster: Any) -> bool:
    """A shipped cluster has any number of chips; this machine has its own, and so has a file or a cluster object."""
    from perfmodel.hardware.chip_cluster import chip_cluster
    from perfmodel.hardware.reader import LOCALHOST

    if not isinstance(cluster, (str, Path)) or str(cluster) == LOCALHOST:
        return False
    return not (is_path(cluster) and chip_cluster(str(cluster)) is None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A prediction, what it was made with, and in what it differs from the plan's file."""

    setting: Setting
    prediction: Prediction
    changes: tuple[Change, ...] = ()


def predict_requests(
    requests: list[Request],
    knobs: Knobs,
    *,
    plan: Plan | None = None,
    calibration: str | Path | Calibration | None = None,
    memory_headroom: float = DEFAULT_HEADROOM,
) -> tuple[list[Answer], list[NotPredicted]]:
    """Predictions, and why there are no others; where nothing can be predicted, the first reason is raised.

    An unknown name is refused: it is no line of a table. A combination that cannot be, such as too many chips, is one.
    """
    answers, failures = [], []
    if len(requests) > 1:
        check_names(requests)
    for request in requests:
        try:
            answers.append(_answer(request, knobs, plan, calibration, memory_headroom))
        except InputError as error:
            if len(requests) == 1:
                raise
            failures.append(NotPredicted(asked=request.described(), reason=str(error)))
    if not answers:
        raise InputError(first_reasons(failures))
    return answers, failures


def check_names(requests: Iterable[Request]) -> None:
    """An unknown model, cluster or profile is refused before anything is computed."""
    from perfmodel.hardware.reader import load_cluster
    from perfmodel.parallel.profile import load_profile
    from perfmodel.workload.models import load_model

    requests = list(requests)
    for field, load in (("model", load_model), ("cluster", load_cluster), ("profile", load_profile)):
        for name in _once([getattr(each, field) for each in requests]):
            if isinstance(name, (str, Path)):
                load(name)  # type: ignore[operator]


def _answer(
    request: Request, knobs: Knobs, plan: Plan | None, calibration: str | Path | Calibration | None, memory_headroom: float
) -> Answer:
    setting = setting_of_request(request, plan=plan, calibration=calibration)
    if plan is None:
        wanted = plan_in(setting, knobs)
    else:
        wanted = overridden(plan, setting, knobs)
    setting = replace(setting, notes=(*setting.notes, *_notes_on(knobs, wanted)))
    prediction = predict_in(setting, wanted, memory_headroom=memory_headroom)
    given = {*knobs.given(), *request.described()}
    return Answer(setting=setting, prediction=prediction, changes=changes(plan, prediction.plan, given) if plan is not None else ())


def setting_of_request(request: Request, *, plan: Plan | None = None, calibration: str | Path | Calibration | None = None) -> Setting:
    """The job on the cluster; what the request leaves out is the plan's."""
    from perfmodel.hardware.reader import load_cluster

    chips = request.chips
    if request.nodes is not None:
        place = request.cluster if request.cluster is not None or plan is None else plan.cluster
        chips = request.nodes * (place if isinstance(place, Cluster) else load_cluster(place)).chips_per_node
    job = _job_of(request, plan)
    if plan is None:
        return make_setting(job, request.cluster, chips=chips, calibration=calibration, profile=request.profile)
    return setting_of_plan(plan, job=job, chips=chips, cluster=request.cluster, calibration=calibration, profile=request.profile)


def _job_of(request: Request, plan: Plan | None) -> TrainingJob:
    own = plan.job if plan is not None else None
    seq_len = request.seq_len if request.seq_len is not None or own is None else own.seq_len
    batch = request.global_batch
    if request.batch_tokens is not None:
        batch = _sequences(request.batch_tokens, seq_len or 1)
    model = request.model if request.model is not None or own is None else own.model
    return make_job(
        model,
        global_batch=batch if batch is not None or own is None else own.global_batch,  # type: ignore[arg-type]
        seq_len=seq_len,  # type: ignore[arg-type]
        precision=request.precision or (own.precision if own else Precision.BF16_MIXED),
        optimizer=request.optimizer or (own.optimizer if own else Optimizer.ADAMW),
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
