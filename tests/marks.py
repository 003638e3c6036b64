"""Which of many like parameters run in `make check`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, quick: int = 1) -> list[Any]:
    """Parameters of which all but the first few are marked `slow`: they show the same law on more of its domain."""
    return [pytest.param(value, marks=() if index < quick else pytest.mark.slow) for index, value in enumerate(values)]
