"""Runs with more clients than ran at once, and their simulated benchmarks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.serving.saturation import Saturated, admission_limited, running_in_benchmark, saturated_runs, saturation_of
from perfmodel.validation.cases import Case, parse_case
from perfmodel.validation.rows import CaseRow, ServingRow
from perfmodel.validation.run_labels import RunLabels
from perfmodel.validation.validate import CasePredictor, serving_row
from tests.validation.serving_cases import LLAMA, changed

BIG = {**LLAMA, "name": "Llama-3-70B", "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
PREDICTOR = CasePredictor()


def row_of(**values: object) -> ServingRow:
    lengths = {"input_len": 4096, "output_len": 512, "input_len_mean": None, "output_len_mean": None}
    return serving_row(parse_case(json.dumps(changed(model=BIG, **{**lengths, **values})), 1), PREDICTOR.served)


def served(row: ServingRow, *, suspect: str = "", **measured: Any) -> ServingRow:
    return replace(row, case=replace(row.case, measurements=measured, suspect=suspect))


def test_equal_concurrency_at_any_cache_size_is_no_limit_of_caches() -> None:
    labels = RunLabels(source="s", engine="vllm", model="m", chip="c")

    def runs(running: Sequence[float], clients: float = 512) -> list[Saturated]:
        return [
            Saturated(
                row=CaseRow(case=Case(id=str(i), inputs={}, is_serving=True), labels=labels),
                clients=clients,
                running=num_running,
                held=held,
            )
            for i, (num_running, held) in enumerate(zip(running, (264.0, 740.0, 1691.0, 264.0), strict=True))
        ]

    assert admission_limited(runs((100, 96, 102, 106))) == {"0", "1", "2", "3"}
    assert admission_limited(runs((100, 290, 512, 106))) == set()
    assert admission_limited(runs((100, 96, 102, 106), clients=128)) == set()  # nearly all of them run


def test_a_run_is_saturated_where_a_tenth_of_its_clients_wait() -> None:
    row = row_of(batch=100)
    waited = {share: served(row, ttft=share, request_latency=1.0) for share in (0.09, 0.11)}
    assert saturated_runs([waited[0.09]]) == []
    (run,) = saturated_runs([waited[0.11]])
    assert (run.clients, run.running, run.is_mostly_queue) == (100.0, pytest.approx(89.0), False)
    assert saturated_runs([served(row, ttft=0.11, request_latency=1.0, suspect="it is")]) == []


def test_a_benchmark_that_goes_as_simulated_is_met_exactly() -> None:
    row = row_of(batch=100)
    running = running_in_benchmark(row, PREDICTOR)
    assert running < 0.9 * 100
    saturation = saturation_of([served(row, ttft=1 - running / 100, request_latency=1.0)], PREDICTOR)
    assert [(run.predicted, run.running) for run in saturation.full] == [(pytest.approx(running), pytest.approx(running))]
    assert (saturation.num_others, saturation.num_limited) == (0, 0)
