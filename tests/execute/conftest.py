"""Worker groups that the tests share: importing torch costs each process seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.execute.audit import audit
from perfmodel.execute.audit.audit import CountingProcess
from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.measure import machine
from perfmodel.execute.measure.scope import Scope, make_scope
from perfmodel.hardware.local import local_cluster
from perfmodel.parallel.results import MachineMeasurement

#: Each process group of gloo keeps about three threads that take time while they wait (measured: 196 threads, 7.5 % of a core), and a
#: rank keeps the groups of every mesh that it made. A new rank takes 5 s to start.
MOST_THREADS = 320


def num_threads(pid: int) -> int:
    """Return the number of threads of a process; 0 where there is no /proc."""
    tasks = Path(f"/proc/{pid}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


class Groups:
    """One running group for each number of ranks; one that a failed test ended, or that has many threads, is started again."""

    def __init__(self) -> None:
        self._groups: dict[int, WorkerGroup] = {}

    def __call__(self, num_ranks: int) -> WorkerGroup:
        for size, group in list(self._groups.items()):
            holds_memory = size > 4 and size != num_ranks
            if holds_memory or any(num_threads(pid) > MOST_THREADS for pid in group.pids):
                self._groups.pop(size).close()
        if num_ranks not in self._groups or not self._groups[num_ranks].pids:
            self._groups[num_ranks] = WorkerGroup(num_ranks, hang_timeout=60.0).__enter__()
        return self._groups[num_ranks]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@pytest.fixture(scope="package")
def groups() -> Iterator[Groups]:
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def brief_machine() -> tuple[MachineMeasurement, list[tuple[float, str]]]:
    """This machine measured briefly, with some of the sizes and few repetitions, and the progress reported meanwhile."""
    if local_cluster().num_chips < 2:
        pytest.skip("needs two cores")
    seen: list[tuple[float, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "make_scope", a_part_of_the_scope)
        patch.setattr(machine, "_BRIEF_STEPS", 3)
        return machine.measure_machine(2, brief=True, device="cpu", progress=lambda share, what: seen.append((share, what))), seen


def a_part_of_the_scope(device: str, *, brief: bool, logit_bytes: float) -> Scope:
    scope = make_scope(device, brief=brief, logit_bytes=logit_bytes)
    return replace(
        scope,
        budget=0.1 * scope.budget,
        matmuls=scope.matmuls[4::3],
        half_matmuls=scope.half_matmuls[:3:2],  # a core without units for bf16 takes seconds for the largest
        elements=scope.elements[::2],
        attentions=scope.attentions[:4],
        decodes=scope.decodes[:3],
        weights=scope.weights[1:],
        message_bytes=scope.message_bytes[::2],
    )


@pytest.fixture(scope="package")
def counting() -> Iterator[CountingProcess]:
    """One process that counts for every test of an audit."""
    with CountingProcess() as process:
        yield process


@pytest.fixture
def audits_share_a_process(counting, monkeypatch) -> None:
    """Audits that are asked for in this process count in the one of `counting` rather than each in one of its own."""
    monkeypatch.setattr(audit, "CountingProcess", lambda: nullcontext(counting))
