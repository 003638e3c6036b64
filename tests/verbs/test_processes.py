"""Batches on several processes: results in any order, a killed process, and an end before the last batch."""

import os
import signal
import subprocess
import sys
from multiprocessing import active_children

import pytest

from perfmodel.foundation.errors import RunError
from perfmodel.verbs.processes import run_batches


def squared(number, *, parent):
    assert os.getppid() == parent
    return number**2


def killed(number, *, parent):
    os.kill(os.getpid(), signal.SIGKILL)


def in_one_thread(test):
    """Run a test of this file in a process without other threads, as the command line is; pytest's own workers have some."""
    program = f"from tests.verbs import test_processes as tests; tests.{test}()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def check_results():
    assert sorted(run_batches(squared, range(100), jobs=2, when_killed="")) == [number**2 for number in range(100)]
    assert active_children() == []


def check_killed():
    with pytest.raises(RunError, match="jobs=2: a process was killed, perhaps for want of memory; give fewer"):
        list(run_batches(killed, range(4), jobs=2, when_killed="give fewer"))


def check_early_end():
    results = run_batches(squared, range(100), jobs=2, when_killed="")
    next(results)
    results.close()
    assert active_children() == []


@pytest.mark.parametrize("test", ["check_results", "check_killed", "check_early_end"])
def test_copies_of_this_process(test):
    in_one_thread(test)


def test_one_job_is_this_process():
    parents = []
    list(run_batches(lambda number, *, parent: parents.append((number, parent)), range(3), jobs=1, when_killed=""))
    assert parents == [(0, 0), (1, 0), (2, 0)]
