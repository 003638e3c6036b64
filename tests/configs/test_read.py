"""Configurations of frameworks are read as the job and the plan that an expert reads in them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import perfmodel
from perfmodel.configs.read import read_setup
from perfmodel.configs.tables import load_tables
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.framework_ref import SETTING_NAMES
from perfmodel.parallel.request import Request, Service
from perfmodel.verbs.configs import is_config, served_from, start_from

CASES = Path(__file__).parents[1] / "golden" / "configs"


def expected(folder: Path) -> dict:
    return json.loads((folder / "expected.json").read_text())


FOLDERS = sorted(path.parent for path in CASES.glob("*/expected.json"))
TRAINING = [folder for folder in FOLDERS if "serve" not in expected(folder)]
SERVING = [folder for folder in FOLDERS if "serve" in expected(folder)]


def launched(folder: Path) -> Path:
    """The file that a user would give: the launch line where there is one."""
    names = sorted(path for path in folder.iterdir() if path.name != "expected.json")
    return next((path for path in names if path.suffix in (".sh", ".txt")), names[0])


def name_of(folder: Path) -> str:
    return folder.name


#: Field of expected.json -> fact.
FACTS = {
    "num_chips": "chips", "sequence_length": "seq_len", "global_batch": "global_batch", "micro_batch": "micro_batch", "tp": "tp",
    "pp": "pp", "cp": "cp", "ep": "ep", "zero_stage": "zero", "recompute": "recompute", "dp": "dp",
    "gradient_accumulation": "accumulation",
}  # fmt: skip
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
FRAMEWORKS = {
    "Transformers Trainer + DeepSpeed": "Hugging Face Trainer", "Transformers Trainer + accelerate FSDP": "Hugging Face Trainer",
    "TRL + accelerate DeepSpeed": "TRL", "LLaMA-Factory + DeepSpeed": "LLaMA-Factory",
    "LLaMA-Factory + accelerate FSDP": "LLaMA-Factory", "ms-swift + DeepSpeed": "ms-swift",
}  # fmt: skip
OPTIMIZERS = {"adam": "adamw", "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit"}
#: What the files leave to the user.
MISSING = {
    "02-megatron-lm-moe": {"model": "qwen3-30b-a3b"},
    "08-deepspeed-zero2-offload": {"model": "gpt3-1.3b", "seq_len": 2048},
}


@pytest.mark.parametrize("folder", TRAINING, ids=name_of)
def test_a_configuration_says_what_an_expert_reads_in_it(folder):
    wanted, setup = expected(folder), read_setup(launched(folder))
    assert setup.table.framework == FRAMEWORKS.get(wanted["framework"], wanted["framework"])
    facts = {name: setup.facts.get(fact) for name, fact in FACTS.items()}
    assert facts == {name: None if wanted[name] == "unknown" else wanted[name] for name in FACTS}
    for name in SIZES:
        if name in (wanted.get("model") or {}):
            assert setup.facts[f"model.{name}"] == wanted["model"][name], name
    if wanted["pp"] > 1:
        assert (setup.facts.get("virtual_stages") or 1) == wanted["virtual_stages"]
    assert setup.facts["optimizer"] == OPTIMIZERS.get(wanted["optimizer"], wanted["optimizer"])
    if wanted["trainable"] == "lora":
        assert setup.facts["train"].split(":")[1] == str(wanted["lora"]["r"])
        assert setup.facts["train"].startswith("qlora") is ("base_weights" in wanted["settings"])
    if "operators" in (wanted.get("lora") or {}):
        assert setup.facts["train"].split(":")[2] == "+".join(wanted["lora"]["operators"])


@pytest.mark.parametrize("folder", TRAINING, ids=name_of)
def test_a_configuration_is_a_plan_on_a_cluster(folder):
    wanted, missing = expected(folder), MISSING.get(folder.name, {})
    if missing:
        with pytest.raises(InputError) as refused:
            start_from(launched(folder), Request(cluster="dgx-h100"))
        assert all(name in str(refused.value) for name in missing)
    plan = start_from(launched(folder), Request(cluster="dgx-h100", **missing)).plan
    assert plan.num_chips == wanted["num_chips"]
    assert plan.micro_batch == wanted["micro_batch"]
    assert plan.num_microbatches == wanted["gradient_accumulation"]
    assert int(plan.zero) == wanted["zero_stage"]


@pytest.mark.parametrize("folder", SERVING, ids=name_of)
def test_a_launch_line_is_a_serving_request(folder):
    wanted = expected(folder)
    service, _ = served_from(launched(folder), Service())
    request, knobs = service.request, service.knobs
    assert request.chips == wanted["num_chips"]
    assert (knobs.tp, knobs.pp, knobs.attention_dp) == tuple(wanted["serve"][name] for name in ("tp", "pp", "attention_dp"))
    assert (knobs.ep or 1) == (wanted["serve"]["moe_ep"] or 1)
    assert knobs.max_batch == wanted["serve"]["max_num_seqs"]
    assert knobs.max_tokens == wanted["serve"]["max_num_batched_tokens"]
    assert (request.kv_precision or "bf16") == wanted["serve"]["kv_precision"]


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_key_is_read_or_listed(folder):
    """Test data have few keys of which nothing is known; all of them are named."""
    setup = read_setup(launched(folder))
    assert len(setup.unknown) <= 1
    text = " ".join(setup.described(verbose=True))
    assert all(key in text for key in (*setup.unknown, *setup.harmless))


def test_a_schedule_that_is_not_modelled_is_read_as_the_nearest_with_a_note(tmp_path):
    config = tmp_path / "train.toml"
    config.write_text(
        'model = { name = "llama3", flavor = "8B" }\ntraining = { local_batch_size = 8, seq_len = 8192 }\n'
        'parallelism = { pipeline_parallel_degree = 4, pipeline_parallel_schedule = "LoopedBFS" }\n'
    )
    setup = read_setup(config, {"chips": 32})
    assert setup.facts["schedule"] == "interleaved"
    assert any("LoopedBFS: predicted as interleaved" in note for note in setup.notes)


@pytest.mark.parametrize(
    "name, schedule, chunks",
    [("InterleavedZeroBubble", "zero-bubble", 2), ("ZBVZeroBubble", "zbv", 2), ("DualPipeV", "dualpipev", 2), ("1F1B", "1f1b", 1)],
)
def test_schedules_of_torchtitan_by_name(tmp_path, name, schedule, chunks):
    config = tmp_path / "train.toml"
    config.write_text(
        'model = { name = "llama3", flavor = "8B" }\ntraining = { local_batch_size = 8, seq_len = 8192 }\n'
        f'parallelism = {{ pipeline_parallel_degree = 4, pipeline_parallel_schedule = "{name}" }}\n'
    )
    setup = read_setup(config, {"chips": 32})
    assert (setup.facts["schedule"], len(setup.facts["stage_layers"]) // 4) == (schedule, chunks)


@pytest.mark.parametrize("table", load_tables().values(), ids=lambda table: table.name)
def test_a_table_speaks_of_settings_that_exist(table):
    """A value that is a mapping names facts; of these the settings take the values that they are given."""
    from perfmodel.parallel.framework_ref import setting_value

    for key in table.keys.values():
        for meaning in (key.values or {}).values():
            for fact, value in (meaning if isinstance(meaning, dict) else {}).items():
                if fact in SETTING_NAMES and not (isinstance(value, str) and value.startswith("=")):
                    setting_value(fact, value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.yaml", "a: 1\nb: 2\n", "neither a plan of perfmodel nor a configuration"),
        ("x.toml", "[model\n", "is not TOML"),
        ("x.json", "[1]", "must hold a mapping"),
        ("x.py", "x = 1\n", "no function that returns a config"),
        ("x.py", "def f():\n    return a(b=1)\ndef g():\n    return a(b=2)\n", "holds 2 configs; give one"),
        ("x.sh", "# nothing\n", "has no command"),
        ("x.sh", "run " + "${A:-" * 1000, "nested too deep"),
        ("x.yaml", "parallelism: {dp: 2, tp: ${oc.env:TP}}\n", "${oc.env:TP} is filled in by the framework's own resolver"),
        ("x.yaml", "parallelism: {dp: 2, tp: '${other.tp}'}\n", "names a key that the file does not have"),
        (
            "x.sh",
            "torchrun pretrain_gpt.py --use-megatron-fsdp",
            "--use-megatron-fsdp is another engine",
        ),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_read_is_one_sentence(tmp_path, name, text, sentence):
    with pytest.raises(InputError) as refused:
        start_from(write(tmp_path, name, text.replace("${oc.env:TP}", "'${oc.env:TP}'")), Request(cluster="dgx-h100"))
    assert sentence in refused.value.full
    assert "\n" not in str(refused.value)


def test_references_are_followed(tmp_path):
    path = write(tmp_path, "x.yaml", "seq: 512\ntokens: {sequence_length: '${seq}', micro_batch_size: 2}\nparallelism: {dp: 2, tp: 2}\n")
    assert read_setup(path).facts["seq_len"] == 512


def test_a_launch_line_wins_over_its_file(tmp_path):
    write(tmp_path, "a.yaml", "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 1\nsequence_len: 512\n")
    path = write(tmp_path, "go.sh", "axolotl train a.yaml --num-processes 8 --micro-batch-size 4\n")
    assert read_setup(path).facts["micro_batch"] == 4


def test_a_python_config_is_parsed_not_executed(tmp_path):
    mark = tmp_path / "executed"
    text = f"""
import pathlib
pathlib.Path({str(mark)!r}).write_text("yes")
K = 1024
def mine():
    return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(seq_len=8 * K, local_batch_size=2 ** 1))
"""
    setup = read_setup(write(tmp_path, "registry.py", text), {"chips": 8})
    assert (setup.facts["seq_len"], setup.facts["micro_batch"]) == (8192, 2)
    assert not mark.exists()


def test_a_script_is_expanded_not_executed(tmp_path):
    text = """
TP=${TP:-2}
ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size 1)
ARGS+=(--micro-batch-size $((TP * 2)))  # a comment
touch executed; x=$(touch executed)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" \\
    --num-layers 4 --seq-length '1024'  2>&1 | tee log
"""
    facts = read_setup(write(tmp_path, "go.sh", text)).facts
    assert (facts["tp"], facts["micro_batch"], facts["chips"], facts["seq_len"]) == (2, 4, 8, 1024)
    assert not (tmp_path / "executed").exists()


def test_unquoted_elements_of_an_array_are_split_into_words(tmp_path):
    text = """
ARGS=("--fp8-format hybrid" "--micro-batch-size 2" "--split '99,1,0'")
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --bf16 --num-layers 4 --seq-length 128
"""
    facts = read_setup(write(tmp_path, "go.sh", text)).facts
    assert (facts["precision"], facts["micro_batch"]) == ("fp8-delayed", 2)


@pytest.mark.parametrize(
    "config, settings",
    [
        ({"communication_data_type": "fp16", "bf16": {"enabled": True}}, {"gradient_compression": "fp16"}),
        ({"communication_data_type": "fp16", "fp16": {"enabled": True}}, {}),  # as computed: nothing is cast
        ({"communication_data_type": "fp32", "bf16": {"enabled": True}}, {"fp32_gradient_reduction": True}),
        ({"communication_data_type": "fp16", "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, {}),
    ],
)
def test_the_dtype_of_deepspeeds_reductions_is_read_and_written(config, settings, tmp_path):
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    file = write(tmp_path, "deepspeed.json", json.dumps({**batch, **config}))
    read = perfmodel.predict(file, model="llama-3-8b", cluster="dgx-h100", chips=16, seq_len=1024, recompute="none")
    assert read.plan.framework.settings == settings
    written = perfmodel.export_plan(read.plan, to="deepspeed").options
    assert written.get("communication_data_type") == (config["communication_data_type"] if settings else None)


#: Batch of a DeepSpeed JSON -> batch of a step on 16 chips, micro-batch and its number.
BATCHES = [
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}, (256, 2, 8)),
    ({"train_micro_batch_size_per_gpu": 2}, (32, 2, 1)),
    ({"train_batch_size": 64}, (64, 4, 1)),
    ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 2, 2)),
]


@pytest.mark.parametrize(("batch", "expected"), BATCHES)
def test_a_batch_follows_from_its_parts_however_the_chips_are_given(tmp_path, batch, expected):
    path = write(tmp_path, "ds.json", json.dumps({"zero_optimization": {"stage": 3}, **batch}))
    job = Request(model="llama-3-8b", seq_len=2048)
    for shape in (
        {"chips": 16, "cluster": "dgx-h100"},
        {"nodes": 2, "cluster": "dgx-h100"},
        {"cluster": load_cluster("dgx-h100").with_chips(16)},
    ):
        plan = start_from(path, replace(job, **shape)).plan
        assert (plan.job.global_batch, plan.micro_batch, plan.num_microbatches) == expected
    with pytest.raises(InputError, match=r"\(DeepSpeed\): chips: missing in the file; add it as a flag"):
        start_from(path, replace(job, cluster="dgx-h100"))


def test_megatron_without_a_global_batch_takes_one_micro_batch_a_step(tmp_path):
    args = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 128 --micro-batch-size 3"
    path = write(tmp_path, "go.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {args} --tensor-model-parallel-size 2")
    assert start_from(path, Request(cluster="dgx-h100")).plan.job.global_batch == 12


@pytest.mark.parametrize(
    ("words", "train", "optimizer", "settings"),
    [
        ("--use_peft --lora_r 8 --use_dora true", "dora:8:q_proj+v_proj", "adamw", {}),
        ("--use_peft --lora_r 8 --use_dora true --load_in_4bit true", "qdora:8:q_proj+v_proj:nf4", "adamw", {}),
        ("--optim galore_adamw --optim_args rank=64,update_proj_gap=100", "galore:64", "adamw", {}),
        ("--optim galore_adamw_8bit_layerwise", "galore:128", "adamw-8bit", {"optimizer_in_backward": True}),
    ],
)
def test_forms_of_fine_tuning_are_read(tmp_path, words, train, optimizer, settings):
    job = "--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 2 --max_length 512"
    setup = read_setup(write(tmp_path, "go.sh", f"accelerate launch --num_processes 1 train.py {job} {words}"))
    assert (setup.facts["train"], setup.facts["optimizer"]) == (train, optimizer)
    assert settings.items() <= setup.request["settings"].items()


def test_more_ranks_than_chips_are_refused(tmp_path):
    args = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 128 --micro-batch-size 1"
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {args} --global-batch-size 8 --tensor-model-parallel-size 16"
    with pytest.raises(InputError, match="tp=16: must divide chips=8"):
        start_from(write(tmp_path, "go.sh", text), Request(cluster="dgx-h100"))


@pytest.mark.parametrize(
    ("folder", "degrees"), [("05-torchtitan-toml", "pp*dp_replicate*tp=16"), ("29-maxtext-base-sizes", "dp_shard*tp=128")]
)
def test_degrees_of_a_file_that_need_more_chips_are_named(folder, degrees):
    with pytest.raises(InputError) as refused:
        start_from(launched(CASES / folder), Request(cluster="dgx-h100", chips=8))
    assert f"): {degrees}: must divide chips=8; use degrees that do, or other --chips" in str(refused.value)


def test_plans_and_configurations_are_distinguished(tmp_path):
    assert not is_config("fsdp")
    assert not is_config("no-such-plan.yaml")
    assert not is_config(write(tmp_path, "plan.yaml", "schema_version: 1\nkind: plan\n"))
    assert not is_config(write(tmp_path, "plan.json", '{"schema_version": 1, "kind": "plan"}'))
    assert is_config(write(tmp_path, "deepspeed.json", '{"zero_optimization": {"stage": 2}}'))
    assert is_config(write(tmp_path, "axolotl.yaml", "base_model: x\n"))
    assert is_config("train.sh")


def test_a_server_is_not_trained_and_a_trainer_does_not_serve():
    with pytest.raises(InputError, match="give it to `perfmodel serve`"):
        start_from(launched(SERVING[0]), Request(cluster="dgx-h100"))
    with pytest.raises(InputError, match="give it to `perfmodel predict`"):
        served_from(launched(TRAINING[0]), Service())


@pytest.mark.parametrize(
    ("name", "fact", "value", "can"),
    [
        ("torchtitan", "loss", "chunked", True),
        ("torchtitan", "loss", "fused", False),
        ("torchtitan", "compile", True, True),
        ("llama-factory", "loss", "fused", True),
        ("megatron", "loss", "fused", False),
        ("megatron", "global_batch", 64, True),
    ],
)
def test_a_table_lists_what_its_configuration_can_set(name, fact, value, can):
    assert load_tables()[name].can_set(fact, value) is can


def test_a_model_in_place_of_a_launch_line_is_named_as_such():
    with pytest.raises(InputError, match=r"^llama-3-70b: is a model; give it as --model llama-3-70b$"):
        served_from("llama-3-70b", Service())


def test_latent_attention_of_a_megatron_launch_line_is_read(tmp_path):
    """The model of DeepSeek-V3 by Megatron's options: without the sizes of its latents it would be multi-head attention."""
    line = (
        "torchrun --nproc_per_node 8 --nnodes 64 pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 16 "
        "--expert-model-parallel-size 16 --sequence-parallel --num-layers 61 --hidden-size 7168 --num-attention-heads 128 "
        "--ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 --num-experts 256 --moe-router-topk 8 "
        "--moe-shared-expert-intermediate-size 2048 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --v-head-dim 128 "
        "--qk-layernorm --moe-layer-freq ([0]*3+[1]*58) --seq-length 4096 --micro-batch-size 1 --global-batch-size 2048 --bf16 --swiglu "
        "--normalization RMSNorm --untie-embeddings-and-output-weights --position-embedding-type rope --vocab-size 129280 "
        "--recompute-granularity selective "
        "--recompute-modules mla_up_proj --disable-bias-linear --mtp-num-layers 1 --decoder-first-pipeline-num-layers 4 "
        "--decoder-last-pipeline-num-layers 1"
    )
    model = perfmodel.predict(write(tmp_path, "deepseek.sh", line), cluster="dgx-h100").plan.job.transformer
    shipped = perfmodel.load_model("deepseek-v3")
    assert model.num_active_parameters == pytest.approx(shipped.num_active_parameters, rel=1e-5)
    assert model.parts.latent == shipped.parts.latent
    assert (model.num_mtp_layers, [kind.mixer for kind in model.parts.kinds]) == (1, ["latent", "latent"])
