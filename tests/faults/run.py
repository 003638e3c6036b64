"""Faults at random moments of real runs: `python -m tests.faults.run --trials 50 --seed 1`.

Each trial starts `perfmodel run` (or `audit`) of a tiny plan on 2 or 4 ranks and sends one process, a rank or the parent, one signal at a
random moment, from the first on. What must hold: the end comes within 30 s of the fault, the rank is named, no process stays, nothing stays
in the temporary folder, and no socket listened to another machine. A trial whose run ended before its fault is drawn again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from perfmodel.parallel.plan_file import write_plan
from tests.execute.jobs import tiny_plan

#: From the fault to the end. [s]
LIMIT = 30.0
#: A parent that is stopped goes on after at most so long, as after Ctrl-Z: longer than ranks may be silent. [s]
LONGEST_STOP = 25.0
#: Steps of a run, so that it computes for some seconds.
STEPS = 60
#: Variable by which every process of a trial is known.
MARK = "PERFMODEL_FAULT_TRIAL"

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """verb: run or audit; target: a rank, or None for the parent; moment: seconds after the start."""

    verb: str
    num_ranks: int
    target: int | None
    number: signal.Signals
    moment: float

    def __str__(self) -> str:
        whom = "the parent" if self.target is None else f"rank {self.target}" if self.verb == "run" else "what counts"
        return f"{self.verb} on {self.num_ranks} ranks, {self.number.name} to {whom} after {self.moment:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """complaints: what does not hold; elapsed: from the fault to the end [s]; is_late: the run had ended before."""

    complaints: tuple[str, ...]
    elapsed: float
    output: str
    is_late: bool = False


def draw(chance: random.Random, lengths: dict[tuple[str, int], float]) -> Fault:
    verb, num_ranks = chance.choice([("run", 2), ("run", 4), ("run", 2), ("run", 4), ("audit", 2)])
    target = chance.choice([None, *range(num_ranks)] if verb == "run" else [None, 0])
    number = chance.choice(SIGNALS)
    return Fault(verb=verb, num_ranks=num_ranks, target=target, number=number, moment=chance.uniform(0.0, lengths[verb, num_ranks]))


def start(fault: Fault, folder: Path, mark: str) -> subprocess.Popen[str]:
    for name in ("tmp", "home", "work"):
        (folder / name).mkdir(exist_ok=True)
    write_plan(tiny_plan(fault.num_ranks, zero=3, batch=fault.num_ranks), folder / "work" / "plan.yaml")
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"), MARK: mark}
    arguments = (
        ["run", "plan.yaml", "--steps", str(STEPS), "--calibration", "spec-sheet", "--save", "runs.jsonl"]
        if fault.verb == "run"
        else ["audit", "plan.yaml"]
    )
    return subprocess.Popen(
        [sys.executable, "-m", "perfmodel", *arguments],
        cwd=folder / "work",
        env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def find_rank(parent: subprocess.Popen[str], fault: Fault) -> psutil.Process | None:
    """The process of the target; None where the parent ended first."""
    entry = r"worker_main\(\*\(\d+, (\d+)," if fault.verb == "run" else r"audit_worker import (main)"
    while parent.poll() is None:
        with suppress(psutil.Error):
            for child in psutil.Process(parent.pid).children():
                match = re.search(entry, " ".join(child.cmdline()))
                if match and (fault.verb == "audit" or int(match[1]) == fault.target):
                    return child
        time.sleep(0.01)
    return None


def outside_listeners(mark: str) -> set[str]:
    addresses = set()
    for process in processes_of(mark):
        with suppress(psutil.Error):
            addresses |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {address for address in addresses if not address.startswith("127.") and address != "::1"}


def inject(fault: Fault, mark: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="perfmodel-faults-") as name:
        folder = Path(name)
        parent = start(fault, folder, mark)
        try:
            return _inject(fault, folder, mark, parent)
        finally:
            for process in processes_of(mark):
                with suppress(psutil.Error):
                    process.kill()
            parent.kill()
            parent.wait()


def _inject(fault: Fault, folder: Path, mark: str, parent: subprocess.Popen[str]) -> Outcome:
    time.sleep(fault.moment)
    pid = parent.pid
    if fault.target is not None:
        rank = find_rank(parent, fault)
        pid = rank.pid if rank is not None else 0
    if not pid or parent.poll() is not None:
        return Outcome(complaints=(), elapsed=0.0, output="", is_late=True)
    listeners = outside_listeners(mark)
    at = time.monotonic()
    try:
        os.kill(pid, fault.number)
    except ProcessLookupError:
        return Outcome(complaints=(), elapsed=0.0, output="", is_late=True)
    patience = LIMIT
    if fault.target is None and fault.number is signal.SIGSTOP:
        time.sleep(fault.moment % LONGEST_STOP)
        os.kill(pid, signal.SIGCONT)
        at, patience = time.monotonic(), 10 * LIMIT  # it goes on and ends by itself
    elif fault.number is signal.SIGINT and fault.target is not None:
        patience = 10 * LIMIT  # ranks leave Ctrl-C to the parent
    try:
        out, output = parent.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        return Outcome(complaints=(f"no end within {patience:.0f} s",), elapsed=patience, output="")
    elapsed = time.monotonic() - at
    complaints = [*verdict(fault, parent.returncode, output)]
    if listeners:
        complaints.append(f"listened on {', '.join(sorted(listeners))}")
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline and (any(processes_of(mark)) or any((folder / "tmp").iterdir())):
        time.sleep(0.1)
    complaints += [f"left process {process.pid}: {' '.join(process.cmdline())[:80]}" for process in processes_of(mark)]
    left = {path.relative_to(folder) for path in (*(folder / "tmp").iterdir(), *(folder / "work").iterdir(), *(folder / "home").iterdir())}
    complaints += [f"left {path}" for path in sorted(left - {Path("work/plan.yaml"), Path("work/runs.jsonl")})]
    if parent.returncode == 0 and not out:
        complaints.append("ended well and said nothing")
    late = parent.returncode == 0 and fault.number in (signal.SIGKILL, signal.SIGTERM) and not complaints
    late = late or (parent.returncode == 0 and fault.target is not None and fault.number is signal.SIGSTOP and elapsed < 1.0)
    return Outcome(complaints=() if late else tuple(complaints), elapsed=elapsed, output=output.strip(), is_late=late)


def verdict(fault: Fault, code: int, output: str) -> Iterator[str]:
    """Yield the complaints about the end of a command."""
    lines = output.strip().splitlines()
    if "Traceback" in output:
        # a signal in the first moment of the interpreter, before any of our code runs, is the interpreter's to tell
        yield f"traceback: {lines[-1]}"
    number = int(fault.number)
    if fault.target is None:
        expected = {
            signal.SIGKILL: {-number},
            signal.SIGTERM: {128 + number, -number},
            signal.SIGINT: {128 + number, -number},
            signal.SIGSTOP: {0},
        }[fault.number]
        if code not in expected:
            yield f"exit code {code}, not {' or '.join(map(str, sorted(expected)))}: {output.strip()[-300:]}"
        return
    if fault.number is signal.SIGINT and code == 0:
        return
    if code != 1:
        yield f"exit code {code}, not 1: {output.strip()[-300:]}"
    name = f"rank {fault.target} of {fault.num_ranks} {'hung' if fault.number is signal.SIGSTOP else 'died'}"
    if fault.verb == "audit":
        name = "process was stopped" if fault.number is signal.SIGSTOP else "process died"
    if name not in output:
        yield f"does not say {name!r}: {output.strip()[-300:]}"


def undisturbed(verb: str, num_ranks: int) -> float:
    """How long it takes. [s]"""
    with tempfile.TemporaryDirectory(prefix="perfmodel-faults-") as name:
        begin = time.monotonic()
        process = start(Fault(verb=verb, num_ranks=num_ranks, target=None, number=signal.SIGTERM, moment=0.0), Path(name), "none")
        output = process.communicate()[1]
        assert process.returncode == 0, output
        return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults at random moments of real runs.")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would hand on that it ignores Ctrl-C
    chance = random.Random(options.seed)
    lengths = {kind: undisturbed(*kind) for kind in (("run", 2), ("run", 4), ("audit", 2))}
    print("undisturbed:", ", ".join(f"{verb} on {ranks} ranks {length:.1f} s" for (verb, ranks), length in lengths.items()), flush=True)
    failures, slowest, number = 0, 0.0, 0
    while number < options.trials:
        fault = draw(chance, lengths)
        outcome = inject(fault, f"{os.getpid()}-{number}-{chance.random()}")
        if outcome.is_late:
            continue
        number += 1
        ends_by_itself = fault.number is signal.SIGINT or (fault.target is None and fault.number is signal.SIGSTOP)
        slowest = slowest if ends_by_itself else max(slowest, outcome.elapsed)
        failures += bool(outcome.complaints)
        last = (outcome.output.splitlines() or [""])[-1]
        print(f"{number:3} {'WRONG' if outcome.complaints else 'right'} {fault}: {outcome.elapsed:.1f} s; {last[:150]}", flush=True)
        for complaint in outcome.complaints:
            print(f"    {complaint}", flush=True)
    print(
        f"{options.trials - failures} of {options.trials} right; the slowest end came {slowest:.1f} s after its fault (limit {LIMIT:.0f} s)"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
