"""Labels of runs: what errors are counted under, and which runs differ in their plan only."""

import json

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.validation.case_plan import plan_of_case
from perfmodel.validation.cases import parse_case
from perfmodel.validation.run_labels import FIELDS, check_fields, labels_of, plan_group, plan_of
from tests.validation.published_cases import CASE, MODEL, changed


def case(**values):
    return parse_case(json.dumps(changed(**values)), 1)


def labels(**values):
    run = case(**values)
    return labels_of(run, plan_of_case(run.inputs))


def test_a_run_has_a_label_in_every_field():
    run_labels = labels()
    assert {field: getattr(run_labels, field) for field in FIELDS} == {
        "source": "some",
        "chip": "h100-sxm-80gb",
        "framework": "nanotron v0.5",
        "model": "Llama-3-8B",
        "size": "1-10 B",
        "chips": "9-64 chips",
        "form": "tp+pp+zero",
        "tier": "primary",
        "precision": "bf16",
        "profile": "nanotron",
        "experts": "dense",
        "dispatcher": "?",
    }
    assert run_labels.num_chips == 64
    assert run_labels.parameters == pytest.approx(8.03e9, rel=0.01)


def test_a_run_that_is_faster_than_its_chips_multiply_is_marked():
    flops = 6 * labels().parameters * CASE["global_batch"] * CASE["sequence_length"]
    seconds = flops / (64 * 989e12)
    shares = [labels(measured={"step_time_s": seconds * factor}).peak_share for factor in (0.8, 2.0)]
    assert shares == pytest.approx([1.25, 0.5], rel=0.1)  # a table of 128,256 tokens is looked up


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (dict(), "tp+pp+zero"),
        (dict(zero_stage=0), "tp+pp+dp"),
        (dict(tp=1, pp=1, dp=64, zero_stage=3), "fsdp"),
        (dict(tp=1, pp=1, dp=1, num_chips=1, zero_stage=0), "one chip"),
        (dict(tp=8, pp=1, dp=1, num_chips=8), "tp"),
        (dict(tp=4, cp=2, pp=1, dp=8, zero_stage=0), "tp+cp+dp"),
    ],
)
def test_the_form_names_the_axes_that_cut(values, form):
    assert labels(**values).form == form


@pytest.mark.parametrize(
    ("chips", "name"),
    [(1, "1 chip"), (2, "2-8 chips"), (8, "2-8 chips"), (16, "9-64 chips"), (512, "65-512 chips"), (1024, "over 512 chips")],
)
def test_chips_fall_into_classes(chips, name):
    assert labels(tp=1, pp=1, dp=chips, num_chips=chips, global_batch=1024).chips == name


@pytest.mark.parametrize("values", [{"id": "x"}, {"id": "x", "model": 7, "chip": ["a"], "num_chips": -3, "framework": None}])
def test_a_run_that_says_nothing_has_unknown_labels(values):
    unknown = labels_of(parse_case(json.dumps(values), 1), None)
    assert {getattr(unknown, field) for field in FIELDS} == {"x", "?"}


def plan(**values):
    run = case(**values)
    return plan_of(run, plan_of_case(run.inputs))


@pytest.mark.parametrize(
    "values",
    [
        dict(tp=8, dp=4),
        dict(pp=4, dp=4),
        dict(cp=2, dp=4),
        dict(micro_batch=2),
        dict(zero_stage=0),
        dict(recompute="full"),
        dict(virtual_stages=2),
        dict(settings={"fp32_gradient_accumulation": True, "tp_mode": "ALL_REDUCE"}),
    ],
)
def test_runs_of_a_group_differ_in_their_plan(values):
    assert plan_group(case(**values)) == plan_group(case())
    assert plan(**values) != plan()


@pytest.mark.parametrize("values", [dict(cp=1), dict(ep=None), dict(virtual_stages=1), dict(distributed_optimizer=None)])
def test_what_is_left_out_is_the_same_plan(values):
    assert plan_group(case(**values)) == plan_group(case())
    assert plan(**values) == plan()


@pytest.mark.parametrize(
    "values",
    [
        dict(id="other-run"),
        dict(model={**MODEL, "num_hidden_layers": 16}),
        dict(chip="a100-sxm-80gb"),
        dict(num_chips=128),
        dict(global_batch=256),
        dict(sequence_length=8192),
        dict(precision="fp8"),
        dict(framework="nanotron v0.6"),
        dict(settings={"compile": True}),
    ],
)
def test_runs_of_two_groups_differ_in_more(values):
    assert plan_group(case(**values)) != plan_group(case())


@pytest.mark.parametrize(
    "values", [dict(id="some-other"), dict(notes="x"), dict(measured=None), dict(tier="secondary"), dict(source_ref="table 9")]
)
def test_ids_notes_and_measurements_are_no_part_of_a_plan(values):
    assert (plan_group(case(**values)), plan(**values)) == (plan_group(case()), plan())


def test_fields_are_checked():
    assert check_fields(["chip", " source", "chip", ""], FIELDS) == ("chip", "source")
    with pytest.raises(InputError, match=r"by=chp: not known.*chip.*use any of source"):
        check_fields(["source", "chp"], FIELDS)
    with pytest.raises(InputError, match="by: names no field"):
        check_fields([""], FIELDS)


@pytest.mark.parametrize(
    ("notes", "rate"),
    [
        ("Measured NCCL GB/s AR/AG/RS=18.1/30.2/29.8 (intra 45.18/40.2/40.9). mem_gb = 1", 45.18e9),
        ("AR/AG/RS=425.34/241.26/241.67 (intra 423.7/241.59/240.63)", 423.7e9),
        ("inter 45/40", None),
        (None, None),
        (7, None),
    ],
)
def test_the_noted_all_reduce_is_read_from_the_notes(notes, rate):
    rate_read = case(notes=notes).noted_all_reduce
    assert rate_read == pytest.approx(rate) if rate else rate_read != rate_read
