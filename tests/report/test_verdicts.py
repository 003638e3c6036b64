"""The first line of a comparison and of a network's plan."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.foundation.memory_headroom import Verdict
from perfmodel.report.predictions import comparison_verdict, short_verdict

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=128, seq_len=8192, profile="megatron", zero=1)


@pytest.fixture(scope="module")
def predictions():
    return perfmodel.predict(**JOB, tp=[2, 4, 8])


def test_the_fastest_plan_that_fits_is_named(predictions):
    names = ["two", "four", "eight"]
    ratio = predictions[0].tokens_per_second_per_chip / predictions[1].tokens_per_second_per_chip
    verdict = comparison_verdict(names, predictions)
    assert verdict.startswith(f"two is the fastest: {predictions[0].tokens_per_second_per_chip:,.0f} tokens/s a chip, ")
    assert verdict.endswith(f"{100 * (ratio - 1):.1f} % more than four")


def test_a_plan_that_does_not_fit_is_not_the_fastest(predictions):
    too_large = [replace(predictions[0], verdict=Verdict.DOES_NOT_FIT), *predictions[1:]]
    assert comparison_verdict(["two", "four", "eight"], too_large).startswith("four is the fastest that fits: ")
    none = [replace(prediction, verdict=Verdict.DOES_NOT_FIT) for prediction in predictions]
    assert comparison_verdict(["two", "four", "eight"], none) == "None of the plans fits"


def test_plans_of_different_jobs_are_named_as_such(predictions):
    other = perfmodel.predict(**JOB | {"seq_len": 4096}, tp=8)
    assert comparison_verdict(["a", "b"], [predictions[0], other]).endswith("; the plans run different jobs")


def test_a_plan_of_a_network_says_first_whether_it_fits(predictions):
    assert short_verdict(predictions[0]).startswith("fits: ")
    assert short_verdict(predictions[0]).endswith(" a step")
