"""Seeds are explicit: hypothesis derives its examples from the test itself. Tests marked `gpu` are skipped where there is none."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("perfmodel", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perfmodel")

# Reports have the width of README and docs, whatever the terminal or the test runner sets.
os.environ["COLUMNS"] = "100"


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def pytest_collection_finish() -> None:
    """Leave collected tests and imported modules, which live as long as the process, out of garbage collections, and make these rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
