"""Worker groups that the tests share: importing torch costs each process seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from perfmodel.execute.audit import audit
from perfmodel.execute.audit.audit import CountingProcess
from perfmodel.execute.launch.launch import WorkerGroup
from perfmodel.execute.measure.machine import measure_machine
from perfmodel.hardware.local import local_cluster
from perfmodel.parallel.results import MachineMeasurement


class Groups:
    """One running group for each number of ranks; a group that a failed test ended is started again."""

    def __init__(self) -> None:
        self._groups: dict[int, WorkerGroup] = {}

    def __call__(self, num_ranks: int) -> WorkerGroup:
        for size in [size for size in self._groups if size > 4 and size != num_ranks]:
            self._groups.pop(size).close()  # idle processes hold memory
        if num_ranks not in self._groups or not self._groups[num_ranks].pids:
            self._groups[num_ranks] = WorkerGroup(num_ranks, hang_timeout=60.0).__enter__()
        return self._groups[num_ranks]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def brief_machine() -> tuple[MachineMeasurement, list[tuple[float, str]]]:
    """This machine measured briefly, and the progress that was told meanwhile."""
    if local_cluster().num_chips < 2:
        pytest.skip("needs two cores")
    seen: list[tuple[float, str]] = []
    return measure_machine(2, brief=True, device="cpu", progress=lambda share, what: seen.append((share, what))), seen


@pytest.fixture(scope="session")
def counting() -> Iterator[CountingProcess]:
    """One process that counts for every test of an audit."""
    with CountingProcess() as process:
        yield process


@pytest.fixture
def audits_share_a_process(counting, monkeypatch) -> None:
    """Audits that are asked for in this process count in the one of `counting` rather than each in one of its own."""
    monkeypatch.setattr(audit, "CountingProcess", lambda: nullcontext(counting))
