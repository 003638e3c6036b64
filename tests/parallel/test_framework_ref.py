"""Settings with a profile's name: one text inside, separate in files, options and arguments."""

import re

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.resources import resource_dir
from perfmodel.frameworks.profile import load_profile, save_profile
from perfmodel.frameworks.settings import with_settings, with_stated
from perfmodel.parallel.eager import EAGER_COMPLEX_ROTARY, EAGER_RMS_NORM
from perfmodel.parallel.framework_ref import SETTING_NAMES as KNOWN
from perfmodel.parallel.framework_ref import FrameworkRef, framework_named, passed_over, read_settings, settings_text, stated
from perfmodel.parallel.plan import plan_to_dict
from perfmodel.parallel.plan_file import plan_from_dict, read_plan, write_plan

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=16, global_batch=64, seq_len=4096)
SETTING_NAMES = {"fused_rmsnorm": False, "compile": True, "gradient_bucket_mb": 12.5, "attention_kernel": "flash2"}
TEXT = "fused_rmsnorm=false+compile+gradient_bucket_mb=12.5+attention_kernel=flash2"


@pytest.mark.parametrize(
    "given",
    [
        SETTING_NAMES,
        TEXT,
        TEXT.split("+"),
        TEXT.replace("+", ","),
        [TEXT, "compile"],
        dict(reversed(SETTING_NAMES.items())),
        {**SETTING_NAMES, "compile": "yes"},
    ],
)
def test_settings_are_read_as_people_write_them(given):
    assert read_settings(given) == SETTING_NAMES
    assert settings_text(read_settings(given)) == TEXT
    assert FrameworkRef.parse(stated("generic", read_settings(given))).settings == SETTING_NAMES


@pytest.mark.parametrize("spelled", ["flash2", "flash_attention_2", "FlashAttention-2", "flash-attn2", "FA2", "flash_attn_v2"])
def test_attention_kernels_have_many_spellings(spelled):
    assert read_settings({"attention_kernel": spelled}) == {"attention_kernel": "flash2"}


def test_not_compiled_is_written_out_where_norms_may_be():
    for name, is_moved in (("generic", True), ("torchtitan", False), ("megatron", False)):
        base = load_profile(name)
        assert (with_settings(base, {"compile": False}) != base) is is_moved
    eager = with_settings(load_profile("generic"), {"compile": False})
    assert (eager.kernels.rms_norm_traffic, eager.kernels.rotary_traffic) == (EAGER_RMS_NORM, EAGER_COMPLEX_ROTARY)


def test_a_measured_runs_settings_are_read_as_stated_ones_are():
    base = load_profile("torchtitan")
    assert with_settings(base, {"compile": "yes", "gradient_bucket_mb": "25"}) == with_settings(
        base, {"compile": True, "gradient_bucket_mb": 25}
    )
    odd = {"compile": "perhaps", "mystery": 1, "attention_kernel": 7, "async_tp": None}
    assert with_settings(base, odd) == base
    assert passed_over(odd) == ["compile=perhaps", "mystery", "attention_kernel=7"]


def test_what_changes_nothing_is_a_note():
    prediction = perfmodel.predict(**JOB, profile="megatron", settings={"fused_rmsnorm": True, "tp_async": False})
    assert prediction.warnings == (
        "setting fused_rmsnorm: changes nothing about megatron, which has it so already or does not depend on it",
    )
    assert perfmodel.predict(prediction.plan).warnings == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compil": True}, "setting=compil: is not known; did you mean 'compile'"),
        ({"compile": 3}, "setting compile=3: must be true or false"),
        ({"compile": None}, "setting compile=None: must be true or false"),
        ({"attention_kernel": True}, "must be one of flash1, flash2, flash3, cudnn"),
        ({"attention_kernel": ["flash2"]}, "must be one of flash1"),
        ({"gradient_bucket_mb": 10**400}, "must be a number from 0.001"),
        ({"gradient_bucket_mb": True}, "must be a number from 0.001"),
        ({7: True}, "setting=7: is not known"),
        (["compile", "compile=false"], "setting=compile=false: was stated as compile before; state it once"),
        ([3], "settings=[3]: must be a mapping of names to values"),
        (3, "settings=3: must be a mapping of names to values"),
    ],
)
def test_what_is_not_known_is_one_sentence(given, message):
    with pytest.raises(InputError) as error:
        read_settings(given)
    assert message in str(error.value)


def test_what_the_profile_says_otherwise_is_refused():
    assert stated("generic+compile", {"compile": True}) == "generic+compile"
    with pytest.raises(InputError, match=r"the profile .* says compile; state one of them"):
        perfmodel.predict(**JOB, profile="generic+compile", settings={"compile": False})


def test_a_setting_is_applied_once_and_all_together():
    once = load_profile("torchtitan+fp8_recipe=rowwise")
    assert with_stated(once, {"fp8_recipe": "rowwise"}) == once
    with pytest.raises(InputError, match=r"load it with all of them: torchtitan.*rowwise"):
        with_stated(once, {"compile": True})


@pytest.mark.parametrize(
    ("text", "name"),
    [("generic+compile", "generic"), ("/a+b/mine.yaml+compile", "/a+b/mine.yaml"), ("my+own.yml", "my+own.yml"), ("generic", "generic")],
)
def test_the_framework_is_separated_from_its_settings(text, name):
    assert framework_named(text) == name
    assert bool(FrameworkRef.parse(text).settings) is text.endswith("+compile")


def test_settings_are_stated_in_three_ways_and_predict_the_same():
    by_argument = perfmodel.predict(**JOB, settings=SETTING_NAMES)
    assert perfmodel.predict(**JOB, profile=f"generic+{TEXT}") == by_argument
    assert perfmodel.predict(**JOB, profile="generic+compile", settings=[TEXT]) == by_argument
    assert by_argument.step_time != perfmodel.predict(**JOB).step_time
    best = perfmodel.find_plans(**JOB, settings=SETTING_NAMES, top=1, tp=1, pp=1, cp=1).plans[0]
    assert best.plan.framework.settings == SETTING_NAMES
    assert perfmodel.predict(best.plan).step_time == best.step_time


def test_a_saved_plan_holds_its_settings_apart_and_gives_its_number_to_the_bit(tmp_path):
    path = tmp_path / "plan.yaml"
    prediction = perfmodel.predict(**JOB, settings=SETTING_NAMES)
    write_plan(prediction.plan, path)
    assert "profile: generic\n" in path.read_text()
    assert plan_to_dict(read_plan(path))["settings"] == SETTING_NAMES
    assert read_plan(path).hash() == prediction.plan.hash()
    assert perfmodel.predict(path) == prediction
    assert perfmodel.explain_plan(path).prediction.step_time == prediction.step_time
    other = perfmodel.predict(**JOB, settings={**SETTING_NAMES, "compile": False, "fused_rmsnorm": True})
    assert perfmodel.predict(path, settings={"compile": False, "fused_rmsnorm": True}) == other
    assert perfmodel.predict(path, profile="generic+fused_rmsnorm", settings={"compile": False}) == other
    (compared,) = perfmodel.compare_plans([path], settings=["compile=no", "fused_rmsnorm"])
    assert compared.step_time == other.step_time
    assert perfmodel.predict(path, profile="torchtitan").plan.profile == f"torchtitan+{TEXT}"


def test_a_plan_without_settings_has_no_such_key():
    plan = perfmodel.predict(**JOB).plan
    assert "settings" not in plan_to_dict(plan)
    assert plan_from_dict({**plan_to_dict(plan), "profile": "generic+compile=true"}).profile == "generic+compile"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"settings": {"compil": True}}, "setting=compil: is not known; did you mean 'compile'"),
        ({"settings": [3]}, "settings=[3]: must be a mapping"),
        ({"settings": {"compile": False}, "profile": "generic+compile"}, "the profile generic+compile says compile"),
    ],
)
def test_a_plan_with_settings_that_are_not_known_is_refused(given, message):
    with pytest.raises(InputError) as error:
        plan_from_dict({**plan_to_dict(perfmodel.predict(**JOB).plan), **given})
    assert message in str(error.value)


def test_a_user_defined_profile_takes_settings_too(tmp_path):
    save_profile(load_profile("torchtitan"), tmp_path / "my+own.yaml")
    prediction = perfmodel.predict(**JOB, profile=tmp_path / "my+own.yaml", settings={"compile": True})
    assert prediction.plan.profile == f"{tmp_path}/my+own.yaml+compile"
    assert prediction.step_time == perfmodel.predict(**JOB, profile="torchtitan+compile").step_time
    assert perfmodel.predict(prediction.plan) == prediction
    (tmp_path / "plus.yaml").write_text("base: generic\nname: my+own\nsource: here\n")
    with pytest.raises(InputError, match="stands before a setting"):
        load_profile(tmp_path / "plus.yaml")


def test_the_page_lists_every_setting():
    """docs/settings.md and the code say the same: names, values, what they change."""

    def values(of):
        if not of:
            return "yes, no"
        if isinstance(of, re.Pattern):
            return "a release, such as `26.02`"
        return ", ".join(f"`{value}`" for value in of) if isinstance(of[0], str) else f"{of[0]:g} to {of[1]:.7g}"

    page = (resource_dir("strategies").parent / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {values(setting.values)} | {setting.says} |" for name, setting in KNOWN.items()]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows, "\n".join(rows)
