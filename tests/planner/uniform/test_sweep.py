"""What makes a sweep quick changes nothing that it finds."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.planner.uniform import sweep as uniform_sweep
from perfmodel.planner.uniform import tables
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import sweep
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.training import training_of
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model

DENSE = make_job(make_model(num_hidden_layers=2), batch=8)
JOBS = {
    "experts": make_job(make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=Experts(num_experts=8, top_k=4, width=256))),
    "a frozen base": replace(DENSE, train=training_of("qlora:4")),
}


def found(job, **changes):
    """Counts, and the best by each criterion, to the bit."""
    state = sweep(estimator_of(job), Space(), top=1, **changes)
    kept = (state.best_time, state.best_memory, state.least)
    best = [(each.values.tolist(), each.ids.tolist(), each.beside.tolist()) for each in kept]
    front = [x.tolist() for x in (state.front.first, state.front.second, state.front.ids)]
    return (state.num_evaluated, state.num_feasible, state.num_static, state.num_tight), best, front


@pytest.mark.parametrize("job", JOBS)
def test_tables_are_the_same_in_pieces(job, monkeypatch):
    whole = found(JOBS[job])
    monkeypatch.setattr(tables, "TABLE_COLUMNS", 50)
    assert found(JOBS[job]) == whole


def test_what_need_not_be_timed_would_not_be_kept(monkeypatch):
    model = make_model(**LLAMA_LIKE | {"hidden_size": 1024, "intermediate_size": 4096}, num_hidden_layers=4)
    job = make_job(model, batch=64, seq_len=4096)
    skipped = []

    def counting(state, least_times, memory):
        skipped.append(len(memory) - len(worth_timing(state, least_times, memory)))
        return np.arange(len(memory))

    worth_timing = uniform_sweep._worth_timing
    pruned = found(job)
    monkeypatch.setattr(uniform_sweep, "_worth_timing", counting)
    assert found(job) == pruned
    assert sum(skipped) > 0
