"""Settings of the recipes of a release: read from files, applied to a profile by model, chip and precision."""

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.releases import load_releases, recipe_of, release_key, releases_dir

NEMO = load_releases("nemo")
JOB = dict(
    model="qwen3-235b-a22b", cluster="gb200-nvl72", chips=256, global_batch=8192, seq_len=4096, precision="mxfp8", pp=8, ep=32, zero=1,
    virtual_stages=3, dispatcher="flex",
)  # fmt: skip


def recipe(release, *, model="qwen3-235b-a22b", chip="gb200-nvl72", precision="mxfp8", global_batch=8192):
    return recipe_of(NEMO, release, model=model, chip=chip, precision=precision, global_batch=global_batch)


@pytest.mark.parametrize("path", sorted(releases_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_names_its_source_and_releases_in_order(path):
    releases = load_releases(path.stem)
    assert releases.source
    assert load_profile(releases.framework).name == releases.framework == path.stem
    assert load_profile(releases.launches_as).timing.host_launch_time > load_profile(releases.framework).timing.host_launch_time
    keys = [release_key(release) for release in releases.releases]
    assert keys == sorted(keys)
    assert {entry.release for entry in releases.recipes} <= set(releases.releases)


def test_a_recipe_holds_until_a_later_one_of_the_same_model():
    assert recipe("26.04").graphs == recipe("26.04.02").graphs == ("attn", "moe_router", "moe_preprocess")
    assert recipe("26.06").graphs == recipe("27.01").graphs == ("full_iteration",)
    assert recipe("26.06").fused_experts
    assert recipe("26.06").moe_overlap
    assert not recipe("26.04").fused_experts


def test_the_variant_of_the_nearest_batch_is_taken():
    of = {batch: recipe("26.04", model="gpt-oss-120b", chip="b200-180gb", precision="bf16", global_batch=batch) for batch in (512, 1280)}
    assert (of[512].dispatcher, of[1280].dispatcher) == ("alltoall", "flex")


def test_a_model_without_a_recipe_runs_as_most_do():
    assert recipe("26.04", model="ours").dispatcher == "flex"
    assert recipe("26.04", model="ours", chip="a100-sxm-80gb") is None
    assert recipe("24.01") is None


def test_a_later_release_is_faster_and_the_profile_names_it():
    predictions = {release: perfmodel.predict(**JOB, profile=f"nemo@{release}") for release in ("25.11", "26.06")}
    assert predictions["26.06"].step_time < 0.85 * predictions["25.11"].step_time
    assert predictions["26.06"].plan.profile == "nemo+release=26.06"
    assert perfmodel.predict(**JOB, profile="nemo", settings={"release": "26.06"}).step_time == predictions["26.06"].step_time


def test_a_release_changes_no_dense_model():
    dense = dict(model="llama-3-8b", cluster="dgx-h100", chips=8, global_batch=64, seq_len=4096)
    assert perfmodel.predict(**dense, profile="nemo@26.06").step_time == perfmodel.predict(**dense, profile="nemo").step_time


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("megatron@26.06", "no recipes of megatron are known; use it with nemo"),
        ("nemo@24.01", "no recipe of nemo until then is for gb200-nvl72"),
        ("nemo+release=new", "must be a release such as 26.02"),
    ],
)
def test_releases_that_are_not_known_are_refused(profile, words):
    with pytest.raises(InputError, match=words):
        perfmodel.predict(**JOB, profile=profile)


def test_a_plan_unlike_the_recipe_has_a_note():
    deepseek = JOB | dict(model="deepseek-v3", pp=4, ep=64, virtual_stages=4, precision="bf16-mixed", dispatcher="alltoall")
    [note] = [warning for warning in perfmodel.predict(**deepseek, profile="nemo@26.04").warnings if "recipe" in warning]
    assert note == "the recipe of release 26.04 for deepseek-v3 has the dispatcher flex and recomputes mla_up_proj: the plan does not"
    assert not [warning for warning in perfmodel.predict(**JOB, profile="nemo@26.04").warnings if "recipe" in warning]
