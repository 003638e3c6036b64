"""Torch's counts of random small plans, of every form and of every shape of model, equal the predicted ones."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.audit import AuditRow, audit_rows
from perfmodel.execute.audit.audit import ranks_to_audit
from perfmodel.workload.job import Optimizer, Precision
from tests.execute.audit.test_audit import predicted
from tests.execute.jobs import tiny, tiny_plan
from tests.execute.random_plans import grown, plans
from tests.marks import NIGHTLY, one_in

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

#: Largest share by which memory may differ. Peaks of models that mix everything (a gated relu with ALiBi on eight ranks of a
#: sequence) are within three per cent nine times in ten; those of models that exist are held to that in test_real.py.
SAVED, PEAK = 0.01, 0.15


def rows_of(counting, plan, stage) -> tuple[AuditRow, ...]:
    ranks = ranks_to_audit(plan)
    rank = ranks[stage % len(ranks)]
    return audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)


def check(counting, plan, stage):
    """Counts are equal at the smallest size, where shards are uneven or empty; memory is compared at a size where it is memory."""
    assert [row for row in rows_of(counting, plan, stage) if row.difference and not row.tolerance] == []
    memory = {row.name: row for row in rows_of(counting, grown(plan), stage) if row.tolerance}
    for name, share in (("saved activations", SAVED), ("peak", PEAK)):
        assert abs(memory[name].difference) <= share * memory[name].counted, (name, memory[name])


UNEVEN = tiny_plan(
    num_chips=2, pp=2, schedule="interleaved", virtual_stages=3, stage_layers=(0, 1, 3, 0, 1, 2), model=tiny(num_hidden_layers=7)
)
CHUNKS = {model: tiny_plan(num_chips=4, cp=4, attention="unfused", model=tiny(model)) for model in ("gpt2", "qwen3")}
CHUNKS["gpt2, two sequences"] = tiny_plan(num_chips=4, cp=4, attention="unfused", model=tiny("gpt2"), micro_batch=2)


#: Last ranks and a middle one, which postpone gradients of weights, and a first one with chunks.
ZERO_BUBBLE = {
    "last of four": (dict(num_chips=4, pp=4), 3),
    "second of four": (dict(num_chips=4, pp=4), 1),
    "uneven, tensor": (dict(num_chips=4, pp=2, tp=2, stage_layers=(3, 1)), 2),
    "chunks": (dict(num_chips=2, pp=2, virtual_stages=2), 0),
    "chunks, a round of three": (dict(num_chips=2, pp=2, virtual_stages=2, batch=3), 0),
    "zero 3": (dict(num_chips=4, pp=2, dp_shard=2, zero=3), 2),
    "latent": (dict(num_chips=2, pp=2, model=tiny("latent")), 1),
}


#: Both ends are on the first rank. The last rank sends nothing between its two stages.
IN_A_V = {
    "first of four": (dict(num_chips=4, pp=4, schedule="zbv", model=tiny("llama", num_hidden_layers=8)), 0),
    "last of four": (dict(num_chips=4, pp=4, schedule="zbv", model=tiny("llama", num_hidden_layers=8)), 3),
    "pairs": (dict(num_chips=2, pp=2, schedule="dualpipev", model=tiny("llama")), 1),
    "zero 3": (dict(num_chips=4, pp=2, dp_shard=2, zero=3, schedule="zbv", model=tiny("llama")), 2),
    "a shared table": (dict(num_chips=2, pp=2, schedule="zbv", model=tiny("qwen3")), 0),
    "a shared table, pairs": (dict(num_chips=2, pp=2, schedule="dualpipev", model=tiny("gpt2")), 0),
    "a shared table, zero 1, tensor": (dict(num_chips=8, pp=2, dp_shard=2, tp=2, zero=1, schedule="zbv", model=tiny("qwen3")), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_V)
def test_ranks_with_two_stages_in_a_v(counting, name):
    knobs, rank = IN_A_V[name]
    plan = tiny_plan(**knobs)
    rows = audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)
    assert [row for row in rows if row.difference and not row.tolerance] == []
    memory = {row.name: row for row in audit_rows(predicted(grown(plan), rank), counting.count(grown(plan), rank).counts)}
    assert memory["saved activations"].passes(SAVED), memory["saved activations"]
    assert memory["peak"].passes(0.06), memory["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_BUBBLE)
def test_ranks_that_postpone_gradients_of_weights(counting, name):
    knobs, rank = ZERO_BUBBLE[name]
    plan = tiny_plan(schedule="zero-bubble", **knobs)
    rows = audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)
    assert [row for row in rows if row.difference and not row.tolerance] == []
    memory = {row.name: row for row in audit_rows(predicted(grown(plan), rank), counting.count(grown(plan), rank).counts)}
    assert memory["saved activations"].passes(SAVED), memory["saved activations"]
    assert memory["peak"].passes(0.06), memory["peak"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, rank",
    [
        pytest.param(UNEVEN, 0, marks=NIGHTLY),
        (UNEVEN, 1),
        pytest.param(CHUNKS["gpt2"], 1, marks=NIGHTLY),
        pytest.param(CHUNKS["qwen3"], 0, marks=NIGHTLY),
        (CHUNKS["gpt2, two sequences"], 1),
    ],
)
def test_any_rank_of_uneven_chunks_and_of_chunks_of_a_sequence(counting, plan, rank):
    """Virtual stages of unlike layers; ranks whose scores have fewer columns than those of the last."""
    rows = audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)
    assert [row for row in rows if row.difference and not row.tolerance] == []
    memory = {row.name: row for row in audit_rows(predicted(grown(plan), rank), counting.count(grown(plan), rank).counts)}
    assert memory["saved activations"].passes(SAVED), memory["saved activations"]
    assert memory["peak"].passes(PEAK), memory["peak"]


#: Peaks outside a backward pass that holds only its own tensors and activations, or with tensors of torch that nothing needs, and the
#: share by which they may differ.
MOMENTS = {
    "scores with what is added to them, computed again, beside their probabilities": (
        dict(num_chips=4, pp=2, zero=2, attention="unfused", recompute="full"),
        dict(
            model=tiny("bloom", num_hidden_layers=2, vocab_size=5, hidden_size=16, intermediate_size=8, num_key_value_heads=8),
        ),
        0.02,
    ),
    "the gradient of logits of which the last columns are padding": (
        dict(num_chips=16, pp=2, tp=4, zero=3, recompute="full"),
        dict(model=tiny(num_hidden_layers=2, hidden_size=16), batch=4, seq_len=64),
        0.04,
    ),
    "the gradient of a squared relu": (
        dict(num_chips=2, schedule="gpipe", pp=2),
        dict(
            model=tiny(
                "gpt2",
                num_hidden_layers=2,
                vocab_size=5,
                intermediate_size=96,
                activation="relu2",
                hidden_size=16,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        ),
        0.03,
    ),
    "gradients of two layers wait while the third runs backward for the first time": (
        dict(num_chips=4, pp=2, schedule="gpipe", zero=3, stage_layers=(1, 3), recompute="full", attention="unfused"),
        dict(precision=Precision.BF16),
        0.04,
    ),
    "weights of the last layer lie in their buffer and as a copy, those of the one before in their buffer": (
        dict(num_chips=4, zero=2, cp=4),
        dict(batch=1, model=tiny(num_hidden_layers=3, vocab_size=16)),
        0.01,
    ),
    "weights of the last layer lie in their buffer and as a copy while it runs forward": (
        dict(num_chips=8, zero=2, cp=2, micro_batch=2),
        dict(
            precision=Precision.BF16_MIXED,
            model=tiny("neox", num_hidden_layers=2, vocab_size=5, intermediate_size=24, tie_word_embeddings=True),
        ),
        0.01,
    ),
    "weights of a layer and their buffer, where the layer before the last is the first": (
        dict(num_chips=16, zero=3, tp=4, cp=2),
        dict(
            model=tiny(num_hidden_layers=2, vocab_size=5, tie_word_embeddings=True),
            batch=2,
            optimizer=Optimizer.SGD,
            precision=Precision.BF16_MIXED,
        ),
        0.02,
    ),
    "a layer's own gradients, while it runs backward for the first time": (
        dict(num_chips=32, pp=4, cp=4, zero=2, schedule="gpipe", recompute="selective"),
        dict(model=tiny("falcon", vocab_size=5, hidden_size=16, intermediate_size=56), optimizer=Optimizer.SGD),
        0.03,
    ),
    "gradients of the keys that the first rank of a sequence looks at, not of all": (
        dict(num_chips=4, cp=4, recompute="full", micro_batch=2),
        dict(model=tiny("gpt2", num_hidden_layers=2, vocab_size=5, intermediate_size=24), seq_len=64),
        0.02,
    ),
    "copies of a part of the keys beside all of them, which a function that is recomputed is given": (
        dict(num_chips=4, cp=4, recompute="selective", micro_batch=2, attention="unfused"),
        dict(model=tiny("gpt2", num_hidden_layers=2, vocab_size=5, intermediate_size=24), seq_len=64),
        0.03,
    ),
    "the sum over tp of a position table's gradient, beside the gradients of the unit": (
        dict(num_chips=16, tp=2, cp=4, zero=3, recompute="full", attention="unfused"),
        dict(
            model=tiny(
                "gpt2",
                num_hidden_layers=3,
                vocab_size=64,
                hidden_size=24,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=2,
                intermediate_size=8,
                tie_word_embeddings=False,
            )
        ),
        0.01,
    ),
    "partial sums of branches side by side wait whole for each other": (
        dict(num_chips=8, tp=4, zero=2),
        dict(batch=2, model=tiny("neox", num_hidden_layers=2, vocab_size=5)),
        0.03,
    ),
    "the head's gradient waits while its virtual stage runs backward for the second time": (
        dict(num_chips=4, pp=2, zero=3, schedule="interleaved", virtual_stages=2),
        dict(batch=4, model=tiny(hidden_size=16, intermediate_size=8, num_attention_heads=4)),
        0.01,
    ),
    "the gradient that a stage without layers is sent lies in its buffer": (
        dict(num_chips=4, pp=2, zero=1, stage_layers=(0, 4)),
        dict(batch=24, model=tiny(vocab_size=5)),
        0.01,
    ),
    "the gradient of a table that is cut is masked in a copy": (
        dict(num_chips=4, tp=2, pp=2, sequence_parallel=False),
        dict(batch=2, model=tiny(num_hidden_layers=2, hidden_size=40, intermediate_size=8, num_attention_heads=4)),
        0.01,
    ),
    "a layer that runs again once its gradient is gathered, with keys and queries beside their copies": (
        dict(num_chips=16, tp=4, cp=4, recompute="full", attention="unfused", micro_batch=2),
        dict(
            batch=4, seq_len=64, model=tiny(num_hidden_layers=2, vocab_size=5, hidden_size=16, num_key_value_heads=8, intermediate_size=24)
        ),
        0.01,
    ),
    "attention that runs again copies what it was handed": (
        dict(num_chips=2, recompute="selective", attention="unfused", micro_batch=2),
        dict(batch=4, model=tiny("gpt2", num_hidden_layers=2, vocab_size=5)),
        0.01,
    ),
    "what attention that runs again was handed lives for all of it": (
        dict(num_chips=8, tp=2, cp=4, recompute="selective", attention="unfused", micro_batch=2),
        dict(
            batch=2,
            seq_len=64,
            model=tiny(
                num_hidden_layers=2, vocab_size=5, hidden_size=24, num_attention_heads=16, num_key_value_heads=8, intermediate_size=8
            ),
        ),
        0.01,
    ),
    "what attention handed out has gone when it runs again": (
        dict(num_chips=2, recompute="selective", micro_batch=2),
        dict(batch=4, model=tiny(num_hidden_layers=2, vocab_size=5, hidden_size=16, intermediate_size=8)),
        0.01,
    ),
    "of branches side by side both norms run first": (
        dict(num_chips=2, recompute="full", micro_batch=2),
        dict(batch=4, model=tiny("neox", num_hidden_layers=2, vocab_size=5, hidden_size=40, intermediate_size=8)),
        0.01,
    ),
    "the gradient that a stage without layers is sent is read by a norm from its buffer": (
        dict(num_chips=4, pp=2, zero=3, stage_layers=(0, 4)),
        dict(batch=4, seq_len=64, model=tiny("bloom", vocab_size=64, hidden_size=16)),
        0.01,
    ),
    "copies of keys for each query head, which nothing keeps, are not of all keys that were gathered": (
        dict(num_chips=16, tp=2, cp=4, zero=2, recompute="full", attention="unfused", micro_batch=2),
        dict(
            batch=4,
            model=tiny(
                num_hidden_layers=2, vocab_size=5, hidden_size=40, num_attention_heads=24, num_key_value_heads=8, intermediate_size=56
            ),
        ),
        0.02,
    ),
}


#: Of these plans a rank that is not the last.
OTHER_RANKS = {
    "a layer's own gradients, while it runs backward for the first time": 17,
    "gradients of the keys that the first rank of a sequence looks at, not of all": 0,
    "copies of a part of the keys beside all of them, which a function that is recomputed is given": 2,
    "the gradient that a stage without layers is sent lies in its buffer": 0,
    "the gradient that a stage without layers is sent is read by a norm from its buffer": 0,
    "the gradient of a table that is cut is masked in a copy": 0,
    "copies of keys for each query head, which nothing keeps, are not of all keys that were gathered": 1,
    "a layer that runs again once its gradient is gathered, with keys and queries beside their copies": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", one_in(3, MOMENTS))
def test_peaks_of_gradients_that_wait_and_of_weights_that_come(counting, moment):
    knobs, job, share = MOMENTS[moment]
    plan = grown(tiny_plan(**knobs, **job))
    rank = OTHER_RANKS.get(moment, plan.num_chips - 1)
    rows = audit_rows(predicted(plan, rank), counting.count(plan, rank).counts)
    peak = next(row for row in rows if row.name == "peak")
    assert peak.passes(share), peak


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=2)
@given(stage=st.sampled_from([0, 1, -1]), plan=plans())
def test_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@settings(max_examples=20)
@given(stage=st.sampled_from([0, 1, -1]), plan=plans())
def test_further_random_plans_audit_clean(counting, plan, stage):
    check(counting, plan, stage)
