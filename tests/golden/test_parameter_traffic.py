"""Gathers and reductions of parameters against torch's own counts: Llama-3-8B, fp32, one microbatch, full buffers."""

import csv
from pathlib import Path

import pytest

from tests.laws.volumes import derivation_of, parameter_traffic

ROWS = list(csv.DictReader((Path(__file__).parent / "parameter_traffic.csv").read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['plan']}-{row['chips']}-{row['kind']}")
def test_traffic_is_what_torch_issues(row):
    derivation = derivation_of(row["model"], "ddp", itemsize=4.0)
    traffic = parameter_traffic(derivation, {"dp_shard": int(row["chips"])}, zero=int(row["zero"]))
    mine = [(units, elements * 4 / 1e9) for (kind, _), (units, elements, _) in traffic.items() if kind == row["kind"]]
    assert sum(units for units, _ in mine) == int(row["count"])
    assert sum(gigabytes for _, gigabytes in mine) == pytest.approx(float(row["gigabytes"]), abs=float(row["tolerance"]))
