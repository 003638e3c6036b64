"""Plans that a framework can run, drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.framework_ref import read_settings, stated
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.models import load_model
from perfmodel.workload.training import training_of

#: Framework -> profile of its plans, and what of a plan its files can say.
FRAMEWORKS = {
    "torchtitan": ("torchtitan", {"zero": (0, 2, 3), "pp": (1, 2, 4), "tp": (1, 2, 4), "cp": (1, 2), "recompute": ("none", "full")}),
    "megatron": ("megatron", {"zero": (0, 1), "pp": (1, 2, 4), "tp": (1, 2, 4, 8), "cp": (1, 2), "recompute": ("none", "selective")}),
    "nemo-automodel": ("nemo-automodel", {"zero": (0, 2, 3), "pp": (1,), "tp": (1, 2), "cp": (1, 2), "recompute": ("none", "full")}),
    "trl": ("hf-trainer", {"zero": (0, 1, 2, 3), "pp": (1,), "tp": (1,), "cp": (1, 2), "recompute": ("none", "full")}),
    "llama-factory": ("llama-factory", {"zero": (0, 1, 2, 3), "pp": (1,), "tp": (1, 1, 2), "cp": (1,), "recompute": ("none", "full")}),
    "axolotl": ("hf-trainer", {"zero": (0, 1, 2, 3), "pp": (1,), "tp": (1, 2), "cp": (1, 2), "recompute": ("none", "full")}),
    "ms-swift": ("hf-trainer", {"zero": (0, 1, 2, 3), "pp": (1,), "tp": (1,), "cp": (1, 2), "recompute": ("none", "full")}),
    "torchtitan-python": ("torchtitan", {"zero": (0, 2, 3), "pp": (1, 2), "tp": (1, 2), "cp": (1, 2), "recompute": ("none", "full")}),
    "megatron-bridge": ("nemo", {"zero": (0, 1), "pp": (1, 2, 4), "tp": (1, 2, 4), "cp": (1, 2), "recompute": ("none", "selective")}),
    "swift-megatron": ("megatron", {"zero": (0, 1), "pp": (1, 2, 4), "tp": (1, 2, 4), "cp": (1, 2), "recompute": ("none", "full")}),
    "deepspeed": ("deepspeed", {"zero": (0, 1, 2, 3), "pp": (1,), "tp": (1,), "cp": (1,), "recompute": ("none", "full")}),
    "nanotron": ("nanotron", {"zero": (0, 1), "pp": (1, 2, 4), "tp": (1, 2, 4), "cp": (1,), "recompute": ("none", "full")}),
    "maxtext": ("xla", {"zero": (0, 3), "pp": (1,), "tp": (1, 2, 4), "cp": (1,), "recompute": ("none", "full")}),
}  # fmt: skip
#: Framework -> settings and precisions that its files can say.
SETTINGS = {
    "torchtitan": {"compile": (True,), "fused_optimizer": (True, False), "cp_form": ("all-gather",)},
    "megatron": {"fused_cross_entropy": (True,), "attention_kernel": ("cudnn",), "fp32_gradient_accumulation": (False,)},
    "nemo-automodel": {"compile": (True,), "loss": ("fused", "chunked"), "attention_kernel": ("flash2", "flash3")},
    "trl": {"compile": (True,), "loss": ("fused", "chunked"), "attention_kernel": ("flash2", "flash3"), "cp_form": ("ulysses",)},
    "llama-factory": {"compile": (True,), "loss": ("fused",), "attention_kernel": ("flash2", "flash3")},
    "axolotl": {"compile": (True,), "loss": ("fused", "chunked"), "attention_kernel": ("flash2", "flash3"), "cp_form": ("all-gather",),
        "fused_rmsnorm": (True,)},
    "ms-swift": {"compile": (True,), "loss": ("fused",), "attention_kernel": ("flash2", "flash3"), "cp_form": ("ulysses",)},
    "torchtitan-python": {"compile": (True,), "loss": ("chunked",)},
    "megatron-bridge": {"fused_cross_entropy": (True, False), "fp32_gradient_accumulation": (False,), "cp_form": ("zigzag", "ulysses")},
    "swift-megatron": {"fused_cross_entropy": (True,), "attention_kernel": ("cudnn",), "cp_form": ("zigzag", "ulysses")},
    "deepspeed": {"gradient_bucketing": (True, False)},
    "nanotron": {"fused_optimizer": (True, False), "gradient_bucket_mb": (50.0,)},
}  # fmt: skip
PRECISIONS = {
    "torchtitan": ("bf16-mixed", "bf16", "fp32"),
    "megatron": ("bf16-mixed", "fp16-mixed", "fp32", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"),
    "nemo-automodel": ("bf16-mixed", "fp8-current"), "trl": ("bf16-mixed", "fp16-mixed", "fp32"),
    "llama-factory": ("bf16-mixed", "fp16-mixed", "bf16"), "axolotl": ("bf16-mixed", "fp16-mixed", "fp32"),
    "ms-swift": ("bf16-mixed", "fp16-mixed", "fp32", "bf16"), "torchtitan-python": ("bf16-mixed", "bf16", "fp32"),
    "megatron-bridge": ("bf16-mixed", "fp16-mixed", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"),
    "swift-megatron": ("bf16-mixed", "fp16-mixed", "fp32", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"),
    "deepspeed": ("bf16-mixed", "fp16-mixed"), "nanotron": ("bf16-mixed", "fp16-mixed", "fp32"), "maxtext": ("bf16-mixed", "bf16", "fp32"),
}  # fmt: skip
TITAN = ("torchtitan", "torchtitan-python")
MEGATRON = ("megatron", "megatron-bridge", "swift-megatron")
TRAINERS = ("trl", "llama-factory", "axolotl", "ms-swift")
OPTIMIZERS = {
    **dict.fromkeys(
        TRAINERS, ("adamw", "adamw-8bit", "adamw-4bit", "paged-adamw", "paged-adamw-8bit", "adafactor", "lion", "lion-8bit", "sgd")
    ),
    "megatron": ("adamw", "momentum", "muon"), "swift-megatron": ("adamw", "momentum", "muon"), "megatron-bridge": ("adamw", "momentum"),
    "nanotron": ("adamw", "sgd"), "deepspeed": ("adamw", "sgd", "lion"),
}  # fmt: skip
TRAINS = {
    **dict.fromkeys((*TRAINERS, "nemo-automodel"), ("full", "lora:16", "qlora:8", "lora:4:q_proj+v_proj", "dora:16", "qdora:8")),
    "megatron-bridge": ("full", "full", "lora:16", "dora:8"), "swift-megatron": ("full", "full", "lora:16", "lora:4:q_proj+v_proj"),
}  # fmt: skip
MODELS = ("llama-3-8b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "megatron-22b")


def draw_plan(framework: str, rng: random.Random) -> Plan:
    """A valid plan of the framework; knobs that the model or the layout rules out are drawn again."""
    profile, knobs = FRAMEWORKS[framework]
    while True:
        model = load_model(rng.choice(MODELS))
        values = {name: rng.choice(values) for name, values in knobs.items()}
        chips, micro = rng.choice((8, 16, 64)), rng.choice((1, 2, 4))
        virtual = rng.choice((1, 1, 2)) if values["pp"] > 1 and framework in (*TITAN, *MEGATRON) else 1
        if framework in (*TRAINERS, "deepspeed") or (framework == "nemo-automodel" and values["tp"] > 1):
            values["sequence_parallel"] = False if values["tp"] > 1 else None
        if rng.random() < 0.3 and values["zero"] in (2, 3) and framework in (*TITAN, *TRAINERS, "nemo-automodel", "maxtext"):
            values["dp_replicate"] = 2
        if model.parts.experts is not None and framework in (*TITAN, *MEGATRON):
            values["ep"] = rng.choice((1, 2, 4))
        train = rng.choice(TRAINS.get(framework, ("full",)))
        settings = {name: rng.choice(values) for name, values in SETTINGS.get(framework, {}).items() if rng.random() < 0.3}
        if framework in TRAINERS and values["zero"] and rng.random() < 0.2:
            settings |= {"optimizer_offload": True} | ({"parameter_offload": True} if values["zero"] == 3 else {})
        if values["cp"] == 1:
            settings.pop("cp_form", None)
        precision, optimizer = rng.choice(PRECISIONS[framework]), rng.choice(OPTIMIZERS.get(framework, ("adamw",)))
        if framework == "nanotron" and optimizer == "sgd":
            settings.pop("fused_optimizer", None)
        job = TrainingJob(model=model, global_batch=chips * micro * rng.choice((1, 2, 4)), seq_len=rng.choice((1024, 4096)))
        try:
            job = replace(job, train=training_of(train), precision=Precision(precision), optimizer=Optimizer(optimizer))
            assumed = stated(profile, read_settings(settings))
            return make_plan(
                job, cluster="dgx-b200", num_chips=chips, micro_batch=micro, virtual_stages=virtual, profile=assumed,
                **{name: value for name, value in values.items() if value is not None},
            )  # fmt: skip
        except InputError:
            continue
