"""Verbs run in a home folder and a working folder of their own; tests share the results of equal searches."""

import functools
import importlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from perfmodel.cli import app as cli
from perfmodel.parallel.request import Service
from perfmodel.verbs.setting import Setting

#: It fits without any flag: looking for remedies takes longer than the prediction.
JOB = ["--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--chips", "64", "--global-batch", "512", "--seq-len", "8192"]


def with_flags(job: list[str], *flags: object) -> list[str]:
    """The job with these flags in place of its own: a flag given twice is two values."""
    words = [str(flag) for flag in flags]
    kept = [(name, value) for name, value in zip(job[::2], job[1::2], strict=True) if name not in words]
    return [*(word for pair in kept for word in pair), *words]


def joined(text: str) -> str:
    """Join printed text into one line: a report breaks its lines at the width of the page."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


#: Searches behind several commands, each at the place from which the command imports it.
SEARCHES = (
    "perfmodel.verbs.searching.search_in",
    "perfmodel.verbs.searching.remedies_in",
    "perfmodel.verbs.networks.shard_network",
    "perfmodel.verbs.searching.search_service",
)
MOST_KEPT = 24


def _inputs(value: Any) -> Any:
    """Return what a search reads of an argument: of a setting all but its caches."""
    if isinstance(value, Service):
        return value.given()
    if not isinstance(value, Setting):
        return value
    estimator = value.estimator
    read = [getattr(value, field.name) for field in fields(value) if field.name not in ("estimator", "kept_spaces")]
    return *read, estimator.job, estimator.cluster, estimator.machine, estimator.profile


def _kept(search: Callable[..., Any]) -> Callable[..., Any]:
    """Return the search with its last results: the forms of one output are of the same search."""
    results: deque[tuple[Any, Any]] = deque(maxlen=MOST_KEPT)

    @functools.wraps(search)
    def kept(*arguments: Any, progress: Any = None, **options: Any) -> Any:
        asked = [*map(_inputs, arguments), {name: _inputs(value) for name, value in options.items()}]
        for known, result in results:
            if known == asked:
                return result
        result = search(*arguments, **options, **({} if progress is None else {"progress": progress}))
        results.append((asked, result))
        return result

    return kept


@pytest.fixture(scope="session")
def kept_searches() -> dict[str, Callable[..., Any]]:
    """Each of `SEARCHES` with its results, by its name."""
    names = [name.rpartition(".") for name in SEARCHES]
    return {f"{module}.{name}": _kept(getattr(importlib.import_module(module), name)) for module, _, name in names}


@pytest.fixture(autouse=True)
def share_searches(kept_searches, monkeypatch):
    """Let commands share the results of equal searches."""
    for name, kept in kept_searches.items():
        monkeypatch.setattr(name, kept)


@pytest.fixture
def call(capfd):
    """Run one command line: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def call_json(call):
    """Run one command line with --json: the object that it prints, alone."""

    def run(*arguments: object) -> dict:
        code, out, err = call(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run
