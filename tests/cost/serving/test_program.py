"""The forward pass as rows: which products are one call, and which have weights."""

import pytest

from perfmodel.cost.serving.program import serving_program
from perfmodel.workload.models import load_model


@pytest.mark.parametrize("model", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_products_of_a_scan_have_no_weights_and_share_no_call(model):
    products = serving_program(load_model(model), is_prompt=True).fused
    calls = dict(zip(products.names, products.parts, strict=True))
    scans = {names: part for names, part in calls.items() if any("scan" in name for name in names)}
    assert scans
    assert set(scans.values()) == {"other"}
    assert all(len(names) == 1 for names in scans)
    assert {"attention"} <= set(calls.values())
