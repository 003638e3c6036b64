"""Published runs as they are read: which may be fitted and judged."""

import json
from pathlib import Path

import pytest

from lab.cases import read_runs
from lab.residuals import residual_of
from perfmodel.validation.cases import parse_case, read_cases
from perfmodel.validation.validate import CasePredictor

PUBLISHED = Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz"


@pytest.mark.parametrize(
    ("values", "is_lora"),
    [
        ({"id": "launcher-llama2-7b-lora-8g"}, True),
        ({"id": "x", "notes": "container 24.07; LoRA Performance"}, True),
        ({"id": "x-sft", "notes": "task=SFT (SQuAD, packed; LoRA runs beside it)"}, False),
        ({"id": "x", "notes": "exploration"}, False),
    ],
)
def test_runs_that_train_adapters_only_say_so(values, is_lora):
    case = parse_case(json.dumps(values), 1)
    assert (case.trains_adapters, case.inputs.get("train")) == (is_lora, "lora" if is_lora else None)


def test_what_a_run_says_of_its_adapters_is_taken():
    stated, full = (parse_case(json.dumps({"id": "x-lora", "train": train}), 1) for train in ("qlora:8", "full"))
    assert (stated.trains_adapters, stated.inputs["train"]) == (True, "qlora:8")
    assert not full.trains_adapters


@pytest.mark.slow
def test_adapters_are_predicted_and_neither_fitted_nor_scored():
    cases = [case for case in read_cases(PUBLISHED) if case.trains_adapters]
    rows = [CasePredictor(has_intervals=False).row(case) for case in cases]
    assert len(rows) == 19
    assert not any(row.reason or row.is_scored or residual_of(row) for row in rows)
    assert {row.labels.source for row in rows} == {"adapters only (LoRA)"}
    errors = sorted(row.time_error for row in rows)
    assert abs(errors[9]) < 0.08  # full training of the same would be 41 % slower
    assert sum(map(abs, errors)) / 19 < 0.125
    assert not {case.id for case in cases} & {run.id for run in read_runs(PUBLISHED)}
