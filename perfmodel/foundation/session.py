"""The session: results that several calls share, such as graphs, compiled programs and estimators.

A function with `session_cache` stores its results in the current session, within a bound. Constants of shipped data and of the package
itself depend on no call; `functools` caches them for the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Stored results of one function in a session.

    entries       stored results
    max_entries   largest number of them; the result that was not used for the longest time makes room for a new one
    hits          calls that found their result
    misses        calls that computed it
    """

    entries: int
    max_entries: int
    hits: int
    misses: int


class Session:
    """Results that several calls share: models, machines, graphs, compiled programs, estimators. Their number is bounded.

    Calls inside of `with perfmodel.Session():` use that session; all other calls of a process, from every thread, use the default one.
    A session is freed with its last reference. Sessions change no result.
    """

    def __init__(self) -> None:
        self._caches: dict[Callable[..., Any], Any] = {}  # function -> its `lru_cache` in this session

    @staticmethod
    def current() -> Session:
        """Return the session that calls use here."""
        return _SESSIONS.get()[-1]

    def __enter__(self) -> Session:
        _SESSIONS.set((*_SESSIONS.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        _SESSIONS.set(_SESSIONS.get()[:-1])

    def clear(self) -> None:
        """Drop all stored results; the next calls compute theirs again. Calls that run in other threads complete."""
        self._caches.clear()

    def cache_info(self) -> Mapping[str, CacheInfo]:
        """Return the stored results of each function that was called, by its full name."""
        info = {}
        for function, cache in sorted(self._caches.copy().items(), key=lambda entry: _name_of(entry[0])):
            hits, misses, most, entries = cache.cache_info()
            info[_name_of(function)] = CacheInfo(entries=entries, max_entries=most, hits=hits, misses=misses)
        return info


#: Open sessions of this context, the innermost last. The first is the default session of the process.
_SESSIONS: ContextVar[tuple[Session, ...]] = ContextVar("_SESSIONS", default=(Session(),))


def session_cache(
    *, maxsize: int, file: Callable[..., str | Path] | None = None
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator for functions of hashable arguments: `functools.lru_cache` with the results in the current session.

    file   path of the file that the function reads, from its arguments: an edited file is read again

    Threads share it as they share an `lru_cache`: two that need the same result at once may both compute it.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(function)
        def cached(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            caches = _SESSIONS.get()[-1]._caches
            try:
                cache = caches[function]
            except KeyError:
                cache = caches.setdefault(function, lru_cache(maxsize)(function))
            result: _Result = cache(*args, **kwargs)
            return result

        return cached

    def decorate_reader(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @session_cache(maxsize=maxsize)
        @wraps(function)
        def in_state(state: object, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            return function(*args, **kwargs)

        @wraps(function)
        def read(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            assert file is not None
            return in_state(_file_state(file(*args, **kwargs)), *args, **kwargs)

        return read

    return decorate if file is None else decorate_reader


def _file_state(path: str | Path) -> tuple[int, ...]:
    """Return a part of a cache key that changes when the file is edited; empty if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
