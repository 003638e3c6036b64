"""Change of a step where defaults of a framework are higher or lower than assumed."""

import numpy as np
import pytest

from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.knobs import Knobs
from perfmodel.uncertainty.account import open_in
from perfmodel.uncertainty.open_defaults import behaviour_changes, open_variance
from perfmodel.uncertainty.priors import BEHAVIOURS
from perfmodel.verbs.confidence import interval_in
from perfmodel.verbs.setting import make_job, make_setting, plan_in

GENERIC = load_profile("generic")


def in_proportion(fields):
    """A step that is as long as matrix multiplies take."""
    return -np.log(fields.get("matmul_rate_fraction", GENERIC.rates.matmul_rate_fraction) / GENERIC.rates.matmul_rate_fraction)


def test_a_default_is_moved_a_spread_up_and_a_spread_down_within_its_bounds():
    changes = {behaviour.name: moved.tolist() for behaviour, moved in behaviour_changes(GENERIC, BEHAVIOURS, in_proportion)}
    assert changes["matmul_rate_fraction"] == pytest.approx([-0.12, 0.12])
    assert set(changes) == {behaviour.name for behaviour in BEHAVIOURS}
    assert open_variance(GENERIC, BEHAVIOURS, in_proportion) == pytest.approx((0.12**2, 0.12**2))
    values = {behaviour.name: [] for behaviour in BEHAVIOURS}
    list(
        behaviour_changes(
            GENERIC, BEHAVIOURS, lambda fields: [values[name].append(value) for name, value in fields.items() if name in values]
        )
    )
    assert values["uneven_stage_weight"] == pytest.approx([1.0, GENERIC.timing.uneven_stage_weight - 0.15])


def test_what_a_known_code_lacks_is_not_uncertain():
    known = GENERIC.having(name="megatron", step_time_constant=0.0)
    assert "step_time_constant" not in {behaviour.name for behaviour, _ in behaviour_changes(known, BEHAVIOURS, in_proportion)}


def test_a_step_that_waits_for_its_host_has_a_wider_interval():
    setting = make_setting(make_job("gpt2", global_batch=512, seq_len=1024), "dgx-a100", chips=8)
    held_up, busy = (plan_in(setting, Knobs(micro_batch=size)) for size in (1, 64))
    (_, slow), (_, less) = (open_in(setting.estimator, plan) for plan in (held_up, busy))
    assert slow > 4 * less
    assert interval_in(setting, held_up).high > 1.2 * interval_in(setting, busy).high
    assert "this step hangs more than theirs on what frameworks differ in" in interval_in(setting, held_up).rests_on
    assert open_in(setting.estimator, held_up, stated=("host_launch_time",))[1] < slow
