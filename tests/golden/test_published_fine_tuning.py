"""Fine-tuning as it is published: step time and peak memory of trainers on one to eight chips.

published_fine_tuning.jsonl.gz   runs over text, each with its public source: prime-rl's trainer benchmarks (result files), Answer.AI's
                                 fsdp_qlora benchmarks, LitGPT's config hub and resource tables, torchtune's README, ms-swift's benchmark
                                 page and example headers, VectorLM, axolotl's READMEs. Time of runs over sequences shorter than the cut is
                                 no time of the stated length, so only their memory counts.
published_fine_tuning_held_out.jsonl.gz   later runs and other models of prime-rl's trainer (0.6B to 235B, 110B with experts): no default
                                          was chosen with them, but `cost.compute.LONG_KEYS` was, which moves their times

Six runs of LitGPT under FSDP (2023) are predicted 43 to 61 % too low: what they keep next to shards of a frozen base is not known.
"""

import math
import statistics
from pathlib import Path

import pytest

from perfmodel.validation.cases import read_cases
from perfmodel.validation.validate import CasePredictor

RUNS = Path(__file__).with_name("published_fine_tuning.jsonl.gz")
HELD_OUT = Path(__file__).with_name("published_fine_tuning_held_out.jsonl.gz")

#: Of primary runs: mean error of step times, median error of memory, share of runs whose memory is more than 10 % too low.
TIME, MEMORY, TOO_LOW = 0.16, 0.10, 0.11


def errors(cases):
    """(errors of step times, errors of memory) of what is predicted, signed."""
    predictor = CasePredictor(has_intervals=False)
    rows = [predictor.row(case) for case in cases]
    times = [row.predicted_step_time / row.measured_step_time - 1.0 for row in rows]
    memories = [row.predicted.get("memory", math.nan) / row.case.measured("memory") - 1.0 for row in rows]
    return [error for error in times if not math.isnan(error)], [error for error in memories if not math.isnan(error)]


@pytest.mark.slow
def test_primary_runs_are_predicted():
    cases = [case for case in read_cases(RUNS) if case.tier == "primary"]
    times, memories = errors(cases)
    assert len(times) >= 85
    assert len(memories) >= 153
    assert statistics.mean(map(abs, times)) < TIME
    assert statistics.median(map(abs, memories)) < MEMORY
    assert sum(error < -0.1 for error in memories) < TOO_LOW * len(memories)


@pytest.mark.slow
def test_runs_that_no_default_was_chosen_with_are_predicted():
    """The largest errors: models with experts on Blackwell, which take 1.5 to 4 times as long as predicted."""
    times, memories = errors(read_cases(HELD_OUT))
    assert len(times) == len(memories) == 31
    assert statistics.median(map(abs, times)) < 0.18
    assert statistics.median(map(abs, memories)) < 0.12
    assert min(memories) > -0.1


def test_one_run_of_each_trainer_is_predicted():
    """Before, runs with adapters were read as full training where their names did not say lora: memory 2 to 9 times too large."""
    names = (
        "primerl-qwen3-0.6b-h100-8g-rl-lora16-16k-recompute-fa3",
        "primerl-olmo-3-7b-h100-1g-rl-lora16-64k-recompute-fa3",
        "fsdpqlora-4090-7b-qlora-b8-ddp",
        "litgpt23-llama2-7b-lora-none-b2-1x",
        "swift24-qwen-14b-chat-lora-4096",
        "torchtune-3b-adam8",
    )
    times, memories = errors([case for case in read_cases(RUNS) if case.id in names])
    assert len(memories) == len(names)
    assert max(map(abs, memories)) < 0.15
    assert max(map(abs, times)) < 0.25


def test_what_cannot_be_predicted_says_why():
    rows = {row.id: row.reason for row in map(CasePredictor(has_intervals=False).row, (c for c in read_cases(RUNS) if "dpo" in c.id))}
    assert rows
    assert all("reference model" in reason or "chip" in reason for reason in rows.values())
