"""Shipped data of frameworks: behaviour of their source code in one file, figures of runs in another, no number in both."""

import datetime
from pathlib import Path

import pytest
import yaml

from perfmodel.configs.tables import load_tables
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.options import GROUP_OF
from perfmodel.frameworks.profile import GENERIC, list_profiles, load_profile
from perfmodel.frameworks.shipped import (
    BEHAVIOURS,
    FILE_GROUPS,
    FITTED,
    NEUTRAL,
    fitted_numbers,
    flattened,
    frameworks_dir,
    shipped_behaviour,
)

NAMES = [name for name in list_profiles() if name != GENERIC]


def test_every_folder_is_a_profile_and_generic_is_one_file():
    assert sorted([*NAMES, GENERIC]) == list_profiles()
    assert {path.parent.name for path in frameworks_dir().glob(f"*/{BEHAVIOURS}")} == set(NAMES)
    assert {path.name for path in frameworks_dir().rglob("*") if path.is_file()} == {BEHAVIOURS, FITTED, f"{GENERIC}.yaml"}


@pytest.mark.parametrize("name", NAMES)
def test_behaviours_have_a_source_and_no_number_from_runs(name):
    data = yaml.safe_load((frameworks_dir() / name / BEHAVIOURS).read_text(encoding="utf-8"))
    assert data["name"] == name
    assert data["source"]
    for group in FILE_GROUPS.keys() & data.keys():
        assert data[group]["source"], group
    assert not set(flattened(data, where=name)) & set(fitted_numbers(name))


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_say_is_in_the_profile_with_how_it_is_known(name):
    profile, numbers = load_profile(name), fitted_numbers(name)
    known = {**(shipped_behaviour(name) or {}), **numbers}
    for constant, number in numbers.items():
        assert profile.option(constant) == number.value
        assert number.spread > 0
        assert number.n >= number.models >= 1
        assert number.chips
        assert number.how
        assert datetime.date.fromisoformat(number.date)
    others = load_profile(known["unknown_as"]) if "unknown_as" in known else None
    for constant, neutral in NEUTRAL.items():  # an unknown number is neutral, or as in other profiles, and has no weight in theirs
        if constant not in known:
            assert profile.option(constant) == (neutral if others is None else others.option(constant))
            assert constant in profile.unknown


@pytest.mark.parametrize("name", list_profiles())
def test_a_fraction_is_one_at_most_and_no_field_asks_for_a_year(name):
    profile = load_profile(name)
    for option in GROUP_OF:
        assert "since" not in option
        if option.endswith("_fraction"):
            assert 0 <= profile.option(option) <= 1, option


def test_a_base_gives_its_behaviours_and_nothing_from_its_runs():
    base, derived = load_profile("megatron"), load_profile("nemo")
    assert derived.activations.keeps_unrotated_qk == base.activations.keeps_unrotated_qk
    assert "host_launch_time" in fitted_numbers("megatron")
    assert derived.timing.host_launch_time < base.timing.host_launch_time


def test_a_trainer_without_a_profile_has_that_of_what_it_is_built_on():
    """Also every name of the line `runs in`, which are those of `export`."""
    assert load_profile("TRL") == load_profile("hf-trainer")
    assert load_profile("ms-swift+compile").name == "hf-trainer+compile"
    for name, table in load_tables().items():
        if table.outputs and not table.serves:
            assert load_profile(name).name in (table.profile, name)


def test_a_user_defined_file_takes_over_both(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nbase: megatron\nsource: mine\nmemory: {accumulate_dtype: compute, source: mine}\n", encoding="utf-8")
    derived, base = load_profile(path), load_profile("megatron")
    assert (derived.state.accumulate_dtype, base.state.accumulate_dtype) == ("compute", "fp32")
    assert derived.timing.host_launch_time == base.timing.host_launch_time > 0.0


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("host: {reserve_factor: 1.2}", "host.reserve_factor: is no field of this group"),
        ("host: {host_launch_times: 1 s}", "host.host_launch_times: is no field of this group.*host_launch_time"),
        ("host: 3", "host=3: must be a group of fields"),
        ("host_launch_time: 1 s\nhost: {host_launch_time: 1 s}", "host_launch_time: stands both in the group host and outside"),
    ],
)
def test_a_field_in_a_wrong_group_is_refused(tmp_path, text, sentence):
    path = Path(tmp_path, "p.yaml")
    path.write_text(f"name: mine\nbase: generic\nsource: mine\n{text}\n", encoding="utf-8")
    with pytest.raises(InputError, match=sentence):
        load_profile(path)


@pytest.mark.parametrize(("written", "stages"), [("true", (0, 1, 2, 3)), ("false", ()), ("[0, 3]", (0, 3)), ("[]", ())])
def test_which_zero_stages_overlap_is_a_list_or_yes_or_no(tmp_path, written, stages):
    path = Path(tmp_path, "p.yaml")
    path.write_text(f"name: mine\nbase: generic\nsource: mine\noverlaps_gradients: {written}\n", encoding="utf-8")
    assert load_profile(path).communication.overlaps_gradients == stages


def test_a_zero_stage_that_does_not_exist_overlaps_nothing(tmp_path):
    path = Path(tmp_path, "p.yaml")
    path.write_text("name: mine\nbase: generic\nsource: mine\noverlaps_gradients: [4]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"overlaps_gradients=\[4\]: must be true, false or a list of 0, 1, 2, 3"):
        load_profile(path)


def test_deepspeed_overlaps_no_reduction_below_zero_3_unless_it_is_set():
    """deepspeed/runtime/zero/config.py: overlap_comm."""
    assert load_profile("deepspeed").communication.overlaps_gradients == (3,)
    assert load_profile("deepspeed+gradient_bucketing").communication.overlaps_gradients == (0, 1, 2, 3)
