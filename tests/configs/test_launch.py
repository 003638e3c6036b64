"""Launch files of every launcher start the same command, are what their documented schemas take, and are read back."""

import random
import subprocess

import pytest

from perfmodel.configs.shell import read_script
from perfmodel.configs.write import filled_template, load_launchers
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.exporting import _compared, export_plan, write_export
from tests.configs.drawn_plans import draw_plan
from tests.configs.launch_schemas import check, documents_of

LAUNCHERS = [name for name, launcher in load_launchers().items() if not launcher.engines]


@pytest.fixture(scope="module", params=["torchtitan", "torchtitan-python", "megatron", "trl"])
def plan(request):
    rng = random.Random(7)
    return request.param, next(
        drawn_plan
        for drawn_plan in iter(lambda: draw_plan(request.param, rng), None)
        if drawn_plan.num_chips > 8 and writes(request.param, drawn_plan)
    )


def writes(framework, plan):
    """Whether the framework can express it."""
    try:
        export_plan(plan, to=framework)
    except InputError:
        return False
    return True


def script_of(exported):
    """The shell script that a launch file holds."""
    if exported.script.endswith(".sh"):
        return exported.files[exported.script]
    last = documents_of(exported)[-1]
    return last.get("run") or last["spec"]["trainer"]["command"][-1]


def started(exported):
    return [word for word in read_script(script_of(exported))[-1][0] if word != "srun"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_the_same_command_and_read_back(plan, launcher, tmp_path):
    framework, wanted = plan
    exported = export_plan(wanted, to=framework, launcher=launcher)
    assert started(exported) == started(export_plan(wanted, to=framework))
    assert "predicted on" in script_of(exported)
    write_export(exported, tmp_path)
    model = {"model": wanted.job.model} if framework != "megatron" else {}
    again = start_from(tmp_path / exported.script, Request(cluster=wanted.cluster, **model)).plan
    assert _compared(again) == _compared(wanted)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_are_correct_bash(plan, launcher):
    framework, wanted = plan
    script = script_of(export_plan(wanted, to=framework, launcher=launcher))
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""


def test_a_task_of_skypilot_asks_for_the_chips(plan):
    framework, wanted = plan
    (task,) = documents_of(export_plan(wanted, to=framework, launcher="skypilot", stem="My_run"))
    check(task, "skypilot")
    assert task["num_nodes"] == wanted.num_chips // 8
    assert task["resources"]["accelerators"] == "B200:8"
    assert task["name"] == "my-run"


def test_a_trainjob_has_its_config_in_a_configmap(plan):
    framework, wanted = plan
    exported = export_plan(wanted, to=framework, launcher="kubernetes")
    *maps, job = documents_of(exported)
    check(job, "trainjob")
    assert job["spec"]["trainer"]["numNodes"] == wanted.num_chips // 8
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    files = export_plan(wanted, to=framework).files
    assert [entry["data"] for entry in maps] == [data for data in ({name: files[name] for name in files if name != "plan.sh"},) if data]
    assert ("runtimePatches" in job["spec"]) == bool(maps)
    assert len(exported.files) == 1


def test_a_wrong_key_is_refused_by_the_schema(plan):
    validation = pytest.importorskip("jsonschema").ValidationError
    job = documents_of(export_plan(plan[1], to=plan[0], launcher="kubernetes"))[-1]
    job["spec"]["trainer"]["nodes"] = job["spec"]["trainer"].pop("numNodes")
    with pytest.raises(validation, match="nodes"):
        check(job, "trainjob")


def test_a_chip_without_a_name_at_skypilot_is_refused():
    from perfmodel.configs.write import launch_names, launcher_named

    with pytest.raises(InputError, match="no accelerator that is known for chip mi250x"):
        launch_names(launcher_named("skypilot"), {"stem": "a", "chip": "mi250x", "pools": 0})


def test_templates_leave_out_what_has_no_value():
    template = {"a": "=x", "b": "{y} chips", "c": {"=if": "x", "d": 1}, "=each rows": {"{name}": {"n": "=n"}}, "e": [{"=if": "x"}]}
    names = {"x": None, "y": 8, "rows": [{"name": "one", "n": 1}, {"name": "two", "n": 2}]}
    assert filled_template(template, names) == {"b": "8 chips", "one": {"n": 1}, "two": {"n": 2}}
