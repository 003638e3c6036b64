"""A session stores the results that calls share, within their bounds; it can be emptied and replaced, and changes no result."""

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace

import pytest

import perfmodel
from perfmodel.cost import estimate, programs
from perfmodel.cost.programs import Compiled
from perfmodel.foundation.session import CacheInfo, Session, session_cache
from perfmodel.parallel.request import Request
from perfmodel.verbs.requests import setting_of_request

JOB = dict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=64, seq_len=1024, profile="megatron")
ESTIMATORS = "perfmodel.cost.resolve.kept_estimator"

calls: list[int] = []


@session_cache(maxsize=2)
def doubled(number: int, *, offset: int = 0) -> int:
    """Return twice the number."""
    calls.append(number)
    return 2 * number + offset


@pytest.fixture(autouse=True)
def session():
    calls.clear()
    with Session() as session:
        yield session


def info_of_doubled():
    return Session.current().cache_info()[f"{__name__}.doubled"]


def figures(prediction):
    return prediction.step_time, prediction.parts, prediction.memory, prediction.fits_probability


def test_a_result_is_computed_once():
    assert [doubled(4), doubled(4), doubled(4, offset=1), doubled(4, offset=1)] == [8, 8, 9, 9]
    assert calls == [4, 4]
    assert info_of_doubled() == CacheInfo(entries=2, max_entries=2, hits=2, misses=2)
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Return twice the number.")


def test_the_result_that_was_not_used_for_the_longest_time_is_dropped():
    for number in (1, 2, 1, 3, 1, 2):
        doubled(number)
    assert calls == [1, 2, 3, 2]
    assert info_of_doubled().entries == 2


def test_an_edited_file_is_read_again(tmp_path):
    reads = []

    @session_cache(maxsize=4, file=lambda path, suffix="": path)
    def content(path, suffix=""):
        reads.append(suffix)
        return path.read_text() + suffix

    path = tmp_path / "file"
    for text in ("one", "other"):
        path.write_text(text)
        assert [content(path), content(path), content(path, suffix="!")] == [text, text, f"{text}!"]
    assert reads == ["", "!", "", "!"]
    assert content.__name__ == "content"


def test_a_failed_call_stores_nothing():
    for _ in range(2):
        with pytest.raises(TypeError):
            doubled(None)
    assert info_of_doubled() == CacheInfo(entries=0, max_entries=2, hits=0, misses=2)


def test_sessions_share_nothing(session):
    doubled(1)
    with Session() as inner:
        assert Session.current() is inner
        assert inner.cache_info() == {}
        doubled(1)
        with session:
            doubled(1)
        assert Session.current() is inner
    assert Session.current() is session
    assert calls == [1, 1]


def test_a_session_ends_with_an_error(session):
    with pytest.raises(KeyError), Session():
        raise KeyError
    assert Session.current() is session


def test_a_cleared_session_is_empty(session):
    doubled(1)
    session.clear()
    assert session.cache_info() == {}
    doubled(1)
    assert calls == [1, 1]


def test_threads_use_the_default_session(session):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Session.current).result() is not session
        assert pool.submit(copy_context().run, Session.current).result() is session


def test_one_session_is_open_in_several_threads():
    shared = Session()

    def use(number):
        with shared:
            return doubled(number % 2), Session.current() is shared

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(200))) == {(0, True), (2, True)}
    assert shared.cache_info()[f"{__name__}.doubled"].entries == 2


def test_predictions_of_a_session_share_an_estimator(session):
    perfmodel.predict(**JOB, tp=1)
    perfmodel.predict(**JOB, tp=2)
    assert session.cache_info()[ESTIMATORS] == CacheInfo(entries=1, max_entries=16, hits=1, misses=1)
    assert all(info.entries <= info.max_entries for info in session.cache_info().values())


def test_what_a_cleared_session_held_is_freed(session):
    estimator = setting_of_request(Request(**JOB)).estimator
    perfmodel.predict(**JOB)
    compiled = weakref.ref(estimator.programs.compiled)
    del estimator
    gc.collect()
    assert compiled() is not None
    session.clear()
    gc.collect()
    assert compiled() is None


def test_a_session_is_freed_with_its_last_reference():
    with Session() as inner:
        perfmodel.predict(**JOB)
        freed = weakref.ref(inner)
        compiled = weakref.ref(setting_of_request(Request(**JOB)).estimator.programs.compiled)
    del inner
    gc.collect()
    assert (freed(), compiled()) == (None, None)


def test_sessions_change_no_result(session):
    first = figures(perfmodel.predict(**JOB, tp=2))
    again = figures(perfmodel.predict(**JOB, tp=2))
    session.clear()
    cleared = figures(perfmodel.predict(**JOB, tp=2))
    with Session():
        alone = figures(perfmodel.predict(**JOB, tp=2))
    assert first == again == cleared == alone


class Emptied(dict):
    """A dict that another thread empties as soon as a value is stored."""

    def __setitem__(self, key, value):
        pass


def test_a_program_is_returned_though_another_thread_drops_it():
    estimator = setting_of_request(Request(**JOB)).estimator
    expected = estimator.programs.program_of(plan := perfmodel.predict(**JOB).plan)
    shared = Compiled(programs=Emptied(), parameter_programs=Emptied(), graphs={})
    emptied = replace(estimator.programs, compiled=shared)
    program = emptied.program_of(plan)
    assert program.regions == expected.regions
    assert emptied.parameter_program(program, plan.rules, 1, pipelined=False) is not None
    estimator._cache = Emptied()
    assert estimator.once(estimator.machine, (1,), lambda: 7) == 7


def test_threads_that_share_a_session_predict_as_one(session, monkeypatch):
    """Every cache is nearly always full, and emptied now and then."""
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 1)
    monkeypatch.setattr(estimate, "_MAX_CACHED", 8)
    plans = [JOB | dict(recompute=recompute, micro_batch=size, tp=tp) for recompute in ("none", "full") for size in (1, 2) for tp in (1, 2)]
    expected = [figures(perfmodel.predict(**plan)) for plan in plans]

    def predict(number):
        with session:
            if number % 20 == 0:
                session.clear()
            return figures(perfmodel.predict(**plans[number % len(plans)])) == expected[number % len(plans)]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(predict, range(80)))
    finally:
        sys.setswitchinterval(interval)


WORKERS = """
import os
from perfmodel.foundation.session import Session, session_cache
from perfmodel.verbs.processes import run_batches

@session_cache(maxsize=2)
def doubled(number):
    return 2 * number

def entries(batch, *, parent):
    return os.getpid() != parent, len(Session.current().cache_info())

doubled(1)
print(set(run_batches(entries, [1, 2], jobs=2, when_killed="")), len(Session.current().cache_info()))
"""


def test_worker_processes_start_with_an_empty_session():
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "{(True, 0)} 1\n"
