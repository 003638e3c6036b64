"""Facts that a profile keeps of its fitted runs: read back exactly, refused where impossible, wider outside the runs."""

import math
from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.files import dump_yaml, read_yaml
from perfmodel.frameworks.fitted import FittedConstant, FittedTo
from perfmodel.frameworks.profile import list_profiles, load_profile, save_profile
from perfmodel.uncertainty.fitted_interval import fitted_interval
from perfmodel.uncertainty.residuals import RunFeatures, load_residuals

RATE = FittedConstant(fields=("matmul_rate_fraction",), prior=0.9, prior_spread=0.1, is_ratio=True, share_known=0.75)
FITTED = FittedTo(
    base="generic", date="2026-01-15", num_runs=3, noise=0.05, left_out_error=0.06,
    models=("a model",), chips=("a chip",), constants=(RATE,), covariance=((0.25,),),
)  # fmt: skip


SPREADS = replace(load_residuals(), features=(("adapters", 0.2), ("8-bit products", 0.1)))


def reach(fitted=FITTED, slope=0.1, chip="a chip", model="a model", bits=16, rare=()):
    features = RunFeatures(chip=chip, scale="one node", bits=bits, rare=frozenset(rare))
    interval = fitted_interval(fitted, (slope,), features, residuals=SPREADS, model=model)
    assert interval.low * interval.high == pytest.approx(1.0)
    return math.log(interval.high)


def test_an_interval_is_what_is_open_and_what_a_run_has_of_its_own():
    assert reach() == pytest.approx(1.2816 * math.hypot(0.1 * 0.5, 0.05))
    assert reach(slope=0.0) == pytest.approx(1.2816 * 0.05)


def test_a_chip_and_a_model_that_the_runs_have_not_seen_widen_it():
    assert reach() < min(reach(chip="another"), reach(model="another")) < reach(chip="another", model="another")


def test_features_that_the_runs_do_not_have_widen_it():
    base = reach()
    assert reach(rare=["adapters"]) == pytest.approx(math.hypot(base, 1.2816 * 0.2))
    assert reach(bits=8) == pytest.approx(math.hypot(base, 1.2816 * 0.1))
    assert reach(replace(FITTED, features=("8-bit products", "adapters")), bits=8, rare=["adapters"]) == base


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    for name in list_profiles():
        for profile in (load_profile(name), replace(load_profile(name), fitted=FITTED)):
            save_profile(profile, tmp_path / "mine.yaml")
            assert load_profile(tmp_path / "mine.yaml") == profile


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"covariance": [[0.25, 0.0]]}, "covariance: must have 1 rows of 1 numbers"),
        ({"num_runs": "three"}, "num_runs"),
        ({"noise": -1.0}, "noise"),
        ({"runs": 3}, "unknown field"),
    ],
)
def test_what_is_wrong_in_the_group_is_one_sentence(changes, says, tmp_path):
    save_profile(replace(load_profile("megatron"), fitted=FITTED), tmp_path / "mine.yaml")
    data = read_yaml(tmp_path / "mine.yaml")
    data["fitted"] |= changes
    (tmp_path / "mine.yaml").write_text(dump_yaml(data))
    with pytest.raises(InputError, match=says):
        load_profile(tmp_path / "mine.yaml")
