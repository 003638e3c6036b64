"""Published runs of InternEvo and NeMo Automodel, whose frameworks no fit has seen.

Sources: InternEvo, doc/en/train_performance.md @3a665e88 (InternLM-7B on 8 to 1,024 A100, ZeRO 1 over all ranks, within 8); NeMo Automodel,
docs/performance-summary.mdx of October 2025 to April 2026 and the recipes in examples/llm_benchmark. A row's source_ref names its revision.
Tolerances: the mean error when the rows were added, rounded up; with 1,024 ranks the exposed reduction is uncertain.
"""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.validation.cases import read_cases
from perfmodel.validation.validate import CasePredictor

CASES = Path(__file__).parent / "published_torch_training.jsonl.gz"


@pytest.fixture(scope="module")
def rows():
    predictor = CasePredictor(has_intervals=False)
    return {case.id: predictor.row(case) for case in read_cases(CASES) if case.tier == "primary"}


@pytest.mark.parametrize(
    ("part", "number", "mean"),
    [
        ("internevo-7b-tp1-z8", 22, 0.07),
        ("internevo-7b-tp1-zall", 8, 0.11),
        ("automodel", 7, 0.12),
        ("", 37, 0.09),
    ],
)
def test_step_times_of_frameworks_that_no_fit_has_seen(rows, part, number, mean):
    errors = [abs(row.predicted_step_time / row.measured_step_time - 1.0) for name, row in rows.items() if part in name]
    assert len(errors) == number
    assert np.mean(errors) < mean


def test_sharding_within_a_node_is_faster_as_measured_with_many_ranks(rows):
    for ranks in (128, 256, 512, 1024):
        within, over_all = (rows[f"internevo-7b-tp1-{group}-{ranks}"] for group in ("z8", "zall"))
        assert within.measured_step_time < over_all.measured_step_time
        assert within.predicted_step_time < over_all.predicted_step_time
