"""Steps and memory of published runs, predicted from their inputs alone. Each row carries its tolerance and the reason for it."""

import csv
import gzip
import json
import math
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import pytest

from perfmodel.validation.cases import parse_case
from perfmodel.validation.validate import CasePredictor

RUNS = list(csv.DictReader(Path(__file__).with_name("published_steps.csv").read_text(encoding="utf-8").splitlines()))
KORTHIKANTI = [run["id"] for run in RUNS if run["paper"].startswith("Korthikanti") and run["table"] == "table 5"]


@lru_cache(maxsize=3)
def predicted_rows(calibration=None):
    predictor = CasePredictor(calibration=calibration)
    rows = {}
    for number, run in enumerate(RUNS, 1):
        measured = {"step_time_s": float(run["measured_step_time_s"])}
        if run["measured_memory_gib"]:
            measured["peak_memory_gib"] = float(run["measured_memory_gib"])
        case = parse_case(json.dumps({"id": run["id"], "measured": measured, **json.loads(run["settings"])}), number)
        rows[run["id"]] = predictor.row(case)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h100-sxm-80gb", "b200-180gb"])
def test_a_chip_left_out_is_predicted_by_the_other_generations(chip):
    """As if its own generation had not been measured: mean error under 10 %, and less than the data sheet gives with its discount."""
    errors = {
        name: fmean(abs(row.time_error) for row in predicted_rows(name).values() if row.labels.chip == chip)
        for name in ("prior", "spec-sheet")
    }
    assert errors["prior"] <= 0.1
    assert errors["prior"] <= errors["spec-sheet"]


@pytest.mark.slow
def test_an_a100_left_out_is_predicted_by_later_generations_alone():
    errors = [abs(row.time_error) for row in predicted_rows("prior").values() if row.labels.chip.startswith("a100")]
    assert fmean(errors) <= 0.1


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["id"])
@pytest.mark.slow
def test_step_time_of_a_published_run(run):
    row = predicted_rows()[run["id"]]
    assert row.reason == ""
    assert abs(row.time_error) <= float(run["tolerance"]), run["reason"]


def test_korthikanti_mean_error():
    """The eight rows of table 5: Calculon, fitted to them, reaches 3.65 % (Isaev et al. 2023)."""
    errors = [abs(predicted_rows()[name].time_error) for name in KORTHIKANTI]
    assert len(errors) == 8
    assert fmean(errors) <= 0.036


@pytest.mark.parametrize("name", [run["id"] for run in RUNS if run["id"].startswith("simumax")])
def test_allocated_memory_of_a_published_run(name):
    """Allocated bytes with a fused loss: 3 % covers cuBLAS workspaces and alignment, which are not modelled."""
    assert abs(predicted_rows()[name].error("memory")) <= 0.03


@pytest.mark.parametrize("name", [run["id"] for run in RUNS if run["measured_memory_gib"]])
def test_runs_that_ran_have_memory_of_their_size(name):
    """Reserved memory holds fragmentation too; torchtitan's selective recomputation keeps less than modelled."""
    error = predicted_rows()[name].error("memory")
    assert math.isfinite(error)
    assert abs(error) <= 0.45


def test_paired_runs_keep_their_order():
    """Selective recomputation with sequence parallelism beats full recomputation for every one of the paper's models."""
    rows = predicted_rows()
    for size in ("22B", "175B", "530B", "1T"):
        gain = rows[f"korthikanti-{size}-full"].predicted_step_time / rows[f"korthikanti-{size}-selective"].predicted_step_time
        measured = rows[f"korthikanti-{size}-full"].measured_step_time / rows[f"korthikanti-{size}-selective"].measured_step_time
        assert gain == pytest.approx(measured, rel=0.05)


def test_context_parallel_attention_is_balanced():
    """NeMo's Llama-3 8B in fp8 on 32 to 256 B200, cp 2 and 4: between 13 % less and what they took; contiguous chunks take 14 to 60 % more.

    Its step times follow from TFLOP/s a chip by its own formula, attention on the full square (NeMo, `flops_formulas.py`, llama3); counted
    once, attention in bf16 would run at .7 of the chip's peak. Not in the table: its printed degrees do not multiply to its chips.
    """
    lines = gzip.decompress(Path(__file__).with_name("published_training.jsonl.gz").read_bytes()).splitlines()
    errors = []
    for number, line in enumerate(lines, 1):
        if b'"nemo-long-llama3-8b-b200-' in line and b'"cp":1,' not in line:
            data = json.loads(line)
            m, s = data["model"], data["sequence_length"]
            h, f = m["hidden_size"], m["intermediate_size"]
            layer = 12 * h * h * (1 + m["num_key_value_heads"] / m["num_attention_heads"]) + 18 * h * f + 12 * s * h
            flops = data["global_batch"] * s * (m["num_hidden_layers"] * layer + 6 * m["vocab_size"] * h)
            measured = flops / (data["num_chips"] * data["measured"]["tflops_per_chip"] * 1e12)
            errors.append(CasePredictor().row(parse_case(line, number)).predicted_step_time / measured - 1)
    assert len(errors) == 4
    assert all(-0.13 <= error <= 0 for error in errors), errors
