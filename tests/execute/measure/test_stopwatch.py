"""Copies of operands, so that a call finds none of them in a cache."""

from __future__ import annotations

from perfmodel.execute.measure.stopwatch import in_rotation


def test_copies_take_turns():
    copies: list[list[int]] = []

    def make():
        mine: list[int] = []
        copies.append(mine)
        return lambda: mine.append(1)

    call = in_rotation(make, 8 * 2**20)
    for _ in range(8):
        call()
    assert [len(calls) for calls in copies] == [2, 2, 2, 2]
