"""Exported files say the plan: read back they give it again; what a framework cannot express is refused."""

import ast
import contextlib
import json
import random
import tomllib
from dataclasses import replace

import pytest
import yaml

import perfmodel
from perfmodel import predict
from perfmodel.configs.tables import load_tables, table_named
from perfmodel.configs.write import facts_of_plan, write_config
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.exporting import _compared, export_plan, write_export
from tests.configs.drawn_plans import FRAMEWORKS, draw_plan
from tests.configs.launch_schemas import check
from tests.marks import mostly_nightly
from tests.parallel.schedule_files import text_of


def round_trip(plan, framework, folder):
    """The plan that the exported files give; None where the framework refuses the plan."""
    facts = facts_of_plan(plan, load_cluster(plan.cluster))
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
def test_nanotron_takes_what_is_written_for_it():
    """The registry has nanotron 0.4 of 2024: its strict reader of 2026 is a schema made from its dataclasses."""
    rng, taken = random.Random(7), 0
    for _ in range(30):
        plan = draw_plan("nanotron", rng)
        facts = facts_of_plan(plan, load_cluster(plan.cluster))
        with contextlib.suppress(InputError):
            exported = write_config(facts, table_named("nanotron"), prediction=None)
            (config,) = (text for name, text in exported.files.items() if name.endswith((".yaml", ".yml")))
            check(yaml.safe_load(config), "nanotron")
            taken += 1
    assert taken >= 15


@pytest.mark.slow
@pytest.mark.parametrize("count", mostly_nightly([20, 145], [20]))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_many_exported_plans_are_read_back(framework, count, tmp_path):
    check_round_trips(framework, tmp_path, count=count, seed=2)


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


def exported_where(framework, holds):
    """The export of the first drawn plan that the framework takes and for which the condition holds."""
    rng = random.Random(3)
    while True:
        drawn = draw_plan(framework, rng)
        if holds(drawn):
            with contextlib.suppress(InputError):
                return drawn, export_plan(drawn, to=framework, stem="my-plan")


def test_json_and_yaml_parse():
    _, deepspeed = exported_where("deepspeed", lambda plan: True)
    assert json.loads(deepspeed.files["my-plan.json"])["zero_optimization"]["stage"] >= 0
    _, trl = exported_where("trl", lambda plan: True)
    assert yaml.safe_load(trl.files["my-plan.yaml"])["per_device_train_batch_size"] >= 1


def test_llama_factory_names_the_deepspeed_file_and_sharded_replicas_take_accelerate():
    _, exported = exported_where("llama-factory", lambda plan: int(plan.zero) == 2 and plan.layout.dp_replicate == 1)
    assert list(exported.files) == ["my-plan.deepspeed.json", "my-plan.yaml", "my-plan.sh"]
    assert yaml.safe_load(exported.files["my-plan.yaml"])["deepspeed"] == "my-plan.deepspeed.json"
    assert "torchrun" in exported.files["my-plan.sh"]
    assert "-m llamafactory.launcher my-plan.yaml" in exported.files["my-plan.sh"]
    _, exported = exported_where("llama-factory", lambda plan: int(plan.zero) == 3 and plan.layout.dp_replicate == 2)
    assert list(exported.files) == ["my-plan.accelerate.yaml", "my-plan.yaml", "my-plan.sh"]
    config = yaml.safe_load(exported.files["my-plan.accelerate.yaml"])
    assert config["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert "accelerate launch" in exported.files["my-plan.sh"]


def test_torchtitans_python_is_a_module_with_one_config():
    plan, exported = exported_where("torchtitan-python", lambda plan: plan.layout.pp == 2)
    tree = ast.parse(exported.files["my-plan.py"])
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["plan"]
    assert f"tensor_parallel_degree={plan.layout.tp}," in exported.files["my-plan.py"]
    assert '"norm", "lm_head"]' in exported.files["my-plan.py"]
    assert "-m torchtitan.train --module my-plan --config plan" in exported.files["my-plan.sh"]


def test_megatron_bridge_takes_overrides():
    plan, exported = exported_where("megatron-bridge", lambda plan: plan.job.train.is_full)
    script = exported.files["my-plan.sh"]
    assert f"    model.tensor_model_parallel_size={plan.layout.tp}" in script
    assert "run_recipe.py --model " in script
    assert '--mode pretrain --dataset mock "${ARGS[@]}"' in script
    _, exported = exported_where("megatron-bridge", lambda plan: plan.job.train.decomposes)
    assert '--mode dora "${ARGS[@]}"' in exported.files["my-plan.sh"]


def test_ms_swift_takes_truth_values():
    """Without a value an optional argument of its parser, such as bf16, is an error."""
    _, exported = exported_where("ms-swift", lambda plan: plan.job.precision == "bf16-mixed")
    script = exported.files["my-plan.sh"]
    assert "    --bf16 true\n" in script
    assert "    --fp16 false\n" in script
    assert '-m swift.cli.sft "${ARGS[@]}"' in script


@pytest.mark.parametrize(("zero", "name"), [(0, "muon"), (1, "dist_muon")])
def test_ms_swift_on_megatron_has_another_muon_for_a_sharded_optimizer(zero, name):
    """ms-swift refuses muon with overlap_grad_reduce or overlap_param_gather, which a sharded optimizer has."""
    _, exported = exported_where("swift-megatron", lambda plan: plan.job.optimizer == "muon" and int(plan.zero) == zero)
    assert exported.options["optimizer"] == name


@pytest.mark.parametrize(("zero", "name"), [(0, "muon"), (1, "dist_muon")])
def test_megatron_accepts_the_exported_muon(zero, name):
    """megatron/training/arguments.py: muon takes no overlap, dist_muon takes it, and neither takes use_distributed_optimizer (0.17)."""
    _, exported = exported_where("megatron", lambda plan: plan.job.optimizer == "muon" and int(plan.zero) == zero)
    assert exported.options["optimizer"] == name
    assert exported.options.get("overlap_param_gather", False) is (zero == 1)
    assert "use_distributed_optimizer" not in exported.options


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"precision": "fp16-mixed"}, "muon with fp16-mixed: Megatron-LM refuses it"),
        ({"dp_replicate": 2, "dp_shard": 4}, "shards over all data ranks"),
        ({"settings": {"optimizer_offload": True}}, "optimizer_offload with muon: Megatron-LM refuses it"),
    ],
)
def test_megatron_refuses_what_its_muon_cannot(given, sentence):
    job = {"model": "llama-3-8b", "cluster": "dgx-h100", "chips": 8, "global_batch": 8, "seq_len": 2048, "optimizer": "muon"}
    plan = perfmodel.predict(**job, zero=1, profile="megatron", **given).plan
    with pytest.raises(InputError, match=sentence):
        export_plan(plan, to="megatron")


def test_megatron_offloads_the_optimizer_with_the_option_that_it_needs():
    plan, _ = exported_where("megatron", lambda plan: plan.job.optimizer == "adamw" and int(plan.zero) == 1)
    exported = export_plan(replace(plan, profile="megatron+optimizer_offload"), to="megatron")
    assert exported.options["optimizer_cpu_offload"]
    assert exported.options["use_precision_aware_optimizer"]


def test_maxtext_models_have_the_names_of_its_own_configs():
    _, exported = exported_where("maxtext", lambda plan: plan.job.model.name == "llama-3-8b")
    assert exported.options["model_name"] == "llama3-8b"


@pytest.mark.parametrize(
    ("drawn", "to", "holds", "sentence"),
    [
        ("trl", "llama-factory", lambda plan: plan.layout.cp == 2, "LLaMA-Factory has no context parallelism; use cp=1"),
        ("ms-swift", "axolotl", lambda plan: plan.layout.cp == 2 and plan.micro_batch == 2, "takes one packed sequence; use micro_batch=1"),
        ("axolotl", "ms-swift", lambda plan: plan.layout.tp == 2, "use tp=1, or export to swift-megatron"),
        ("megatron", "megatron-bridge", lambda plan: plan.job.model.name == "megatron-22b", "has no recipe for it"),
        ("torchtitan", "torchtitan-python", lambda plan: plan.job.model.name == "qwen2.5-7b", "is no flavor of torchtitan"),
        ("maxtext", "maxtext", lambda plan: plan.job.model.name == "megatron-22b", "MaxText has no model of these sizes"),
    ],
)
def test_what_a_framework_cannot_express_is_named(drawn, to, holds, sentence):
    rng = random.Random(5)
    plan = next(drawn_plan for drawn_plan in (draw_plan(drawn, rng) for _ in range(2000)) if holds(drawn_plan))
    with pytest.raises(InputError) as refused:
        export_plan(plan, to=to)
    assert sentence in refused.value.full


@pytest.mark.parametrize(
    ("framework", "to", "sentence"),
    [("megatron", "nothing", "is no framework that plans are written for"), ("megatron", "vllm", "is no framework"),
     ("trl", "hf-trainer", "use axolotl or ms-swift or trl"), ("megatron", "nemo", "use megatron-bridge")],
)  # fmt: skip
def test_an_unknown_framework_is_refused(framework, to, sentence):
    with pytest.raises(InputError, match=sentence):
        export_plan(draw_plan(framework, random.Random(1)), to=to)


def test_a_plan_that_a_framework_cannot_express_is_refused():
    plan = next(drawn_plan for drawn_plan in (draw_plan("torchtitan", random.Random(n)) for n in range(100)) if int(drawn_plan.zero) == 3)
    with pytest.raises(InputError, match="Megatron's distributed optimizer is ZeRO 1"):
        export_plan(plan, to="megatron")


def test_an_unknown_launcher_is_refused(plan):
    with pytest.raises(InputError, match="use kubernetes, skypilot, slurm, torchrun"):
        export_plan(plan, to="torchtitan", launcher="mpi")


@pytest.mark.parametrize("to", ["torchtitan", "torchtitan-python"])
@pytest.mark.parametrize(("schedule", "virtual_stages", "name"), [
    ("zero-bubble", 1, "PipelineScheduleMulti"), ("interleaved", 2, "PipelineScheduleMulti"), ("dualpipev", 2, "ZBVZeroBubble"),
])  # fmt: skip
def test_a_schedule_from_a_file_is_written_next_to_the_config_and_read_again(tmp_path, to, schedule, virtual_stages, name):
    path = tmp_path / "1f1b.csv"  # its name is not that of the schedule
    path.write_text(text_of(PipelineSchedule(schedule), 4, 8, virtual_stages))
    job = dict(model="llama-3-8b", cluster="dgx-h100", chips=8, global_batch=16, seq_len=4096, zero=2, profile="torchtitan")
    plan = predict(**job, pp=4, schedule=str(path), virtual_stages=virtual_stages).plan
    exported = export_plan(plan, to=to, stem="job")
    assert exported.options["parallelism.pipeline_parallel_schedule"] == name
    assert exported.options["parallelism.pipeline_parallel_schedule_csv"] == "job-schedule.csv"
    config, *_ = write_export(exported, tmp_path)
    again = predict(str(config), cluster="dgx-h100", chips=8).plan
    assert again.schedule.orders == plan.schedule.orders
    assert predict(again).step_time == predict(plan).step_time
    (tmp_path / "job-schedule.csv").unlink()
    with pytest.raises(InputError, match=r"pipeline_parallel_schedule_csv=job-schedule.csv: is not next to job"):
        predict(str(config), cluster="dgx-h100", chips=8)
