"""A rank that dies, raises or hangs ends the run within 30 s with an error that names it, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perfmodel.execute.launch import processes
from perfmodel.execute.launch.launch import WorkerGroup, torchrun_worker
from perfmodel.foundation.errors import InputError, RunError
from tests.execute.jobs import echo, fail_on_rank, rank_of
from tests.marks import NIGHTLY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "num_ranks, how, says",
    [
        (2, "kill", "rank 1 of 2 died (signal SIGKILL) during 'step 3'"),
        pytest.param(2, "exit", "rank 1 of 2 died (exit code 7)", marks=NIGHTLY),
        (2, "raise", "rank 1 of 2 failed: ValueError: a fault of its own"),
        pytest.param(3, "sleep", "rank 1 of 3 hung", marks=NIGHTLY),
        pytest.param(2, "stop", "rank 1 of 2 hung: it was stopped", marks=NIGHTLY),
        (2, "spin", "rank 1 of 2 hung"),
    ],
)
def test_a_lost_rank_ends_the_run_and_is_named(num_ranks, how, says):
    with WorkerGroup(num_ranks, hang_timeout=4.0) as group:
        pids = group.pids
        start = time.monotonic()
        with pytest.raises(RunError) as caught:
            group.call(fail_on_rank, 1, how)
        assert time.monotonic() - start < 30
        assert says in str(caught.value)
        assert not any(is_running(pid) for pid in pids)


def test_the_default_patience_is_well_within_30_seconds():
    assert WorkerGroup(1).hang_timeout <= 22


@pytest.mark.parametrize(("how", "says"), [(signal.SIGKILL, "rank 1 of 2 died (signal SIGKILL)"), (signal.SIGSTOP, "rank 1 of 2 hung")])
def test_a_rank_that_is_lost_while_ranks_start_is_named(how, says):
    at = []

    def fault(_):
        if not at:
            at.append(time.monotonic())
            os.kill(group.pids[1], how)

    group = WorkerGroup(2, hang_timeout=3.0, on_progress=fault)
    with pytest.raises(RunError) as caught:
        group.__enter__()
    assert time.monotonic() - at[0] < 30
    assert says in str(caught.value)
    assert "starting up" in str(caught.value)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A working folder whose modules have the names of Python's and torch's own; they leave a mark where they are run."""
    for name in ("queue", "ctypes", "torch", "pickle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write('{name} ')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mark"


def test_a_group_answers_in_rank_order_and_again(trap):
    """... runs nothing of the working folder, listens to this machine only, and leaves nothing."""
    with WorkerGroup(2) as group:
        assert group.call(rank_of) == [0, 1]
        assert group.call(rank_of) == [0, 1]
        pids = group.pids
        listening = {
            connection.laddr.ip for pid in pids for connection in psutil.Process(pid).net_connections("inet") if not connection.raddr
        }
        assert listening == {"127.0.0.1"}
        folder = group._folder
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not trap.exists()
    assert not folder.exists()
    assert not any(is_running(pid) for pid in pids)


def test_workers_die_with_their_parent_and_leave_nothing(tmp_path):
    code = (
        "import time\n"
        "from perfmodel.execute.launch.launch import WorkerGroup\n"
        "with WorkerGroup(2) as group:\n"
        "    print(*group.pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (any(is_running(pid) for pid in pids) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_running(pid) for pid in pids)
        assert not list(tmp_path.iterdir())
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_a_message_of_any_length_reaches_every_rank_and_comes_back(groups):
    group = groups(2)
    assert group.call(echo, "a" * 10**6) == ["a" * 10**6] * 2
    # no rank reads what is written again for another
    assert sorted(path.name for path in group._folder.glob("call*")) == ["call0", "call1"]


def test_time_in_which_this_process_did_not_run_is_nobodys_silence(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    running = processes.RunningClock()
    clock[0] = 0.5
    assert running.passed() == 0.5
    clock[0] = 3600.0
    assert running.passed() <= 1.0


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        ("model.py:3: UserWarning: slow\n[W1122 00:01:02.3 file.cpp:71] Warning: old\n", 1, ""),
        ("terminate called: no memory\n[rank0]:[W1122 00:01:02.3 file.cpp:71] old\n", -signal.SIGABRT, "terminate called: no memory"),
        ("terminate called: no memory\n", -signal.SIGKILL, ""),
    ],
)
def test_last_words_are_what_may_tell_the_cause(log, code, says, tmp_path):
    (tmp_path / "log").write_text(log)
    assert processes.last_log_line(tmp_path / "log", code) == (f", last words: {says}" if says else "")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "MASTER_ADDR: is not set"),
        ({"RANK": "first"}, "RANK=first: must be a whole number"),
        ({"RANK": "2"}, "RANK=2: must be below WORLD_SIZE=2"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ],
)
def test_half_a_launcher_is_a_sentence(variables, says, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        torchrun_worker()
