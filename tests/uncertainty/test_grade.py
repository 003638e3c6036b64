"""A grade says how far a prediction is from what predictions were held against."""

from dataclasses import replace

import pytest

from perfmodel.frameworks.fitted import FittedTo
from perfmodel.uncertainty.grade import Grade, trust_in
from perfmodel.uncertainty.residuals import ModelResiduals, Residuals, shape_of
from perfmodel.workload.models import load_model

MODEL = load_model("llama-3-8b")
SEEN = ModelResiduals(family="f", model="llama 40x5120 40/8 13824", chip="c", scale="one node", num_runs=7, quantiles=(0.0,))
RESIDUALS = Residuals(source="s", date="d", num_runs=7, between_models=0.0, between_chips=0.0, between_calibrations=0.0, models=(SEEN,))


def trust(**values):
    given = {"family": "f", "chip": "c", "model": MODEL, "is_calibrated": True, "fitted": FittedTo()} | values
    return trust_in(RESIDUALS, **given)


@pytest.mark.parametrize(
    ("values", "grade"),
    [
        ({}, Grade.KNOWN),
        ({"chip": "other"}, Grade.OTHER_CHIP),
        ({"chip": "other", "is_calibrated": False}, Grade.NO_CALIBRATION),
        ({"family": "nobody"}, Grade.UNKNOWN_FRAMEWORK),
        ({"family": "megatron-rocm"}, Grade.NOT_COMPARED),
        ({"fitted": FittedTo(num_runs=3, chips=("c",), models=(shape_of(MODEL),), left_out_error=0.04)}, Grade.OWN_RUNS),
        ({"model": replace(MODEL, num_hidden_layers=100)}, Grade.OUTSIDE),
        ({"model": replace(MODEL, num_hidden_layers=4)}, Grade.OUTSIDE),
    ],
)
def test_what_was_seen_makes_the_grade(values, grade):
    assert trust(**values).grade == grade


def test_the_reason_says_what_was_seen_and_how_far_this_is_from_it():
    assert str(trust()) == "framework and chip known; 7 runs of 1 model on c"
    far = str(trust(model=replace(MODEL, num_hidden_layers=100)))
    assert (
        far == "outside of anything seen; framework and chip known; layers 100 is 2.5 times the most that was seen; 7 runs of 1 model on c"
    )
    fitted_trust = trust(chip="other", fitted=FittedTo(num_runs=3, chips=("c",), models=(shape_of(MODEL),), left_out_error=0.04))
    assert str(fitted_trust) == "fitted to your runs; 3 of them on c, 4.0% off left out; none on other"


def test_a_model_that_was_seen_is_not_far_whatever_the_others_are():
    small = replace(MODEL, num_hidden_layers=1)
    fitted = FittedTo(num_runs=2, chips=("c",), models=(shape_of(small), "llama 80x8192 64/8 28672"), left_out_error=0.1)
    assert trust(model=small, fitted=fitted).grade == Grade.OWN_RUNS
