"""Groups of ranks that collectives are measured on."""

from __future__ import annotations

import pytest

from perfmodel.execute.measure.microbenchmarks import group_sizes


@pytest.mark.parametrize(
    "world, sizes", [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8))]
)  # fmt: skip
def test_group_sizes_are_powers_of_two_and_the_world(world: int, sizes: tuple[int, ...]):
    assert group_sizes(world) == sizes
