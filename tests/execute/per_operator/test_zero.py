"""ZeRO, microbatches and pipelines around per-operator plans compute what one process does and send what their traffic says."""

from dataclasses import replace
from functools import partial

import pytest

from perfmodel.execute.per_operator.options import NetworkOptions
from perfmodel.execute.per_operator.run import check_network_plan, measure_network_plans
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.per_operator.parameters import parameter_units, step_traffic
from perfmodel.parallel.per_operator.stages import blocks_of
from tests.execute.per_operator import toys as toys
from tests.execute.per_operator.plans import FOUR, TWO, random_plan, tiny_network
from tests.marks import mostly_nightly
from tests.network_plans import changed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def in_stages(network, axes, number, **settings):
    """Return a random plan, split into stages of about equal numbers of blocks."""
    blocks = blocks_of(network)
    starts = [network.operators[blocks[i * len(blocks) // number][0]].name for i in range(number)]
    return changed(random_plan(network, axes, 4), stages=tuple(starts), **settings)


EVERY_STAGE = [(name, zero) for name in ("gpt2", "alexnet", "transformer") for zero in range(4)]


@pytest.mark.parametrize("name, zero", mostly_nightly(EVERY_STAGE, [*EVERY_STAGE[:4], ("alexnet", 2)]))
def test_microbatches_and_zero_equal_one_process(name, zero, groups):
    """gpt2's embedding is read by two layers; every layer has gradients that are partial on several groups of axes."""
    network = tiny_network(name)
    plan = changed(random_plan(network, FOUR, 1 + zero), zero=zero, num_microbatches=2)
    assert len({unit.axes for unit in parameter_units(network, plan)}) > 2
    result = check_network_plan(network, plan, NetworkOptions(compares_outputs=True, steps=2), group=groups(4))
    assert max(result.gradient_error, result.output_error, result.loss_error) < 1e-9


@pytest.mark.parametrize(
    "zero, expected",
    [
        (0, {"all_reduce": 1}),
        (1, {"reduce_scatter": 1, "all_gather": 1}),
        (2, {"reduce_scatter": 3, "all_gather": 1}),
        (3, {"reduce_scatter": 3, "all_gather": 6}),
    ],
)
def test_what_parameters_send_by_hand(zero, expected, groups):
    """One layer, its batch over two ranks, three microbatches."""
    network = toys.two_layers(classes=8)
    data = toys.plan_of(network, TWO, {operator.name: {"b": ("p",)} for operator in network.operators})
    result = check_network_plan(network, changed(data, zero=zero, num_microbatches=3), group=groups(2))
    counts = {}
    for row in result.traffic:
        assert row.num_elements == 128.0
        counts[str(row.kind)] = counts.get(str(row.kind), 0) + row.repeats
    assert counts == expected


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("zero", [1, 3])
def test_shards_are_updated_as_in_one_process(zero, optimizer, groups):
    network = tiny_network("alexnet")
    plan = changed(random_plan(network, TWO, 0), zero=zero)
    result = check_network_plan(network, plan, NetworkOptions(steps=4, optimizer=optimizer, learning_rate=0.01), group=groups(2))
    assert result.loss_error < 1e-9


@pytest.mark.parametrize(
    "name, axes, number, settings",
    [
        ("alexnet", TWO, 2, dict(num_microbatches=4)),
        ("llama-3-8b", TWO, 2, dict(num_microbatches=3, zero=2)),
        ("vit-large", TWO, 2, dict(num_microbatches=2, zero=3)),
        ("rnnlm", (), 4, dict(num_microbatches=4, zero=1)),
        ("alexnet", (), 4, dict(num_microbatches=2)),  # fewer than stages
    ],
)
def test_stages_equal_one_process(name, axes, number, settings, groups):
    network = tiny_network(name)
    result = check_network_plan(network, in_stages(network, axes, number, **settings), NetworkOptions(steps=2), group=groups(4))
    assert max(result.gradient_error, result.loss_error) < 1e-9


@pytest.mark.parametrize("zero", [1, 3])
def test_a_stage_may_have_no_parameters(zero, groups):
    network = toys.two_layers(classes=8)
    ends = (network.operators[0].name, network.operators[-1].name)
    plan = changed(toys.plan_of(network, TWO, {"up": {"b": ("p",)}}), stages=ends, num_microbatches=2, zero=zero)
    assert check_network_plan(network, plan, NetworkOptions(steps=2), group=groups(4)).gradient_error < 1e-9


def test_a_stage_issues_its_own_part_of_the_traffic():
    network = tiny_network("llama-3-8b")
    plan = in_stages(network, TWO, 2, num_microbatches=4)
    unstaged = sum(row.repeats for row in step_traffic(network, changed(plan, stages=())))
    assert unstaged == sum(row.repeats for stage in (0, 1) for row in step_traffic(network, plan, stage))


def test_plans_with_zero_and_stages_are_measured(groups):
    """The optimizer's state is part of the peak; every rank of every stage has one."""
    network = toys.two_layers(batch=4, features=64, hidden=64, classes=64)
    data = toys.plan_of(network, TWO, {operator.name: {"b": ("p",)} for operator in network.operators})
    plans = [data, changed(data, zero=3), changed(data, zero=1, num_microbatches=2)]
    measurements = measure_network_plans(network, plans, steps=2, group=groups(2))
    assert measurements[0].loss == pytest.approx(measurements[1].loss, rel=1e-5)
    # weights, gradients and two states of 8,192 parameters in float32
    assert measurements[0].peak_memory > 4 * 4 * 8192
    (staged,) = measure_network_plans(network, [in_stages(network, TWO, 2, num_microbatches=2)], steps=2, group=groups(4))
    assert len(staged.memory_by_rank) == staged.num_ranks == 4
    assert staged.parts["communication.pp"] > 0
    assert staged.loss == pytest.approx(measurements[2].loss, rel=1e-5)


def test_a_saved_plan_is_run_and_predicted_as_it_says(groups, monkeypatch, tmp_path):
    """Two stages of two chips, two microbatches, ZeRO 3 and AdamW; made for another cluster, with tiers that this machine lacks."""
    from perfmodel.execute.per_operator import run as network_run
    from perfmodel.parallel.plan_file import write_plan
    from perfmodel.verbs.networks import predict_network_plan, run_network_plan, shard_pipeline

    sizes = dict(seq_len=3, embedding=8, hidden=8, layers=2, vocabulary=10)
    job = dict(global_batch=8, cluster="dgx-h100", chips=4, stages=[2], microbatches=[2], zero=3, profile="megatron")
    best = shard_pipeline("rnnlm", **job, sizes=sizes).best
    write_plan(best.plan, tmp_path / "plan.yaml")
    monkeypatch.setattr(network_run, "measure_network_plans", partial(measure_network_plans, group=groups(4)))
    comparison = run_network_plan(tmp_path / "plan.yaml", steps=2, device="cpu", calibration="spec-sheet")
    assert comparison.measurements[0].num_ranks == 4
    assert {str(row.kind) for row in comparison.measurements[0].traffic} >= {"reduce_scatter", "all_gather"}
    prediction = predict_network_plan(best.plan, cluster="localhost", precision="fp32", profile="torch-gloo", calibration="spec-sheet")
    assert comparison.predictions[0].step_time == prediction.step_time
    assert comparison.predictions[0].plan.cuts.stages == best.plan.cuts.stages


def test_what_cannot_be_run_is_refused(groups):
    network = toys.two_layers()
    plan = toys.plan_of(network, TWO, {})
    for changes, says in [
        (dict(stages=("up", "nowhere")), "stages=nowhere: no stage can begin there"),
        (dict(stages=("act", "down")), "stages=act, down: must begin with the first operator"),
    ]:
        with pytest.raises(InputError, match=says):
            check_network_plan(network, changed(plan, **changes), group=groups(2))
    with pytest.raises(InputError, match="zero=4: must be a whole number of 3 at most"):
        changed(plan, zero=4)
    with pytest.raises(InputError, match="micro_batch=4: must divide global_batch=6"):
        replace(plan, job=replace(plan.job, global_batch=6))
    with pytest.raises(InputError, match="compares_outputs=yes: is for plans of one stage"):
        check_network_plan(network, changed(plan, stages=("up", "down")), NetworkOptions(compares_outputs=True), group=groups(4))
