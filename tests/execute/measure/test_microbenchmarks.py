"""Groups of ranks that collectives are measured on."""

from __future__ import annotations

import pytest

from perfmodel.execute.measure import microbenchmarks
from perfmodel.execute.measure.microbenchmarks import group_sizes


@pytest.mark.parametrize(
    "world, sizes", [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8))]
)  # fmt: skip
def test_group_sizes_are_powers_of_two_and_the_world(world: int, sizes: tuple[int, ...]):
    assert group_sizes(world) == sizes


def test_a_collective_costs_what_it_adds_to_compute(monkeypatch: pytest.MonkeyPatch):
    """On a clock that compute and the collective alone advance; every seventh call is disturbed."""
    now, calls = [0.0], [0]

    def advance(seconds: float) -> None:
        calls[0] += 1
        now[0] += seconds + (1.0 if calls[0] % 7 == 0 else 0.0)

    monkeypatch.setattr(microbenchmarks.dist, "barrier", lambda **_: None)
    monkeypatch.setattr(microbenchmarks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(microbenchmarks, "WORK_ROUNDS", 1)
    assert microbenchmarks._time_after(lambda: advance(5.0), lambda: advance(2.0), None) == pytest.approx(2.0)
