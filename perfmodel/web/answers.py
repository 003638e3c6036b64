"""Answers of the web page: JSON requests with the fields of the command line, answered by the `--json` objects."""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfmodel.foundation.error_objects import ErrorCode, error_object
from perfmodel.foundation.errors import InputError, PerfModelError, bad_field, one_line, presentable, shown
from perfmodel.foundation.files import parse_yaml
from perfmodel.foundation.plain import SCHEMA_VERSION, picked, to_plain
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import is_path, parsed_bool, read_integer
from perfmodel.foundation.words import words_of
from perfmodel.parallel.choices import MODULES
from perfmodel.parallel.knobs import Knobs, choices_of
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.request import Request
from perfmodel.verbs.api import explain_plan
from perfmodel.verbs.configs import Start, start_from
from perfmodel.verbs.objects import one_object, remedies_of, searches_object, shown_intervals
from perfmodel.verbs.requests import Answer, make_requests, predict_requests, setting_of_request
from perfmodel.verbs.searching import search_in
from perfmodel.workload.imported.decoder import is_saved_graph
from perfmodel.workload.job import Optimizer, Precision
from perfmodel.workload.models import list_models, read_config

#: Callback with the finished share; the search ends if it returns True.
OnProgress = Callable[[float], "bool | None"]

_OPTIONS = ("config", "remedies", "objective", "top", "any_framework")
#: Start of a line that occurs in Python files only.
_PYTHON = re.compile(r"^(?:from|import|def|class|@)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A parsed request of the page.

    start     pasted configuration, and its plan
    options   options of a single verb
    """

    request: Request
    knobs: Knobs
    start: Start | None
    plan: Plan | None
    options: Mapping[str, Any]

    def answer(self) -> Answer:
        """Return the prediction with its setting."""
        return predict_requests([self.request], (self.knobs,), plan=self.plan)[0][0]


def answer(verb: str, data: Mapping[str, Any], on_progress: OnProgress = lambda share: None) -> dict[str, Any]:
    """Return the object that `perfmodel VERB --json` prints.

    verb   one of `VERBS`
    data   request that `verbs.schemas.request_model` accepts; the server checks it, since pydantic is not loaded in the browser
    """
    asked = _read(data)
    content = VERBS[verb](asked, on_progress) | (asked.start.object() if asked.start else {})
    return {"schema_version": SCHEMA_VERSION, **to_plain(content)}


def answer_line(verb: str, data: Mapping[str, Any], on_progress: OnProgress = lambda share: None) -> dict[str, Any]:
    """Return `answer` or `error` without raising.

    verb   one of `VERBS`, or `known` for the names that the page offers
    """
    try:
        return {"answer": known() if verb == "known" else answer(verb, data, on_progress)}
    except Exception as error:
        return {"error": failure(error)}


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as the `--json` object of the command line; print an internal error, and return it as one sentence."""
    if isinstance(error, InputError):
        return {**error_object(presentable(error.full), ErrorCode.BAD_INPUT), "message": str(error)}
    traceback.print_exception(error)
    internal = f"perfmodel failed ({type(error).__name__}); the terminal has the details"
    return error_object(presentable(str(error) if isinstance(error, PerfModelError) else internal), ErrorCode.FAILED)


def known() -> dict[str, Any]:
    """Return the names that the page offers, and the colours of its figures."""
    from perfmodel import __version__
    from perfmodel.frameworks.profile import list_profiles
    from perfmodel.hardware.reader import list_chips, list_clusters
    from perfmodel.report.figures import MEMORY_COLOURS, PART_COLOURS

    return {
        "version": __version__,
        "model": list_models(),
        "cluster": [*list_clusters(), *list_chips()],
        "profile": list_profiles(),
        "precision": [str(member) for member in Precision],
        "optimizer": [str(member) for member in Optimizer],
        **{name: [str(choice) for choice in choices] for name, choices in choices_of().items()},
        "knobs": list(words_of(Knobs)),
        "modules": MODULES,
        "colours": {**PART_COLOURS, **MEMORY_COLOURS},
    }


# --- verbs ----------------------------------------------------------------------------------------------------------


def _predict(asked: PageRequest, on_progress: OnProgress) -> dict[str, Any]:
    """Return the object of `predict --json`; with the option `remedies` also the smallest changes that fit, which need a search."""
    predicted = asked.answer()
    wanted = asked.options.get("remedies") is True
    remedies = remedies_of(predicted, asked.request) if wanted else ()
    content = one_object(predicted, runs=(), tokens=0.0, confidences=shown_intervals([predicted], interval=False), remedies=remedies)
    if not wanted:
        content.pop("remedies", None)
    return content


def _search(asked: PageRequest, on_progress: OnProgress) -> dict[str, Any]:
    setting = setting_of_request(asked.request, plan=asked.plan)
    result = search_in(
        setting,
        asked.knobs,
        {},
        objective=asked.options.get("objective", "time"),
        top=read_integer(asked.options.get("top", 10), "top", most=100),
        **picked(asked.request, "memory_headroom risk"),
        any_framework=asked.options.get("any_framework") is True,
        progress=on_progress,
    )
    return searches_object([(setting, result)], [], run=None, interval=False)


def _explain(asked: PageRequest, on_progress: OnProgress) -> dict[str, Any]:
    from perfmodel.report.searches import explanation_object

    return explanation_object(explain_plan(asked.answer().prediction.plan, **picked(asked.request, "memory_headroom risk")))


VERBS: Mapping[str, Callable[[PageRequest, OnProgress], dict[str, Any]]] = {"predict": _predict, "search": _search, "explain": _explain}


# --- requests -------------------------------------------------------------------------------------------------------


def _read(data: Mapping[str, Any]) -> PageRequest:
    options = {name: value for name, value in data.items() if name in _OPTIONS}
    words = {name: _value(name, value) for name, value in data.items() if name not in _OPTIONS}
    asked: dict[str, Any] = {name: value for name, value in words.items() if name in words_of(Request)}
    chosen: dict[str, Any] = {name: value for name, value in words.items() if name not in asked}
    pasted, start = options.get("config"), None
    if pasted is not None:
        try:
            parsed = json.loads(pasted)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, Mapping) and ({"model_type", "architectures"} & parsed.keys() or is_saved_graph(parsed)):
            model = read_config(parsed)
            if "model" in asked:
                raise InputError(f"model={asked['model']}: cannot be given with a pasted config.json; leave out one of them")
            asked["model"] = model
        else:
            start = _start_of(pasted, tuple(sorted(asked.items())))
    resolved = make_requests(Request(**asked), of_plan=start is not None)
    if len(resolved) != 1:
        several = next((name for name, value in words.items() if isinstance(value, str) and "," in value), "chips")
        raise bad_field(several, words.get(several), "must be one value", "use `perfmodel predict` for a table of several")
    return PageRequest(request=resolved[0], knobs=Knobs(**chosen), start=start, plan=None if start is None else start.plan, options=options)


def _value(name: str, value: str | int | float | bool) -> str | int | float | bool:
    """Return the value of a field. Raise InputError for local files."""
    if isinstance(value, str):
        if (knob := words_of(Knobs).get(name)) is not None and knob.kind is bool:
            return parsed_bool(value, name)
        for part in (value, *re.split(r"[\s,+]+", value)):
            is_file = is_path(part) or (name == "model" and part not in list_models())
            if is_file and "\0" not in part and os.path.exists(part):
                raise bad_field(name, shown(value), "is a file, which the page does not read", "paste what it holds")
    return value


@session_cache(maxsize=8)
def _start_of(text: str, given: tuple[tuple[str, Any], ...]) -> Start:
    """Return the plan of a pasted configuration or plan file, which must not reference other files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config{_suffix_of(text)}"
        path.write_text(text, encoding="utf-8")
        try:
            start = start_from(path, Request(**dict(given)))
        except InputError as error:
            raise InputError(error.full.replace(str(path), "config")) from None
    if start.plan.assignment is not None:
        raise InputError("config: is a plan of `perfmodel shard`, which the page does not show; use `perfmodel predict plan.yaml`")
    if start.setup is None:
        return start
    others = [file.name for file in start.setup.files if file != path]
    if others:
        raise InputError(f"config: names the file {one_line(others[0])}, which the page does not read; paste what it holds in its place")
    return replace(start, setup=replace(start.setup, files=(Path(path.name),)))


def _suffix_of(text: str) -> str:
    """Return the file extension that matches a text."""
    readers: Mapping[str, Callable[[str], object]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".py": lambda text: ast.parse(text) if _PYTHON.search(text) else None,
        ".yaml": lambda text: parse_yaml(text, where="config"),
    }
    for ending, read in readers.items():
        try:
            if read(text):
                return ending
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return ".sh"
