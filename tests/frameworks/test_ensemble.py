"""The ensemble of a framework: the known ones for an unknown one, profiles about a fit, none for a named one."""

from collections import defaultdict

import numpy as np
import pytest

from perfmodel.frameworks.ensemble import framework_ensemble, known_families, points_about
from perfmodel.frameworks.fitted import FittedConstant, FittedTo
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.settings import with_stated

COVARIANCE = ((1.0, 0.3), (0.3, 0.5))


def fitted(**constant):
    fields = ("matmul_rate_fraction", "exposed_gradient_fraction")
    constants = [
        FittedConstant(fields=(fields[0],), prior=1.0, prior_spread=0.1, is_ratio=True, share_known=0.0),
        FittedConstant(fields=(fields[1],), prior=0.0, prior_spread=0.4, is_ratio=False, share_known=0.5),
    ]
    fitted_to = FittedTo(base="megatron", num_runs=3, constants=tuple(constants), covariance=COVARIANCE)
    return load_profile("megatron").having(name="mine", fitted=fitted_to, **constant)


def test_a_framework_that_is_named_is_what_it_is():
    assert framework_ensemble(load_profile("megatron")) == ()


def test_families_weigh_one_each():
    weights = defaultdict(float)
    for member in framework_ensemble(load_profile("generic")):
        weights[member.profile.family] += member.weight
    assert set(weights) == set(known_families())
    assert list(weights.values()) == pytest.approx([1 / len(weights)] * len(weights))


def test_frameworks_without_a_form_of_parallelism_do_not_count_for_it():
    generic = load_profile("generic")
    ensemble = {member.profile.name: member.profile for member in framework_ensemble(generic)}
    assert ensemble["llm-c"].timing.host_launch_time == generic.timing.host_launch_time, "C and CUDA say nothing of Python"
    for name in ("composer-fsdp", "llm-c"):
        assert ensemble[name].timing.tp_backward_overlap_fraction == generic.timing.tp_backward_overlap_fraction
    assert ensemble["megatron"].timing.tp_backward_overlap_fraction == load_profile("megatron").timing.tp_backward_overlap_fraction
    assert ensemble["composer-fsdp"].kernels.rms_norm_traffic == load_profile("composer-fsdp").kernels.rms_norm_traffic


def test_what_is_stated_holds_for_all_that_it_may_be():
    plain = framework_ensemble(load_profile("generic"))
    assert {member.profile.kernels.attention_kernel for member in plain} > {"flash1"}
    stated = framework_ensemble(with_stated(load_profile("generic"), {"attention_kernel": "flash1"}))
    assert {member.profile.kernels.attention_kernel for member in stated} == {"flash1"}
    assert [member.weight for member in stated] == [member.weight for member in plain]


def test_points_give_the_expectation_of_a_quadratic():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(4, 4))
    covariance, a, b, c = root @ root.T, rng.normal(size=(4, 4)), rng.normal(size=4), 3.0
    expectation = sum(weight * (point @ a @ point + b @ point + c) for weight, point in points_about(covariance))
    assert expectation == pytest.approx(np.trace(a @ covariance) + c)


def test_what_is_known_exactly_and_rounded_is_known():
    """-1e-5: as a file rounds it."""
    points = list(points_about(np.array([[1.0, 0.0], [0.0, -1e-5]])))
    assert max(abs(point[1]) for _, point in points) < 0.01
    assert max(abs(point[0]) for _, point in points) == pytest.approx(1.0)


def test_a_fitted_profile_has_profiles_about_it():
    profile = fitted(exposed_gradient_fraction=0.3)
    ensemble = framework_ensemble(profile)
    assert sum(member.weight for member in ensemble) == pytest.approx(1.0)
    assert ensemble[0].profile.rates.matmul_rate_fraction == pytest.approx(profile.rates.matmul_rate_fraction)
    rates = [np.log(member.profile.rates.matmul_rate_fraction / profile.rates.matmul_rate_fraction) / 0.1 for member in ensemble]
    shares = [(member.profile.timing.exposed_gradient_fraction - 0.3) / 0.4 for member in ensemble]
    weights = [member.weight for member in ensemble]
    moments = [
        sum(w * x * y for w, x, y in zip(weights, first, second, strict=True)) for first, second in ((rates, rates), (rates, shares))
    ]
    assert moments == pytest.approx([COVARIANCE[0][0], COVARIANCE[0][1]])


def test_shares_stay_shares():
    for member in framework_ensemble(fitted(exposed_gradient_fraction=0.0)):
        assert 0.0 <= member.profile.timing.exposed_gradient_fraction <= 1.0
