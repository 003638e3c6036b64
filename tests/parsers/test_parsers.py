"""Exported files are accepted by the parsers of their frameworks, which then hold the values of the plan."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfmodel.configs.expressions import evaluate
from perfmodel.configs.tables import load_tables, table_named
from perfmodel.configs.write import facts_of_plan, write_config
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import load_cluster
from perfmodel.verbs.exporting import write_export
from perfmodel.workload.models import list_models
from tests.configs.drawn_plans import draw_plan

Facts = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-parsers" / "bin" / "python"
NUM_PLANS = 40


def uses_deepspeed(facts: Facts) -> bool:
    """Whether accelerate's files name DeepSpeed: ZeRO 1, Ulysses, and where one of optimizer and parameters is offloaded."""
    one_offload = bool(facts["optimizer_offload"]) != bool(facts["parameter_offload"])
    return facts["zero"] == 1 or (facts["zero"] > 0 and (one_offload or uses_ulysses(facts)))


def uses_ulysses(facts: Facts) -> bool:
    return facts["cp"] > 1 and facts["cp_form"] == "ulysses"


def trl_values(facts: Facts) -> dict[str, Any]:
    """Values that accelerate and TRL hold for a plan."""
    zero, cp, full = facts["zero"], facts["cp"], facts["recompute"] == "full"
    deepspeed = uses_deepspeed(facts)
    fsdp = zero > 1 and not deepspeed
    tuned = facts["lora_rank"] is not None
    kernels = {"flash2": "flash_attention_2", "flash3": "flash_attention_3"}
    values = {
        "launch.num_processes": facts["chips"],
        "launch.num_machines": -(-facts["chips"] // facts["chips_per_node"]),
        "launch.use_fsdp": fsdp,
        "launch.use_deepspeed": deepspeed,
        "launch.mixed_precision": {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "fp32": "no"}[facts["precision"]],
        "trainer.max_length": facts["seq_len"],
        "trainer.packing": True,
        "trainer.per_device_train_batch_size": facts["micro_batch"],
        "trainer.gradient_accumulation_steps": facts["accumulation"],
        "trainer.activation_checkpointing": full and not fsdp,
        "trainer.bf16": facts["precision"] == "bf16-mixed",
        "trainer.fp16": facts["precision"] == "fp16-mixed",
        "trainer.torch_compile": bool(facts["compile"]),
        "trainer.use_liger_kernel": facts["loss"] == "fused",
        "model.model_name_or_path": facts["model_id"],
        "model.attn_implementation": kernels.get(facts["attention_kernel"], "flash_attention_2" if uses_ulysses(facts) else "sdpa"),
        "model.use_peft": tuned,
        "model.use_dora": facts["adapters"] == "dora",
        "model.load_in_4bit": str(facts["base_format"]).startswith("nf4"),
    }
    if tuned:
        targets = facts["lora_modules"] or "all-linear"
        values |= {"model.lora_r": facts["lora_rank"], "model.lora_target_modules": targets}
    if fsdp:
        values |= {
            "fsdp.fsdp_version": 2,
            "fsdp.reshard_after_forward": zero == 3,
            "fsdp.activation_checkpointing": full,
            "fsdp.cpu_offload": bool(facts["parameter_offload"]),
        }
    if fsdp or uses_ulysses(facts):
        values |= {
            "parallelism.dp_replicate_size": facts["dp_replicate"],
            "parallelism.dp_shard_size": facts["dp_shard"],
            "parallelism.tp_size": facts["tp"],
            "parallelism.cp_size": 1 if uses_ulysses(facts) else cp,
            "parallelism.sp_size": cp if uses_ulysses(facts) else 1,
            "parallelism.sp_backend": "deepspeed",
            "parallelism.total_size": facts["chips"],
        }
    if deepspeed:
        values["deepspeed.zero_stage"] = zero
    return values


def llama_factory_values(facts: Facts) -> dict[str, Any]:
    """Values that LLaMA-Factory, and accelerate where it starts it, hold for a plan."""
    tuned, replicated = facts["lora_rank"] is not None, facts["dp_replicate"] > 1 and facts["zero"] > 0
    values = {
        "model.model_name_or_path": facts["model_id"],
        "model.disable_gradient_checkpointing": facts["recompute"] == "none",
        "model.flash_attn": {"flash2": "fa2", "flash3": "fa3"}.get(facts["attention_kernel"], "sdpa"),
        "model.enable_liger_kernel": facts["loss"] == "fused",
        "model.quantization_bit": 4 if facts["base_format"] else None,
        "data.cutoff_len": facts["seq_len"] - 1,  # with packing LLaMA-Factory pads it again
        "data.packing": True,
        "trainer.per_device_train_batch_size": facts["micro_batch"],
        "trainer.gradient_accumulation_steps": facts["accumulation"],
        "trainer.bf16": facts["precision"] == "bf16-mixed",
        "trainer.fp16": facts["precision"] == "fp16-mixed",
        "trainer.torch_compile": bool(facts["compile"]),
        "tuning.finetuning_type": "lora" if tuned else "full",
        "tuning.pure_bf16": facts["precision"] == "bf16",
        "tuning.use_dora": facts["adapters"] == "dora",
    }
    if tuned:
        values |= {"tuning.lora_rank": facts["lora_rank"], "tuning.lora_target": facts["lora_modules"] or ["all"]}
    if replicated:
        values |= {"fsdp.reshard_after_forward": facts["zero"] == 3, "parallelism.dp_replicate_size": facts["dp_replicate"]}
        values["parallelism.dp_shard_size"] = facts["dp_shard"]
    elif facts["zero"]:
        values |= {"deepspeed.zero_stage": facts["zero"], "deepspeed.offload": bool(facts["optimizer_offload"])}
    return values


def axolotl_values(facts: Facts) -> dict[str, Any]:
    """Values that axolotl's schema holds for a plan."""
    deepspeed = uses_deepspeed(facts)
    fsdp = facts["zero"] > 1 and not deepspeed
    full = facts["recompute"] == "full"
    quantised = str(facts["base_format"]).startswith("nf4")
    values = {
        "base_model": facts["model_id"],
        "sequence_len": facts["seq_len"],
        "sample_packing": True,
        "micro_batch_size": facts["micro_batch"],
        "gradient_accumulation_steps": facts["accumulation"],
        "tensor_parallel_size": facts["tp"],
        "context_parallel_size": facts["cp"],
        "gradient_checkpointing": full and not fsdp,
        "bf16": facts["precision"] == "bf16-mixed",
        "adapter": None if facts["lora_rank"] is None else "qlora" if quantised else "lora",
        "lora_r": facts["lora_rank"],
        "lora_target_modules": facts["lora_modules"],
        "load_in_4bit": quantised,
        "torch_compile": facts["compile"],
        "chunked_cross_entropy": facts["loss"] == "chunked" or None,
        "liger_fused_linear_cross_entropy": facts["loss"] == "fused" or None,
    }
    if fsdp:
        values |= {
            "fsdp_version": 2,
            "fsdp_config.reshard_after_forward": facts["zero"] == 3,
            "fsdp_config.activation_checkpointing": full,
            "fsdp_config.offload_params": bool(facts["parameter_offload"]),
            "dp_replicate_size": facts["dp_replicate"],
            "dp_shard_size": facts["dp_shard"],
        }
    if deepspeed:
        values["deepspeed.zero_stage"] = facts["zero"]
    return values


def deepspeed_values(facts: Facts) -> dict[str, Any]:
    """Values that DeepSpeedConfig holds for a plan."""
    bucketing = facts["gradient_bucketing"]
    return {
        "world_size": facts["dp"],
        "train_batch_size": facts["global_batch"],
        "train_micro_batch_size_per_gpu": facts["micro_batch"],
        "gradient_accumulation_steps": facts["accumulation"],
        "zero_stage": facts["zero"],
        "bf16": facts["precision"] == "bf16-mixed",
        "fp16": facts["precision"] == "fp16-mixed",
        "optimizer": {"adamw": "adamw", "sgd": "SGD", "lion": "lion"}[facts["optimizer"]],
        **({} if bucketing is None else {"overlap_comm": bucketing}),
    }


def torchtitan_values(facts: Facts) -> dict[str, Any]:
    """Values that torchtitan's job config holds for a plan."""
    pipelined = facts["pp"] > 1
    values = {
        "training.seq_len": facts["seq_len"],
        "training.global_batch_size": facts["global_batch"],
        "training.local_batch_size": facts["micro_batch"] * (facts["accumulation"] if pipelined else 1),
        "training.dtype": "bfloat16" if facts["precision"] == "bf16" else "float32",
        "training.mixed_precision_param": "float32" if facts["precision"] == "fp32" else "bfloat16",
        "parallelism.data_parallel_replicate_degree": facts["dp_replicate"],
        "parallelism.data_parallel_shard_degree": facts["dp_shard"],
        "parallelism.tensor_parallel_degree": facts["tp"],
        "parallelism.context_parallel_degree": facts["cp"],
        "parallelism.pipeline_parallel_degree": facts["pp"],
        "parallelism.expert_parallel_degree": facts["ep"],
        "activation_checkpoint.mode": facts["recompute"],
        "compile.enable": bool(facts["compile"]),
        "optimizer.name": "AdamW",
    }
    if facts["zero"]:
        values["parallelism.fsdp_reshard_after_forward"] = "always" if facts["zero"] == 3 else "never"
    if pipelined:
        values["parallelism.pipeline_parallel_microbatch_size"] = facts["micro_batch"]
        values["parallelism.pipeline_parallel_schedule"] = "Interleaved1F1B" if facts["virtual_stages"] > 1 else "1F1B"
    return values


def torchtitan_python_values(facts: Facts) -> dict[str, Any]:
    """Values that the config of torchtitan 0.3 holds for a plan."""
    same = torchtitan_values({**facts, "recompute": ""})
    kinds = {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}
    values = {name: value for name, value in same.items() if not name.startswith(("activation_checkpoint", "optimizer"))}
    return {**values, "activation_checkpoint": kinds[facts["recompute"]]}


def automodel_values(facts: Facts) -> dict[str, Any]:
    """Values that NeMo Automodel's typed sections hold for a plan."""
    sharded = facts["zero"] > 0
    losses = {None: "MaskedCrossEntropyConfig", "fused": "FusedLinearCEConfig", "chunked": "ChunkedCEConfig"}
    values = {
        "strategy": "FSDP2Config" if sharded else "DDPConfig",
        "global_batch_size": facts["global_batch"],
        "local_batch_size": facts["micro_batch"],
        "tp_size": facts["tp"],
        "cp_size": facts["cp"],
        "pp_size": facts["pp"],
        "ep_size": facts["ep"],
        "activation_checkpointing": facts["recompute"] == "full",
        "loss": losses[facts["loss"]],
        "model.pretrained_model_name_or_path": facts["model_id"],
        "seq_len": facts["seq_len"],
        "peft.dim": facts["lora_rank"],
        "fp8": facts["precision"] == "fp8-current" or None,
    }
    if sharded:
        values["dp_replicate_size"] = facts["dp_replicate"]
        values["strategy.sequence_parallel"] = facts["sequence_parallel"]
        values["strategy.reshard_after_forward"] = False if facts["zero"] == 2 else None
    return values


def megatron_values(facts: Facts) -> dict[str, Any]:
    """Values that megatron-core's records hold for a plan."""
    full, selective = facts["recompute"] == "full", facts["recompute"] == "selective"
    values = {
        "tensor_model_parallel_size": facts["tp"],
        "pipeline_model_parallel_size": facts["pp"],
        "context_parallel_size": facts["cp"],
        "recompute_granularity": "full" if full else "selective" if selective else None,
        "num_layers": facts["model.num_hidden_layers"],
        "hidden_size": facts["model.hidden_size"],
        "num_attention_heads": facts["model.num_attention_heads"],
        "num_moe_experts": facts.get("experts.num_experts"),
    }
    if facts["zero"]:
        values["overlap_grad_reduce"] = True
        if facts["optimizer"] != "muon":  # dist_muon shards by itself
            values["use_distributed_optimizer"] = True
    if facts["sequence_parallel"]:
        values["sequence_parallel"] = True
    if "experts.num_experts" in facts:
        values |= {"expert_model_parallel_size": facts["ep"], "moe_router_topk": facts["experts.top_k"]}
    return values


def bridge_values(facts: Facts) -> dict[str, Any]:
    """Values of a recipe's overrides for a plan."""
    return {
        "dataset.seq_length": facts["seq_len"],
        "train.micro_batch_size": facts["micro_batch"],
        "train.global_batch_size": facts["global_batch"],
        "model.tensor_model_parallel_size": facts["tp"],
        "model.pipeline_model_parallel_size": facts["pp"],
        "model.context_parallel_size": facts["cp"],
        "model.sequence_parallel": facts["sequence_parallel"],
        "ddp.use_distributed_optimizer": facts["zero"] == 1,
        "model.recompute_granularity": None if facts["recompute"] == "none" else facts["recompute"],
    }


def swift_values(facts: Facts) -> dict[str, Any]:
    """Return the values that ms-swift's arguments and its DeepSpeed preset hold for a plan."""
    tuned, quantised = facts["lora_rank"] is not None, facts["base_format"] is not None
    mixed = facts["precision"] in ("bf16-mixed", "fp16-mixed")
    full_fp16 = facts["precision"] == "fp16-mixed" and tuned
    values = {
        "model": facts["model_id"],
        "tuner_type": "lora" if tuned else "full",
        "use_dora": facts["adapters"] == "dora",
        "quant_method": "bnb" if quantised else None,
        "quant_bits": 4 if quantised else None,
        "max_length": facts["seq_len"],
        "padding_free": True,
        "per_device_train_batch_size": facts["micro_batch"],
        "gradient_accumulation_steps": facts["accumulation"],
        "sequence_parallel_size": facts["cp"],
        "gradient_checkpointing": facts["recompute"] == "full",
        "attn_impl": "flash_attention_3" if facts["attention_kernel"] == "flash3" else "flash_attn",
        "use_liger_kernel": facts["loss"] == "fused",
        "torch_compile": bool(facts["compile"]),
        "deepspeed.zero_stage": facts["zero"],
        "deepspeed.offload_optimizer": "cpu" if facts["optimizer_offload"] else "none",
        "deepspeed.offload_param": "cpu" if facts["parameter_offload"] else "none",
    }
    if facts["precision"] != "bf16":
        values |= {"bf16": facts["precision"] == "bf16-mixed", "fp16": facts["precision"] == "fp16-mixed"}
    if full_fp16 or not mixed:
        values["torch_dtype"] = {"fp16-mixed": "float16", "fp32": "float32", "bf16": "bfloat16"}[facts["precision"]]
    if tuned:
        values |= {"lora_rank": facts["lora_rank"], "target_modules": facts["lora_modules"] or ["all-linear"]}
    return values


def swift_megatron_values(facts: Facts) -> dict[str, Any]:
    """Return the values that the arguments of ms-swift on Megatron hold for a plan."""
    tuned, sharded, muon = facts["lora_rank"] is not None, facts["zero"] == 1, facts["optimizer"] == "muon"
    fp8 = {"fp8-delayed": "delayed", "fp8-current": "tensorwise", "fp8-block": "blockwise", "mxfp8": "mxfp8"}
    values = {
        "model": facts["model_id"],
        "tuner_type": "lora" if tuned else "full",
        "max_length": facts["seq_len"],
        "packing": True,
        "micro_batch_size": facts["micro_batch"],
        "global_batch_size": facts["global_batch"],
        "tensor_model_parallel_size": facts["tp"],
        "pipeline_model_parallel_size": facts["pp"],
        "context_parallel_size": facts["cp"],
        "sequence_parallel": facts["sequence_parallel"],
        "virtual_pipeline_model_parallel_size": facts["virtual_stages"] if facts["virtual_stages"] > 1 else None,
        "use_distributed_optimizer": sharded and not muon,  # dist_muon shards by itself
        "overlap_grad_reduce": sharded,
        "overlap_param_gather": sharded,
        "optimizer": {"adamw": "adam", "momentum": "sgd", "muon": "dist_muon" if sharded else "muon"}[facts["optimizer"]],
        "recompute_granularity": facts["recompute"],
        "attention_backend": "fused" if facts["attention_kernel"] == "cudnn" else "flash",
        "fp8_recipe": fp8.get(facts["precision"], "delayed"),
        "fp4_format": "e2m1" if facts["precision"] == "nvfp4" else None,
        "torch_dtype": {"fp32": "float32", "fp16-mixed": "float16"}.get(facts["precision"]),
    }
    if tuned:
        values |= {"lora_rank": facts["lora_rank"], "target_modules": facts["lora_modules"] or ["all-linear"]}
    if "experts.num_experts" in facts:
        values |= {"expert_model_parallel_size": facts["ep"], "expert_tensor_parallel_size": facts["etp"]}
    return values


def maxtext_values(facts: Facts) -> dict[str, Any]:
    """Return the values that MaxText's configuration holds for a plan: also the sizes of the model that it names."""
    sharded, sequence = facts["zero"] == 3, facts["sequence_parallel"]
    return {
        "num_target_devices": facts["chips"],
        "global_batch_size_to_train_on": facts["global_batch"],
        "micro_batch_size_to_train_on": facts["global_batch"] // facts["accumulation"],
        "gradient_accumulation_steps": facts["accumulation"],
        "max_target_length": facts["seq_len"],
        "dtype": "float32" if facts["precision"] == "fp32" else "bfloat16",
        "weight_dtype": "bfloat16" if facts["precision"] == "bf16" else "float32",
        "ici_data_parallelism": facts["dp_replicate"] if sharded else facts["dp"],
        "ici_fsdp_parallelism": facts["dp_shard"] if sharded else 1,
        "ici_tensor_parallelism": 1 if sequence else facts["tp"],
        "ici_tensor_sequence_parallelism": facts["tp"] if sequence else 1,
        "ici_context_parallelism": facts["cp"],
        "remat_policy": "full" if facts["recompute"] == "full" else "minimal",
        "opt_type": "adamw",
        "base_emb_dim": facts["model.hidden_size"],
        "base_num_decoder_layers": facts["model.num_hidden_layers"],
        "base_num_query_heads": facts["model.num_attention_heads"],
        "base_num_kv_heads": facts["model.num_key_value_heads"],
        "head_dim": facts["model.head_dim"],
        "vocab_size": facts["model.vocab_size"],
    }


#: Framework -> values that its parser holds for a plan; a change to the files that it must refuse: name, text, other text.
FRAMEWORKS: dict[str, tuple[Callable[[Facts], dict[str, Any]], tuple[str, str, str]]] = {
    "trl": (trl_values, ("plan.yaml", "per_device_train_batch_size", "per_gpu_batch_size")),
    "llama-factory": (llama_factory_values, ("plan.yaml", "disable_gradient_checkpointing", "gradient_checkpointing_off")),
    "axolotl": (axolotl_values, ("plan.yaml", 'attn_implementation: "', 'attn_implementation: "no_')),
    "torchtitan-python": (torchtitan_python_values, ("plan.py", "tensor_parallel_degree", "tensor_parallel_size")),
    "deepspeed": (deepspeed_values, ("plan.json", '"stage": ', '"stage": 9')),
    "megatron": (megatron_values, ("plan.sh", "--num-attention-heads ", "--num-attention-heads 7")),
    "megatron-bridge": (bridge_values, ("plan.sh", "ddp.use_distributed_optimizer", "ddp.distributed_optimizer")),
    "torchtitan": (torchtitan_values, ("plan.toml", "tensor_parallel_degree", "tensor_parallel_size")),
    "nemo-automodel": (automodel_values, ("plan.yaml", "activation_checkpointing", "activation_recomputation")),
    "ms-swift": (swift_values, ("plan.sh", "--per-device-train-batch-size", "--per-gpu-batch-size")),
    "swift-megatron": (swift_megatron_values, ("plan.sh", "--attention-backend", "--attention-kernel")),
    "maxtext": (maxtext_values, ("plan.yml", "ici_fsdp_parallelism", "ici_fsdp_size")),
}


def draw_exports(framework: str, folder: Path, count: int) -> list[tuple[Path, Facts]]:
    """Write exports of random plans, each into a folder of its own."""
    rng = random.Random(3)
    exports: list[tuple[Path, Facts]] = []
    while len(exports) < count:
        plan = draw_plan(framework, rng)
        facts = facts_of_plan(plan, load_cluster(plan.cluster))
        try:
            exported = write_config(facts, table_named(framework), prediction=None)
        except InputError:
            continue
        target = folder / str(len(exports))
        target.mkdir()
        write_export(exported, target)
        exports.append((target, facts))
    return exports


def read_with_parser(framework: str, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Values, or the refusal, of the framework's parser for each folder."""
    command = [str(PYTHON), str(Path(__file__).with_name("readers.py")), framework]
    done = subprocess.run(command, input=json.dumps([str(path) for path in folders]), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="the frameworks' parsers are not installed: run make parsers")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_parser_holds_the_values_of_the_plan(framework: str, tmp_path: Path) -> None:
    values_of, (name, text, other) = FRAMEWORKS[framework]
    exports = draw_exports(framework, tmp_path, NUM_PLANS)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in exports[0][0].iterdir():
        content = file.read_text(encoding="utf-8")
        (broken / file.name).write_text(content.replace(text, other, 1) if file.name == name else content, encoding="utf-8")
    *answers, refusal = read_with_parser(framework, [*(target for target, _ in exports), broken])
    for (target, facts), answer in zip(exports, answers, strict=True):
        assert "values" in answer, f"{target.name}: {answer}"
        wanted = values_of(facts)
        assert {key: answer["values"].get(key) for key in wanted} == wanted
    assert "refused" in refusal


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="the frameworks' parsers are not installed: run make parsers")
def test_maxtext_has_every_model_that_the_table_names(tmp_path: Path) -> None:
    ((export, facts),) = draw_exports("maxtext", tmp_path, 1)
    text = (export / "plan.yml").read_text(encoding="utf-8")
    expression = dict(table_named("maxtext").let)["maxtext_model"]
    drawn = evaluate(expression, facts)
    folders: dict[str, Path] = {}
    for name in filter(None, (evaluate(expression, {"model.name": model}) for model in list_models())):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "plan.sh").write_bytes((export / "plan.sh").read_bytes())
        (folders[name] / "plan.yml").write_text(text.replace(f'model_name: "{drawn}"', f'model_name: "{name}"'), encoding="utf-8")
    answers = read_with_parser("maxtext", list(folders.values()))
    assert [answer.get("values", answer).get("model_name") for answer in answers] == list(folders)


def test_every_exported_framework_has_a_parser_or_a_reason() -> None:
    without = {"nanotron"}  # its schema is checked in tests/configs/test_write.py
    assert {name for name, table in load_tables().items() if table.outputs} == {*FRAMEWORKS, *without}
