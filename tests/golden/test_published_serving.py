"""A sample of the published runs of serving: no median error may fall far behind docs/accuracy-serving.md."""

import gzip
from pathlib import Path

import pytest

from perfmodel.validation.cases import parse_case
from perfmodel.validation.judgement import metric_errors
from perfmodel.validation.validate import CasePredictor, serving_row

CASES = Path(__file__).parent / "published_serving.jsonl.gz"


@pytest.fixture(scope="module")
def rows():
    predict = CasePredictor().as_served
    lines = gzip.decompress(CASES.read_bytes()).decode().splitlines()[::25]
    return [row for row in (serving_row(parse_case(line, 1), predict) for line in lines) if row.is_scored]


LIMITS = [("serving", "tpot", 0.11), ("serving", "request_latency", 0.11), ("static_batch", "request_latency", 0.10)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "metric", "most"), LIMITS)
def test_the_median_error_is_what_is_stated(rows, kind, metric, most):
    errors = metric_errors([row for row in rows if row.kind == kind], metric)
    assert errors.count > 40
    assert errors.median < most


@pytest.mark.slow
def test_what_ran_is_predicted_to_fit(rows):
    assert sum(row.predicted_fits is False for row in rows) <= 2
