"""A rank that dies, raises or hangs ends the run within 30 s with an error that names it, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfmodel.errors import RunError
from perfmodel.execute.launch import WorkerGroup
from tests.execute.jobs import fail_on_rank, rank_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "how, says",
    [
        ("kill", "rank 1 of 3 died (signal SIGKILL) during 'step 3'"),
        ("exit", "rank 1 of 3 died (exit code 7)"),
        ("raise", "rank 1 of 3 failed: ValueError: a fault of its own"),
        ("sleep", "rank 1 of 3 hung"),
        ("stop", "rank 1 of 3 hung"),
        ("spin", "rank 1 of 3 hung"),
    ],
)
def test_a_lost_rank_ends_the_run_and_is_named(how, says):
    with WorkerGroup(3, hang_timeout=4.0) as group:
        pids = group.pids
        start = time.monotonic()
        with pytest.raises(RunError) as caught:
            group.call(fail_on_rank, 1, how)
        assert time.monotonic() - start < 30
        assert says in str(caught.value)
        assert not any(is_running(pid) for pid in pids)


def test_the_default_patience_is_well_within_30_seconds():
    assert WorkerGroup(1).hang_timeout <= 22


def test_a_group_answers_in_rank_order_and_again():
    with WorkerGroup(2) as group:
        assert group.call(rank_of) == [0, 1]
        assert group.call(rank_of) == [0, 1]
        pids = group.pids
    assert not any(is_running(pid) for pid in pids)


def test_workers_die_with_their_parent():
    code = (
        "import time\n"
        "from perfmodel.execute.launch import WorkerGroup\n"
        "with WorkerGroup(2) as group:\n"
        "    print(*group.pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_running(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_running(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
