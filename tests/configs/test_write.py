"""Exported files say the plan: read back they give it again; what a framework cannot express is refused."""

import json
import random
import tomllib

import pytest
import yaml

from perfmodel.configs.facts import facts_of_plan
from perfmodel.configs.tables import load_tables, table_named
from perfmodel.configs.write import write_config
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.exporting import _compared, export_plan, write_export
from perfmodel.workload.models import hub_id_of
from tests.configs.drawn_plans import FRAMEWORKS, draw_plan


def round_trip(plan, framework, folder):
    """The plan that the exported files give; None where the framework refuses the plan."""
    facts = facts_of_plan(plan, chips_per_node=8, model_id=hub_id_of(plan.job.model.name))
    try:
        exported = write_config(facts, table_named(framework), prediction=None)
    except InputError:
        return None
    write_export(exported, folder)
    model = {} if framework in ("megatron", "nanotron") else {"model": plan.job.model}
    return start_from(folder / exported.script, Request(cluster="dgx-b200", **model)).plan


def check_round_trips(framework, folder, count, seed):
    rng = random.Random(seed)
    done = 0
    for _ in range(3 * count):
        plan = draw_plan(framework, rng)
        again = round_trip(plan, framework, folder)
        if again is not None:
            assert _compared(again) == _compared(plan)
            assert plan.framework.settings.items() <= again.framework.settings.items()
            done += 1
        if done == count:
            return
    assert done >= count / 2, f"{framework} wrote only {done} plans"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_exported_plan_is_read_back(framework, tmp_path):
    check_round_trips(framework, tmp_path, count=8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_exported_plans_are_read_back(framework, tmp_path):
    check_round_trips(framework, tmp_path, count=145, seed=2)


def test_every_framework_with_outputs_is_drawn():
    assert {name for name, table in load_tables().items() if table.outputs} == set(FRAMEWORKS)


@pytest.fixture(scope="module")
def plan():
    return draw_plan("torchtitan", random.Random(7))


def test_files_parse_and_have_the_numbers_behind_options(plan):
    exported = export_plan(plan, to="torchtitan", stem="job")
    assert list(exported.files) == ["job.toml", "job.sh"]
    config = tomllib.loads(exported.files["job.toml"])
    assert config["parallelism"]["tensor_parallel_degree"] == plan.layout.tp
    assert "predicted on" in exported.files["job.toml"]
    assert "GiB" in exported.files["job.toml"]


def test_a_slurm_script_asks_for_the_nodes(plan):
    script = export_plan(plan, to="torchtitan", launcher="slurm").files["plan.sh"]
    assert f"#SBATCH --nodes={max(plan.num_chips // 8, 1)}" in script
    assert "srun torchrun" in script


def test_json_and_yaml_parse():
    rng = random.Random(3)
    deepspeed = export_plan(draw_plan("deepspeed", rng), to="deepspeed")
    assert json.loads(deepspeed.files["plan.json"])["zero_optimization"]["stage"] >= 0
    trl = export_plan(draw_plan("trl", rng), to="trl")
    assert yaml.safe_load(trl.files["plan.yaml"])["per_device_train_batch_size"] >= 1


@pytest.mark.parametrize(
    ("framework", "to", "sentence"),
    [("megatron", "nothing", "is no framework that plans are written for"), ("megatron", "vllm", "is no framework")],
)
def test_an_unknown_framework_is_refused(framework, to, sentence):
    with pytest.raises(InputError, match=sentence):
        export_plan(draw_plan(framework, random.Random(1)), to=to)


def test_a_plan_that_a_framework_cannot_express_is_refused():
    plan = next(each for each in (draw_plan("torchtitan", random.Random(n)) for n in range(100)) if int(each.zero) == 3)
    with pytest.raises(InputError, match="Megatron's distributed optimizer is ZeRO 1"):
        export_plan(plan, to="megatron")


def test_an_unknown_launcher_is_refused(plan):
    with pytest.raises(InputError, match="use kubernetes, skypilot, slurm, torchrun"):
        export_plan(plan, to="torchtitan", launcher="mpi")
