"""Published runs of models with experts on NVIDIA's chips, of each setting the fastest release: nothing is fitted to them.

Sources: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary*.md of 25.09 to 26.08; NVIDIA/dgxc-benchmarking, grok1 of v24.11.1
to v25.05.05.
Tolerance: mean and median error when recipes of releases were first read (11.1 % and 7.5 %), rounded up; the mean was 14.8 % before.
"""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.validation.cases import read_cases
from perfmodel.validation.judgement import best_releases
from perfmodel.validation.validate import CasePredictor

CASES = Path(__file__).parent / "published_training.jsonl.gz"


@pytest.fixture(scope="module")
def rows():
    predictor = CasePredictor(has_intervals=False)
    return [predictor.row(case) for case in read_cases(CASES) if case.has_experts and case.group in ("bridge", "dgxc")]


def error(row):
    return abs(row.predicted_step_time / row.measured_step_time - 1.0)


@pytest.mark.slow
def test_step_times_of_the_fastest_release_of_each_setting(rows):
    errors = [error(row) for row in best_releases(rows)]
    assert len(errors) == 49
    assert np.mean(errors) < 0.115
    assert np.median(errors) < 0.08


def test_releases_of_one_setting_are_distinguished(rows):
    """Recipes of 26.06 turned on full-iteration graphs, overlap and fused experts: measured 1.29 times as fast as 26.04."""
    by_id = {row.id: row for row in rows}
    before, after = (by_id[f"bridge-{release}-qwen3_235b_a22b-DGX-GB300-256g-mxfp8"] for release in ("26.04", "26.06"))
    measured = before.measured_step_time / after.measured_step_time
    assert before.predicted_step_time / after.predicted_step_time == pytest.approx(measured, rel=0.05)
