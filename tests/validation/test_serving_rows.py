import csv
import json
import math

import pytest

from perfmodel.validation.cases import parse_case
from perfmodel.validation.judgement import summarise_serving
from perfmodel.validation.tables import serving_headline, serving_tables
from perfmodel.validation.validate import serving_row, validate_cases
from tests.validation.published_cases import CASE as TRAINING
from tests.validation.published_cases import write
from tests.validation.serving_cases import CASE, changed, stand_in


def row_of(case):
    return serving_row(parse_case(json.dumps(case), 1), stand_in)


def test_nothing_that_was_measured_enters_a_prediction():
    bare = {name: value for name, value in CASE.items() if name not in ("measured", "source", "tier", "suspect")}
    measured = changed(measured={"ttft_ms": 1e6}, suspect="odd", metric_note="TTFT is mostly queue", repeat_group="g", notes="tp 8")
    assert row_of(bare).predicted == row_of(measured).predicted == row_of(CASE).predicted
    assert not row_of(measured).is_scored


@pytest.mark.parametrize(
    ("values", "metrics"),
    [
        ({}, {"ttft", "tpot", "request_latency", "tokens_per_second"}),
        ({"kind": "static_batch"}, {"ttft", "tpot", "request_latency", "tokens_per_second"}),
        ({"kind": "max_throughput", "batch": None}, {"tokens_per_second"}),
        ({"kind": "decode_step"}, {"ttft", "tpot"}),
        ({"kind": "ttft_only"}, {"ttft"}),
    ],
)
def test_each_kind_is_compared_by_its_own_figures(values, metrics):
    assert set(row_of(changed(**values)).predicted) == metrics


def test_suspect_secondary_and_second_hand_runs_stand_apart():
    rows = [row_of(case) for case in (CASE, changed(suspect="odd"), changed(tier="secondary"), changed(id="nemo_x", suspect="second-hand"))]
    result = summarise_serving(rows, by=("engine", "concurrency"))
    assert [result.overall.num_rows, result.secondary.num_rows, result.second_hand.num_rows, result.num_suspect] == [1, 1, 1, 1]
    assert [figures.name for figures in result.by["concurrency"]] == ["8"]
    noted = summarise_serving([row_of(changed(metric_note="TTFT is mostly queue: 5 of 16"))])
    assert (noted.overall.metrics["ttft"].count, noted.overall.metrics["tpot"].count) == (0, 1)
    assert "1 runs that the data mark as suspect" in serving_headline(result)
    assert next(table.title for table in serving_tables(result)) == "Errors of serving by engine, scored runs"


def test_a_file_may_hold_both_kinds_and_rows_with_nothing_but_an_id(tmp_path):
    lines = [CASE, TRAINING, {"id": "bare"}, {"id": "part", "kind": "serving"}, {"id": "x", "input_len": [1], "chips": "a", "measured": 3}]
    result = validate_cases(write(tmp_path / "cases.jsonl", lines), out=tmp_path / "r.csv", by=("source", "engine", "size"))
    with (tmp_path / "r.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["id"] for row in rows] == ["aic_llama3_c8", TRAINING["id"], "bare", "part", "x"]
    assert {"predicted_tpot", "measured_ttft", "predicted_step_time", "predicted_memory"} <= set(rows[0])
    assert float(rows[0]["measured_tpot"]) == 0.005
    assert all(row["reason"] for row in rows[2:])
    assert (result.num_rows, result.serving.num_rows) == (5, 3)
    assert set(result.by) == {"source", "size"}
    assert set(result.serving.by) == {"source", "engine"}


def test_the_published_runs_are_read_whole():
    import gzip
    from pathlib import Path

    with gzip.open(Path(__file__).parents[1] / "golden" / "published_serving.jsonl.gz", "rt", encoding="utf-8") as stream:
        cases = [parse_case(line, number) for number, line in enumerate(stream)]
    assert len(cases) == 4501
    assert all(case.is_serving for case in cases)
    assert sum(not math.isnan(case.measured("tpot")) for case in cases) == 1869
    assert sum(bool(case.suspect) for case in cases) == 175
