"""Sources of the uncertainty of a step: for a known framework, for an unknown one, and for the user's own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.fitted import FittedConstant, FittedTo
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.knobs import Knobs
from perfmodel.uncertainty.residuals import shape_of
from perfmodel.uncertainty.sources import REST
from perfmodel.verbs.confidence import trust_in_plan
from perfmodel.verbs.setting import make_job, make_setting, plan_in
from perfmodel.workload.network_model import NetworkModel


def account(profile, *, cluster="dgx-h100", calibration=None, **knobs):
    setting = make_setting(
        make_job("llama-3-8b", global_batch=128, seq_len=8192), cluster, chips=16, profile=profile, calibration=calibration
    )
    return trust_in_plan(setting, plan_in(setting, Knobs(**({"fsdp": 16} | knobs))))


def shares(step_account):
    assert sum(source.share for source in step_account.uncertainties) == pytest.approx(1.0)
    return {source.name: source.share for source in step_account.uncertainties}


def test_defaults_carry_most_of_the_uncertainty_of_an_unknown_framework_and_settings_remove_it():
    account_of_generic = account("generic")
    by_default = {name: share for name, share in shares(account_of_generic).items() if name.startswith("framework: ")}
    assert sum(by_default.values()) > 0.5
    attention = next(name for name in by_default if "attention" in name)
    kernel, *_, runs = account_of_generic.remedies
    assert (kernel.says, runs.how) == ("state the attention kernel", "`perfmodel fit RUNS`")
    assert kernel.share_left == pytest.approx(1.0 - by_default[attention])
    assert runs.share_left < 0.7
    assert account_of_generic.cheapest in account_of_generic.remedies
    assert attention not in shares(account("generic+attention_kernel=flash3"))


def test_no_default_of_a_known_framework_is_uncertain():
    assert not [name for name in shares(account("megatron", fsdp=None, tp=2)) if name.startswith("framework: ")]


@pytest.mark.slow
def test_a_chip_that_was_not_measured_is_calibrated_first():
    measured, other = account("generic"), account("generic", calibration="prior")
    assert [remedy.says for remedy in measured.remedies if remedy.says.startswith("calibrate")] == []
    assert [remedy.says for remedy in other.remedies if remedy.says.startswith("calibrate")] == ["calibrate h100-sxm-80gb"]
    matmul = "h100-sxm-80gb: rate of matrix multiplies (sustained clock)"
    assert shares(other)[matmul] > 2 * shares(measured)[matmul]


def test_what_own_runs_leave_open_is_shared_among_the_constants():
    generic = load_profile("generic")
    constants = tuple(
        FittedConstant(fields=(name,), prior=generic.option(name), prior_spread=0.2, is_ratio=True, share_known=0.0)
        for name in ("matmul_rate_fraction", "attention_rate_fraction")
    )
    job = make_job("llama-3-8b", global_batch=128, seq_len=8192)
    fitted = FittedTo(
        base="generic", num_runs=3, noise=0.05, models=(shape_of(job.transformer),), chips=("h100-sxm-80gb",), constants=constants,
        covariance=((1.0, 0.0), (0.0, 0.0)),
    )  # fmt: skip
    fitted_account = account(replace(generic, name="mine", fitted=fitted))
    assert set(shares(fitted_account)) == {"framework: matrix-multiply rate, relative to calibration", REST}
    assert [remedy.says for remedy in fitted_account.remedies] == ["one more run of your own: of this plan"]


def test_other_networks_were_never_held_against_anything():
    setting = make_setting(make_job("gpt2", global_batch=8, seq_len=1024), "dgx-a100", chips=8)
    plan = plan_in(setting, Knobs())
    job = replace(plan.job, model=NetworkModel(name="resnet50"))
    with pytest.raises(InputError, match="trust=resnet50: is for language models"):
        trust_in_plan(setting, SimpleNamespace(job=job))
