"""Published runs through the estimator itself."""

import json

from perfmodel.validation.cases import parse_case
from perfmodel.validation.validate import CasePredictor, serving_row
from tests.validation.serving_cases import CASE, DEEPSEEK, changed

PREDICTOR = CasePredictor()


def row_of(case):
    return serving_row(parse_case(json.dumps(case), 1), PREDICTOR.as_served)


def test_a_run_is_predicted_within_reason_of_what_was_measured():
    row = row_of(changed(measured={"ttft_ms": 45.0, "tpot_ms": 5.6}))
    assert row.predicted_fits
    assert abs(row.error("tpot")) < 0.4


def test_runs_of_equal_engines_share_a_machine():
    first, second = (PREDICTOR.serving_estimator(row_of(case).run) for case in (CASE, changed(batch=9)))
    assert first.machine is second.machine


def test_equal_prompts_meet_few_experts():
    of = {"model": DEEPSEEK, "chips": 8, "tp": 8, "kind": "static_batch", "batch": 64, "chip_id": "h200-sxm-141gb"}
    drawn, equal = (row_of(changed(**of, repeated_prompts=same)) for same in (False, True))
    assert equal.predicted["request_latency"] < 0.8 * drawn.predicted["request_latency"]
