"""Stages of pipelines whose layers are not alike."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from perfmodel import predict
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.layout import even_stage_layers
from perfmodel.parallel.stage_cuts import _balanced_stages, _costs_by_length, _eighth_power, default_stage_layers
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.models import load_model
from perfmodel.workload.transformer import graph_length


def job_of(name, precision=Precision.BF16_MIXED):
    return TrainingJob(model=load_model(name), global_batch=64, seq_len=4096, precision=precision)


@pytest.mark.parametrize("stages", [(16, 1), (8, 1), (4, 3)])
def test_like_layers_are_cut_as_evenly_as_they_go(stages):
    for name in ("llama-3-8b", "qwen3-235b-a22b"):
        job = job_of(name)
        assert default_stage_layers(job, *stages) == even_stage_layers(job.model.num_hidden_layers, stages[0] * stages[1])


def test_deepseek_v3_is_cut_as_published():
    """In 16 stages as DualPipe evens them out: the first has three dense layers among its five, the last the module that predicts a second
    token and both heads (arXiv 2412.19437). In 32 the last has no layer but the head (Megatron-Core's report, arXiv 2603.07685, whose
    rank before has that module alone: here such a stage would have nothing to run, and has a layer)."""
    job = job_of("deepseek-v3", Precision.FP8_BLOCK)
    assert default_stage_layers(job, 16, 1) == (5, *(4,) * 14, 0)
    first, *inner, last = default_stage_layers(job, 16, 2)
    assert (first, last) == (2, 0)
    assert sorted(inner) == [1, *(2,) * 29]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "llama-4-maverick", "qwen3-next-80b-a3b", "nemotron-h-8b"])
@pytest.mark.parametrize("stages", [(2, 1), (8, 1), (4, 4), (16, 2)])
def test_no_rank_takes_longer_than_with_equal_numbers_of_layers(name, stages):
    job, (ranks, virtual) = job_of(name), stages
    by_length = _costs_by_length(job.model, graph_length(job.model, job.seq_len), job.precision)
    costs = {region: sum(cost.at(job.seq_len) for cost in by_region) for region, by_region in by_length.items()}
    mean = sum(costs[kind.name] * kind.count for kind in job.model.layer_kinds) / job.model.num_hidden_layers

    def slowest(layers):
        taken = np.array(layers).reshape(virtual, ranks).sum(axis=0) * mean
        return taken.max() if taken[-1] + costs["head"] < taken.max() else taken[-1] + costs["head"]

    layers = default_stage_layers(job, ranks, virtual)
    assert sum(layers) == job.model.num_hidden_layers
    assert slowest(layers) <= 1.15 * slowest(even_stage_layers(job.model.num_hidden_layers, ranks * virtual))


def test_stages_are_the_best_of_all_cuts():
    """The result is the best of all ways to split eight layers of three kinds over four stages."""
    until = np.cumsum([0.0, 0.5, 0.5, 1.0, 1.3, 1.0, 1.3, 1.0, 1.3])
    extra = np.array([0.1, 0.0, 0.0, 1.7])

    def total(layers):
        return float(_eighth_power(np.diff(until[np.cumsum([0, *layers])]) + extra).sum())

    cuts = [np.diff([0, *inner, 8]) for inner in combinations(range(9), 3)]
    assert total(_balanced_stages(until, extra, 1)) == pytest.approx(min(map(total, cuts)))


@pytest.mark.parametrize(("num_ranks", "virtual_stages"), [(2, 2), (2, 4), (4, 2), (8, 1), (16, 4), (8, 7)])
def test_every_inner_stage_has_a_layer(num_ranks, virtual_stages):
    """However heavy the head is: a stage without weights has nothing to run."""
    small = replace(load_model("deepseek-v3"), vocab_size=2_000_000)
    for model in (small, load_model("glm-4.5"), load_model("qwen3-next-80b-a3b")):
        if num_ranks * virtual_stages <= model.num_hidden_layers + 2:
            job = TrainingJob(model=model, global_batch=64, seq_len=4096)
            layers = default_stage_layers(job, num_ranks, virtual_stages)
            assert all(layers[1:-1])
            assert sum(layers) == model.num_hidden_layers


def test_stages_do_not_move_with_the_length_of_usual_sequences():
    """Twice the tokens took 2 % less: a layer moved, and its optimizer states with it."""
    job = dict(model="deepseek-v2-lite", cluster="mi300x", chips=64, global_batch=64, pp=4, profile="nanotron")
    predictions = [predict(**job, seq_len=length) for length in (512, 1024, 2048, 4096)]
    assert len({prediction.plan.stage_layers for prediction in predictions}) == 1
    times = [prediction.step_time for prediction in predictions]
    assert times == sorted(times)
    assert len({prediction.parts["optimizer"] for prediction in predictions}) == 1


def test_virtual_stages_without_a_pipeline_are_refused_for_layers_that_are_not_alike():
    with pytest.raises(InputError, match="schedule=interleaved: needs pp"):
        predict(model="deepseek-v2-lite", cluster="dgx-h100", chips=8, global_batch=64, seq_len=2048, virtual_stages=2)
