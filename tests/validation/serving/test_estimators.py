"""Published runs through the estimator itself."""

import json

import pytest

from perfmodel.validation.cases import parse_case
from perfmodel.validation.serving.predict import ServingCasePredictor
from tests.validation.serving.serving_cases import DEEPSEEK, changed


@pytest.fixture(scope="module")
def predictor():
    return ServingCasePredictor()


def test_a_run_is_predicted_within_reason_of_what_was_measured(predictor):
    row = predictor.row(parse_case(json.dumps(changed(measured={"ttft_ms": 45.0, "tpot_ms": 5.6})), 1))
    assert row.predicted_fits
    assert abs(row.error("tpot")) < 0.4
    assert len(predictor.predict.__self__.estimators) == 1


def test_equal_prompts_meet_few_experts(predictor):
    of = {"model": DEEPSEEK, "chips": 8, "tp": 8, "kind": "static_batch", "batch": 64, "chip_id": "h200-sxm-141gb"}
    drawn, equal = (predictor.row(parse_case(json.dumps(changed(**of, repeated_prompts=same)), 1)) for same in (False, True))
    assert equal.predicted["request_latency"] < 0.8 * drawn.predicted["request_latency"]
