"""The forward pass as rows: which products are one call, and which have weights in fewer bits."""

import pytest

from perfmodel.cost.serving.program import serving_program
from perfmodel.workload.models import load_model


@pytest.mark.parametrize("model", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_products_of_a_scan_have_no_weights_and_share_no_call(model):
    low_parts = frozenset({"attention", "dense", "experts"})
    rows = serving_program(load_model(model), is_prompt=True, low_parts=low_parts).rows
    scans = [name for name in rows.matmul.names if "scan" in name]
    assert scans
    assert not any(" + " in name for name in scans)
    assert any(" + " in name for name in rows.low.names)
    assert not any("scan" in name for name in rows.low.names)


def test_weights_in_fewer_bits_are_those_of_the_parts_of_a_format():
    """A router and the output matrix stay in 16 bits."""
    rows = serving_program(load_model("mixtral-8x7b"), is_prompt=False, low_parts=frozenset({"attention"})).rows
    assert rows.low.names == ("q_proj + k_proj + v_proj", "o_proj")
    assert rows.matmul.names == ("router", "lm_head")


@pytest.mark.parametrize("is_prompt", [False, True])
def test_rows_that_decode_are_cut_by_no_rank_that_shares_prompts(is_prompt):
    program = serving_program(load_model("llama-3-8b"), is_prompt=is_prompt)
    amounts = program.rows.amounts
    cut = {amounts.masks[axes] for axes in amounts.axes}
    assert any("cp" in axes for axes in cut) is is_prompt
