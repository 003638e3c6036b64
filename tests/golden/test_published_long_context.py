"""Published runs of 32 thousand to 15.5 million tokens against their predictions: time, memory, and what fitted.

Sources (each line of the file names its own): TRL pull requests 6845 and 6846, accelerate pull request 4175 (Qwen3 from 0.6B to 32B at 1
to 4 million tokens on 8 to 32 H100, torch's ring, chunked loss, layer inputs on the host); ArcticTraining (arXiv 2506.13996: Llama 3.1 8B
by Ulysses with tiled feed-forwards and a fused loss, 1 to 32 H100 and one H200).

No number of these runs is an input: rates of attention come from kernel benchmarks, all else from model and settings. Tolerances are
the errors reached, rounded up. Two short runs are left out of the largest error: their step is the host's optimizer for the most part.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from perfmodel.validation.cases import read_cases
from perfmodel.validation.rows import TrainingRow
from perfmodel.validation.validate import CasePredictor

CASES = Path(__file__).parent / "published_long_context.jsonl.gz"
#: With the optimizer on the host and sequences of 32 and 36 thousand tokens.
SHORT = ("alst-h100-1-8b-base", "alst-h100-8-8b-base")


@pytest.fixture(scope="module")
def rows() -> list[TrainingRow]:
    predictor = CasePredictor()
    return [predictor.row(case) for case in read_cases(CASES)]


def error(predicted: float, measured: float) -> float:
    return predicted / measured - 1.0


def test_every_run_is_predicted(rows):
    assert len(rows) == 25
    assert [row.reason for row in rows if row.reason] == []


def test_step_times_of_long_contexts(rows):
    errors = {row.id: abs(error(row.predicted_step_time, row.measured_step_time)) for row in rows if not math.isnan(row.measured_step_time)}
    assert len(errors) == 19
    assert np.mean(list(errors.values())) < 0.08
    assert np.median(list(errors.values())) < 0.04
    assert max(value for name, value in errors.items() if name not in SHORT) < 0.08
    assert max(errors.values()) < 0.5


def test_memory_of_long_contexts(rows):
    memories = {row.id: (row.predicted["memory"], row.case.measured("memory")) for row in rows}
    errors = {name: error(*memory) for name, memory in memories.items() if not math.isnan(memory[1])}
    assert len(errors) == 10
    assert np.mean(np.abs(list(errors.values()))) < 0.17
    assert np.median(np.abs(list(errors.values()))) < 0.1


def test_a_million_tokens_fit_with_layer_inputs_on_the_host_and_not_without(rows):
    fits = {row.id: row.predicted_fits for row in rows}
    assert not fits["trl-qwen3-8b-1m-8-nooffload-oom"]
    assert fits["trl-qwen3-8b-1m-8"]
    assert all(fits[name] for name in fits if name.startswith(("alst-h100-1", "alst-h100-8", "alst-h200")) and "16" not in name)
