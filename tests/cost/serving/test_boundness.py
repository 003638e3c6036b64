"""Keys that attention reads: the work from which the roofline of a step's operators follows."""

import pytest

from perfmodel.cost.serving.attention import keys_seen
from perfmodel.cost.serving.program import serving_program
from perfmodel.workload.models import load_model
from tests.execute.jobs import tiny


def attention_of(model):
    return serving_program(model, is_prompt=False).rows.cached[-1].work


@pytest.mark.parametrize("queries, before", [(1, 0), (1, 4095), (5, 0), (5, 2), (20, 3), (8, 100), (4, 4)])
def test_keys_that_new_tokens_see(queries, before):
    def counted(most):
        return sum(min(before + query + 1, most) for query in range(queries)) / queries

    assert keys_seen(attention_of(tiny("llama")), queries, before) == counted(10**6)
    assert keys_seen(attention_of(tiny("llama", sliding_window=8)), queries, before) == counted(8)
    half = 0.5 * (counted(8) + counted(10**6))
    assert keys_seen(attention_of(tiny("gemma2")), queries, before) == pytest.approx(half, rel=1e-12)
    assert keys_seen(attention_of(load_model("deepseek-v3.2")), queries, before) == counted(2048)
