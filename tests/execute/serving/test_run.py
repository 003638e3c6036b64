"""Steps of a served model on this machine: right logits on one rank and on two, what torch counts, times with their spread."""

import pytest

from perfmodel.execute.serving.run import LOGIT_TOLERANCE, run_serving
from perfmodel.foundation.errors import InputError, RunError
from perfmodel.parallel.results import StepShape
from tests.execute.jobs import tiny
from tests.marks import mostly_nightly

DECODE, PREFILL, CHUNK = (
    StepShape(sequences=4, cached=40, new=1),
    StepShape(sequences=1, cached=0, new=32),
    StepShape(sequences=2, cached=20, new=12),
)


OVER_TWO = ["llama", "hybrid", "qwen3-next", "nemotron", "mixtral", "deepseek", "shared experts", "gpt2", "falcon", "bloom", "gemma2"]


#: In `make test`: grouped heads, states, experts, latents, fused projections and windows; test_decoder.py has each on one rank.
KEPT = {"llama", "hybrid", "qwen3-next", "deepseek", "gpt2", "gemma2"}


@pytest.mark.parametrize("variant", mostly_nightly(OVER_TWO, KEPT))
@pytest.mark.slow
def test_two_ranks_have_the_logits_of_the_uncached_pass(variant, groups):
    measured = run_serving(tiny(variant), [DECODE], tp=2, group=groups(2), rounds=1, repeats=1)
    assert measured.logit_error < LOGIT_TOLERANCE
    counts = measured.steps[0].counts
    assert {(record.kind, record.axis) for record in counts.collectives} == {("all_reduce", "tp"), ("all_gather", "tp")}


@pytest.mark.slow
def test_counts_are_those_of_the_formulas(groups):
    config = tiny("llama")  # 4 layers of 64, 8 heads and 4 key-value heads of 8, feed-forward 96, 131 tokens
    measured = run_serving(config, [DECODE, PREFILL, CHUNK], tp=1, group=groups(1), rounds=2, repeats=3)
    assert measured.logit_error < LOGIT_TOLERANCE
    layers = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    embedding, norms = 131 * 64, 64 * 9
    for step in measured.steps:
        shape, counts = step.shape, step.counts
        seen = shape.cached + shape.new
        assert counts.flops == 2 * shape.rows * layers + 2 * shape.sequences * embedding + 4 * (4 * shape.rows * 64 * seen)
        assert counts.parameter_bytes == 4 * (layers + embedding + norms + 64 * shape.rows)  # of the table the rows that are looked up
        assert counts.cache_bytes == 4 * 4 * 2 * 32 * shape.sequences * seen
        assert counts.written_bytes == 4 * 4 * 2 * 32 * shape.rows
        assert counts.held_bytes == 4 * config.num_parameters
        assert counts.held_bytes + counts.held_cache_bytes < counts.peak_memory < 2 * (counts.held_bytes + counts.held_cache_bytes)
        assert not counts.collectives
        assert len(step.times) == 6
        assert min(step.times) <= step.time <= max(step.times)
        assert 0 <= step.spread <= max(step.times) - min(step.times)


@pytest.mark.slow
def test_wrong_logits_end_the_run(groups, monkeypatch):
    monkeypatch.setattr("perfmodel.execute.serving.run.LOGIT_TOLERANCE", 0.0)
    with pytest.raises(RunError, match="differ from the uncached forward pass"):
        run_serving(tiny(), [DECODE], tp=1, group=groups(1), rounds=1, repeats=1)


@pytest.mark.parametrize(
    "model, change, words",
    [
        ("llama", dict(tp=3), "must divide num_attention_heads=8"),
        ("llama", dict(shapes=[]), "none are given"),
        ("llama", dict(shapes=[StepShape(sequences=1, cached=64, new=1)]), "has positions for 64 tokens"),
        ("llama", dict(rounds=0), "must be at least 1"),
        ("olmo2", dict(tp=2), "a norm over all heads"),
        ("hybrid", dict(tp=8), "must divide num_key_value_heads=4"),
        ("hybrid", dict(tp=3), "must divide num_attention_heads=8"),
    ],
)
def test_what_cannot_run_is_refused(model, change, words):
    with pytest.raises(InputError, match=words):
        run_serving(tiny(model), **(dict(shapes=[DECODE]) | change))


def test_a_step_has_new_tokens_of_some_sequences():
    with pytest.raises(InputError, match="new=0: must be at least 1"):
        StepShape(sequences=1, cached=4, new=0)


@pytest.mark.slow
def test_the_script_for_gpus_makes_its_records(monkeypatch):
    """On a CPU, with one small case."""
    from lab import gpu_checks
    from perfmodel.execute.launch.launch import WorkerGroup

    monkeypatch.setattr(gpu_checks, "WorkerGroup", lambda ranks, *, device, hang_timeout: WorkerGroup(ranks, hang_timeout=hang_timeout))
    case = gpu_checks.ServingCase(model="gpt2", layers=2, shapes=(DECODE, PREFILL))
    done, late = gpu_checks.run_serving_cases((case, case), rounds=1, time_limit=0.5)
    assert late["error"].startswith("skipped")
    steps = done["measurement"]["steps"]
    assert [(step["sequences"], step["cached"], step["new"]) for step in steps] == [(4, 40, 1), (1, 0, 32)]
    assert all(step["times"] and step["flops"] and step["parameter_bytes"] for step in steps)
