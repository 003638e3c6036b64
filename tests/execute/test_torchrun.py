"""The same run under a launcher that has started the processes already."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.execute.jobs import tiny_plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from perfmodel.execute.run import run_plan
from perfmodel.foundation.errors import PerfModelError
from tests.execute.jobs import tiny_plan
chips = int(sys.argv[1])
try:
    found = run_plan(tiny_plan(chips, zero=3, batch=chips), steps=2, warmup=1)
except PerfModelError as error:
    sys.exit(str(error))
if os.environ["RANK"] == "0":
    print(json.dumps(found.to_dict()), flush=True)
Path(sys.argv[2], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def launch(tmp_path, chips):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(program), chips, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_the_wrong_number_of_processes_is_refused(tmp_path):
    with launch(tmp_path, "4") as process:
        _, errors = process.communicate(timeout=500)
    assert process.returncode != 0
    assert "chips=4: the launcher started 2 processes" in errors


def test_a_plan_runs_under_torchrun_and_workers_die_with_it(tmp_path):
    """torchrun itself leaves its workers behind when it is killed."""
    places = [tmp_path / "0", tmp_path / "1"]
    with launch(tmp_path, "2") as process:
        try:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            measurement = json.loads(line)
            assert measurement["num_ranks"] == 2
            assert measurement["plan_hash"] == tiny_plan(2, zero=3, batch=2).hash()
            assert measurement["gradient_error"] < 1e-4
            while not all(path.exists() and path.read_text() for path in places):
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.1)
            pids = [int(path.read_text()) for path in places]
            os.kill(process.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        finally:
            process.kill()
