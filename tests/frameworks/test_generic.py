"""The profile of an unknown framework: between the known ones, and written from them."""

from dataclasses import replace

import pytest

from lab.generic import main
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.ensemble import known_families
from perfmodel.frameworks.generic import SAFE_MEMORY, generic_profile
from perfmodel.frameworks.profile import GENERIC, load_profile, profile_text
from perfmodel.frameworks.shipped import frameworks_dir

FAST = replace(load_profile("megatron"), name="fast", unknown=())
SLOW = load_profile("torch-fsdp2").having(
    name="slow", unknown=(), family="slow", rms_norm_traffic=16.0, host_launch_time=8e-5, dropout=False
)


def test_the_shipped_one_is_what_the_command_writes(tmp_path):
    out = tmp_path / "generic.yaml"
    assert main(["--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == (frameworks_dir() / "generic.yaml").read_text(encoding="utf-8")
    assert load_profile(out) == load_profile(GENERIC)


def test_rates_factors_and_times_of_hosts_are_geometric_means():
    profile = generic_profile({"a": [FAST], "b": [SLOW]})
    assert profile.kernels.rms_norm_traffic == pytest.approx(4.0)
    assert profile.timing.host_launch_time == pytest.approx((FAST.timing.host_launch_time * 8e-5) ** 0.5, rel=1e-2)
    assert profile.timing.step_time_constant == pytest.approx(
        (FAST.timing.step_time_constant * SLOW.timing.step_time_constant) ** 0.5, rel=1e-2
    )
    assert {name: profile.option(name) for name in SAFE_MEMORY} == SAFE_MEMORY
    assert profile.timing.host_layer_time_per_tp_across_nodes == 0.0


def test_a_family_weighs_one_however_many_frameworks_it_has():
    kin = [replace(FAST, name=f"kin-{i}") for i in range(9)]
    few, many = (generic_profile({"a": members, "b": [SLOW], "c": [replace(SLOW, family="c")]}) for members in ([FAST], kin))
    assert replace(many, source="") == replace(few, source="")
    assert many.kernels.dropout is False


def test_what_a_framework_does_not_know_moves_nothing():
    blank = SLOW.having(unknown=("host_launch_time",), host_launch_time=0.0)
    assert generic_profile({"a": [FAST], "b": [blank]}).timing.host_launch_time == FAST.timing.host_launch_time
    unaware = replace(FAST, unknown=("host_launch_time", "fp8_matmul_rate_fraction"))
    profile = generic_profile({"a": [unaware]})
    assert (profile.timing.host_launch_time, profile.rates.fp8_matmul_rate_fraction) == (0.0, 1.0)


def test_a_number_that_was_lent_is_none_of_the_borrower():
    assert "step_time_constant" in load_profile("torch-fsdp2").unknown
    assert "matmul_rate_fraction" not in load_profile("torch-fsdp2").unknown
    assert (
        generic_profile({"a": [load_profile("composer-fsdp")], "b": [load_profile("torchtitan")]}).timing.step_time_constant
        == load_profile("composer-fsdp").timing.step_time_constant
    )


def test_a_host_that_takes_no_time_says_nothing_of_others():
    assert (
        generic_profile({"a": [FAST], "b": [SLOW.having(step_time_constant=0.0)]}).timing.step_time_constant
        == FAST.timing.step_time_constant
    )


def test_what_waits_for_the_end_of_backward_is_a_share_of_what_shows():
    """The mean is over the ZeRO stages that a framework runs."""
    waits = SLOW.having(overlaps_gradients=(0, 3), runs=SLOW.runs.having(zero=(0, 1, 2, 3)), exposed_gradient_fraction=0.2)
    never = FAST.having(overlaps_gradients=(0, 1, 2, 3), exposed_gradient_fraction=0.0)
    assert generic_profile({"b": [waits]}).timing.exposed_gradient_fraction == pytest.approx(0.5 + 0.5 * 0.2)
    profile = generic_profile({"a": [never], "b": [waits]})
    assert (profile.communication.overlaps_gradients, profile.timing.exposed_gradient_fraction) == ((0, 1, 2, 3), pytest.approx(0.3))


def test_frameworks_without_a_form_of_parallelism_do_not_count_for_its_defaults():
    """Two that know ZeRO 1 alone say nothing of when gradients of ZeRO 2 and 3 leave."""
    sharded = SLOW.having(reduces_each_microbatch=True, runs=SLOW.runs.having(zero=(0, 2, 3)))
    unsharded = [FAST.having(family=name, reduces_each_microbatch=False, runs=FAST.runs.having(zero=(0, 1))) for name in "ab"]
    known = {profile.family: [profile] for profile in (*unsharded, sharded)}
    assert generic_profile(known).communication.reduces_each_microbatch
    known["slow"] = [replace(sharded, runs=SLOW.runs.having(zero=(0, 1)))]
    assert not generic_profile(known).communication.reduces_each_microbatch
    assert load_profile(GENERIC).communication.reduces_each_microbatch


def test_a_framework_left_out_says_nothing():
    known = known_families(without={"nanotron"})
    assert "nanotron" in known_families()
    assert "nanotron" not in known
    assert "nanotron" not in profile_text(generic_profile(known))
    with pytest.raises(InputError, match="none is left"):
        generic_profile({})
