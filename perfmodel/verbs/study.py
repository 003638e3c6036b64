"""Studies: one verb over every combination of the values of axes. A study file becomes points, and a point becomes rows."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, one_line, shown, suggest
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.plain import picked
from perfmodel.foundation.records import record_from_data
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.schema import FileModel, Values, check, model_of
from perfmodel.foundation.values import check_path, is_path, share, token_count
from perfmodel.foundation.words import Word, takes, words_of
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request, Service
from perfmodel.parallel.rows import prediction_row, serving_row
from perfmodel.planner.result import TrainingSearch
from perfmodel.planner.rows import service_rows
from perfmodel.planner.ties import TIES
from perfmodel.report.searches import nothing_fits_line
from perfmodel.verbs.api import predict
from perfmodel.verbs.limits import find_limits, limits_rows
from perfmodel.verbs.requests import make_requests, needs_chips, setting_of_request
from perfmodel.verbs.searching import find_serving, search_in
from perfmodel.verbs.serving_predict import serve
from perfmodel.verbs.training import read_run

VERSION = 1
MOST_POINTS = 1_000_000
INTERNAL = "internal error"
Rows = list[dict[str, Any]]


class SweptVerb(StrEnum):
    """Computation at each point of a study."""

    SEARCH = "search"
    PREDICT = "predict"
    LIMITS = "limits"
    SERVE = "serve"
    SERVE_SEARCH = "serve-search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One verb over every combination of the values of axes: a point for each.

    version  of the format of the file: 1
    verb     computation at each point
    fixed    arguments of the verb with one value, named as in Python: model, cluster, chips, tp, objective
    axes     arguments with several values; every combination is a point, and the last axis varies fastest
    zip      groups of arguments whose values advance together, all of one length; a group is one axis, before the others
    """

    version: int
    verb: SweptVerb = SweptVerb.SEARCH
    fixed: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    zip: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        known = words_of_verb(self.verb)
        columns: dict[str, list[Any]] = {}
        groups = {"fixed": self.fixed, **{f"zip.{number}": group for number, group in enumerate(self.zip)}, "axes": self.axes}
        for part, group in groups.items():
            for name, given in group.items():
                if name not in known:
                    raise InputError(f"{part}.{name}: {self.verb} has no such argument{suggest(name, known)}")
                if name in columns:
                    raise InputError(f"{name}: stands in several of fixed, axes and zip; give it once")
                columns[name] = [given] if part == "fixed" else list(given)
                for value in columns[name]:
                    _check_value(name, value, known[name])
            lengths = {name: len(values) for name, values in group.items()} if part.startswith("zip.") else {"": 1}
            if len(set(lengths.values())) != 1:
                rule = f"all its arguments must have the same number of values, not {lengths or 'none'}"
                raise InputError(f"{part}: {rule}; give one for each")
        if self.version != VERSION:
            raise bad_field("version", self.version, "is of another release", f"write version: {VERSION}")
        if self.num_points > MOST_POINTS:
            raise InputError(f"axes: make {self.num_points:,} points, and {MOST_POINTS:,} is the most; give fewer values")
        needed = {SweptVerb.LIMITS: "model cluster seq_len", **dict.fromkeys(_RUN_VERBS, "model cluster chips global_batch seq_len")}
        has_chips = {"nodes", "plan"} & set(columns) or not any(map(needs_chips, columns.get("cluster", [""])))
        is_sized = self.verb is SweptVerb.SERVE_SEARCH and {"concurrency", "rate"} & set(columns)  # the fewest chips that hold the load
        supplied = {*columns, *(["chips"] if has_chips or is_sized else []), *(["global_batch"] if "batch_tokens" in columns else [])}
        absent = [name for name in needed.get(self.verb, "model cluster chips input_len output_len").split() if name not in supplied]
        if absent and "plan" not in columns:
            lacks = f"no point has {'it' if len(absent) == 1 else 'them'}"
            raise InputError(f"{', '.join(absent)}: {lacks}; give a value in fixed, or several in axes")

    @property
    def varied(self) -> tuple[str, ...]:
        """Words of the axes, in their order."""
        return (*(name for group in self.zip for name in group), *self.axes)

    @property
    def num_points(self) -> int:
        lengths = [len(next(iter(group.values()))) for group in self.zip]
        return math.prod((*lengths, *map(len, self.axes.values())))

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the words of each point."""
        groups = [[dict(zip(group, values, strict=True)) for values in zip(*group.values(), strict=True)] for group in self.zip]
        groups += [[{name: value} for value in values] for name, values in self.axes.items()]
        for chosen in product(*groups):
            yield {**self.fixed, **{name: value for words in chosen for name, value in words.items()}}


# --- From a point to rows --------------------------------------------------------------------------------------------


@takes(asked=Request, knobs=Knobs)
def _search(
    *,
    asked: Request,
    knobs: Knobs,
    maximum: Mapping[str, int] | None = None,
    objective: str = "time",
    tokens: float | str | None = None,
    top: int = 1,
    ties: float | str = TIES,
    any_framework: bool = False,
) -> TrainingSearch:
    """Return the result of `find_plans` without remedies and plans that the framework cannot run, which rows do not contain."""
    (request,) = make_requests(asked)
    return search_in(
        setting_of_request(request),
        knobs,
        {} if maximum is None else maximum,
        objective=objective,
        run=None if tokens is None else read_run(tokens),
        top=top,
        **picked(request, "memory_headroom risk"),
        ties=share(ties, "ties"),
        any_framework=any_framework,
        also=(),
    )


def _search_rows(search: TrainingSearch, tokens: float) -> Rows:
    """Return rows of the best plans; if none fits, of the plan with the least memory, with the reason."""
    counts = {"num_evaluated": search.num_evaluated, "num_feasible": search.num_feasible}
    values = [{"objective_value": objective_value} for objective_value in search.ranking.values] or [{}] * len(search.plans)
    ranked = zip(search.ranking.places, search.plans, values, strict=True)
    rows = [{"place": rank, **counts, **value, **prediction_row(plan, tokens=tokens)} for rank, plan, value in ranked]
    reason = {} if rows else {"reason": nothing_fits_line(search, given=False)}
    return rows or [{**counts, **prediction_row(plan, tokens=tokens), **reason} for plan in search.least_memory[:1]]


#: Verb -> (function of a point, rows of its result). tokens: of a training run; 0: none.
_ANSWERS: Mapping[SweptVerb, tuple[Callable[..., Any], Callable[[Any, float], Rows]]] = {
    SweptVerb.SEARCH: (_search, _search_rows),
    SweptVerb.PREDICT: (predict, lambda prediction, tokens: [prediction_row(prediction, tokens=tokens)]),
    SweptVerb.LIMITS: (find_limits, lambda limits, _: list(limits_rows(limits))),
    SweptVerb.SERVE: (serve, lambda prediction, _: [serving_row(prediction)]),
    SweptVerb.SERVE_SEARCH: (find_serving, lambda search, _: service_rows(search)),
}
_RUN_VERBS = (SweptVerb.SEARCH, SweptVerb.PREDICT)  # with `tokens`
#: Arguments with the names of results: limits, and the results of `limits`. Rows contain both.
_RESULT_NAMES = {
    SweptVerb.SERVE_SEARCH: ("ttft", "tpot", "request_latency"),
    SweptVerb.LIMITS: ("chips", "global_batch", "seq_len", "micro_batch"),
}


def column_of(verb: SweptVerb, name: str) -> str:
    """Return the column of an argument's value."""
    return f"given_{name}" if name in _RESULT_NAMES.get(verb, ()) else name


def words_of_verb(verb: SweptVerb) -> Mapping[str, Word | None]:
    """Return every field that a point of a verb may have; None: an argument of the verb that is no field of a record."""
    is_service = verb in (SweptVerb.SERVE, SweptVerb.SERVE_SEARCH)
    known = words_of(Service) if is_service else words_of(Request, Knobs)
    names = [name for name in inspect.signature(_ANSWERS[verb][0]).parameters if name != "progress"]
    return {name: known.get(name) for name in (*names, *(["tokens"] if verb is SweptVerb.PREDICT else ()))}


def rows_of(verb: SweptVerb, point: Mapping[str, Any]) -> Rows:
    """Compute a point. A point that cannot be computed has one row with the reason."""
    answer, rows = _ANSWERS[verb]
    words = {"top": 1, **point} if "top" in words_of_verb(verb) else dict(point)
    try:
        tokens = token_count(words["tokens"]) if "tokens" in words and verb in _RUN_VERBS else 0.0
        if verb is SweptVerb.PREDICT:
            words.pop("tokens", None)
        return rows(answer(**words), tokens)
    except InputError as error:
        return [{"reason": str(error)}]
    except Exception as error:  # one point of many: the others continue
        return [{"reason": f"{INTERNAL} ({type(error).__name__}: {one_line(error, 200)}); report it with the words of this row"}]


def failure_of(rows: Rows) -> str:
    """Return the reason of a point without a result; empty: it has one. The several rows of `limits` have a reason each."""
    return rows[0].get("reason", "") if len(rows) == 1 else ""


def cell(name: str, value: object, word: Word | None) -> Any:
    """Return a field's value as a cell of a table: a number if it is one, else text."""
    if isinstance(value, str) and word is not None:
        try:
            read = word.value(value, name)
        except InputError:
            return value
        return read if isinstance(read, (int, float)) else value
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value)


# --- From a file to points -------------------------------------------------------------------------------------------


@cache
def study_model() -> type[FileModel]:
    """Return the model of a study file."""
    kinds: dict[str, Any] = {"fixed": dict[str, Any], "axes": dict[str, Values], "zip": list[dict[str, Values]]}
    return model_of(Study, types=lambda name, _: kinds.get(name))


def list_studies() -> list[str]:
    """Return the names of the shipped studies."""
    return sorted(path.stem for path in (resource_dir("strategies") / "studies").glob("*.yaml"))


def read_study(study: str | Path | Mapping[str, Any]) -> Study:
    """Read the study in a file, of a shipped name or of a mapping. Raises InputError: fields, names and lengths are checked, not values."""
    where, data = "study", study
    if not isinstance(study, Mapping):
        check_path(study, "study")
        shipped = resource_dir("strategies") / "studies" / f"{one_line(study, 200)}.yaml"
        if not is_path(study) and not shipped.is_file():
            raise InputError(f"study={one_line(study, 200)}: no such study{suggest(study, list_studies())}")
        where = str(study)
        data = read_yaml(study if is_path(study) else shipped)
    return record_from_data(Study, check(study_model(), data, where="" if where == "study" else where), where=where)


def _check_value(name: str, value: object, word: Word | None) -> None:
    """Raise InputError if a value is not plain data, or is several values."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        rule = "must be text, a number, a list or a mapping"
        raise bad_field(name, shown(value), rule, "write a name or the path of a file") from None
    if word is not None and (word.several or word.is_varied) and len(word.values(value, name)) > 1 and not Path(str(value)).exists():
        raise bad_field(name, shown(value), "is several values", "write them as a list under axes")
