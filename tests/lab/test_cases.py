"""Published runs as they are read: which may be fitted and judged."""

import json
from pathlib import Path

import pytest

from perfmodel.lab.cases import parse_case, read_cases


@pytest.mark.parametrize(
    ("values", "is_lora"),
    [
        ({"id": "launcher-llama2-7b-lora-8g"}, True),
        ({"id": "x", "notes": "container 24.07; LoRA Performance"}, True),
        ({"id": "x-sft", "notes": "task=SFT (SQuAD, packed; LoRA runs beside it)"}, False),
        ({"id": "x", "notes": "exploration"}, False),
    ],
)
def test_runs_that_train_adapters_only_are_neither_fitted_nor_judged(values, is_lora):
    case = parse_case(json.dumps(values), 1)
    assert ("adapters only" in case.reason) == is_lora


def test_no_published_run_that_is_predicted_says_lora():
    cases = list(read_cases(Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz"))
    assert sum("adapters only" in case.reason for case in cases) == 19
