"""Counting processes that die, stop or are interrupted: the error has a remedy, and the next plan gets its own counts."""

import importlib.util
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from perfmodel.execute.audit import audit
from perfmodel.execute.audit import worker as audit_worker
from perfmodel.foundation.errors import RunError
from tests.execute.jobs import tiny_plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@pytest.fixture(scope="module")
def process():
    with audit.CountingProcess() as process:
        yield process


def forks(process):
    pid = process._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def when_it_counts(process, fault):
    """Calls `fault` with the pid of the fork as soon as there is one; one that has answered and is not gone yet is none."""
    answered = set(forks(process))

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for pid in set(forks(process)) - answered:
                fault(pid)
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_count_is_reported_with_a_remedy(process):
    thread = when_it_counts(process, lambda pid: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RunError, match=r"rank 0: the process that counts it died \(signal SIGKILL\); free some memory"):
        process.count(tiny_plan(2, zero=3), 0)
    thread.join()


@pytest.mark.slow
def test_an_interrupted_count_does_not_answer_the_next_question(process):
    small, large = tiny_plan(2, zero=3), tiny_plan(2, seq_len=64)
    expected = process.count(large, 0).counts
    before = process._process.pid

    def interrupt(pid):
        os.kill(pid, signal.SIGSTOP)  # it would have answered later
        signal.raise_signal(signal.SIGUSR2)

    def stop_here(*_):
        raise TimeoutError("a limit of the caller's")

    previous = signal.signal(signal.SIGUSR2, stop_here)
    thread = when_it_counts(process, interrupt)
    try:
        with pytest.raises(TimeoutError):
            process.count(small, 0)
    finally:
        signal.signal(signal.SIGUSR2, previous)
        thread.join()
    assert not Path(f"/proc/{before}").exists()
    assert process.count(large, 0).counts == expected


@pytest.mark.slow
def test_a_killed_process_is_reported_with_a_remedy(process):
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"its process died \(signal SIGKILL\); free some memory and audit again"):
        process.count(tiny_plan(1), 0)


@pytest.mark.slow
def test_a_stopped_process_is_reported(process, monkeypatch):
    process._start()
    monkeypatch.setattr(audit, "STOPPED_TIMEOUT", 0.5)
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(RunError, match="its process was stopped from outside"):
        process.count(tiny_plan(1), 0)


@pytest.mark.slow
@pytest.mark.parametrize(("pause", "says"), [(0.3, ""), (60.0, "was stopped from outside (SIGSTOP)")])
def test_a_fork_that_goes_on_in_time_is_no_fault(pause, says, monkeypatch):
    monkeypatch.setattr(audit_worker, "STOPPED_TIMEOUT", 1.0)
    child = subprocess.Popen(["sleep", "0.4"])
    os.kill(child.pid, signal.SIGSTOP)
    timer = threading.Timer(pause, os.kill, (child.pid, signal.SIGCONT))
    timer.start()
    assert audit_worker._wait_for(child.pid) == says
    timer.cancel()
    child.returncode = 0  # it was waited for
