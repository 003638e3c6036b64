"""Training scripts of TRL, transformers and Unsloth, read without being executed."""

from __future__ import annotations

import pytest

from perfmodel.configs.read import read_setup
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from

UNSLOTH = """
from unsloth import FastLanguageModel
max_seq_length = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length = max_seq_length, dtype = None, load_in_4bit = True,
)
model = FastLanguageModel.get_peft_model(model, r = 32, target_modules = ["q_proj", "v_proj"], use_gradient_checkpointing = "unsloth")
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer,
    args = SFTConfig(per_device_train_batch_size = 2, gradient_accumulation_steps = 4, optim = "adamw_8bit"),
)
"""
TRL = """
import torch
MODEL = "meta-llama/Llama-2-13b-hf"
def main():
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=quantized, attn_implementation="flash_attention_2")
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    args = SFTConfig(max_length=2 * 1024, per_device_train_batch_size=3, gradient_checkpointing=False, packing=True, bf16=True)
    SFTTrainer(model=model, args=args, peft_config=LoraConfig(target_modules="all-linear")).train()
"""
TRAINER = """
model = transformers.AutoModelForCausalLM.from_pretrained(script_args.model)
args = transformers.TrainingArguments(per_device_train_batch_size=8, learning_rate=script_args.lr, deepspeed="ds_zero3.json")
"""


def facts_of(tmp_path, text, **given):
    path = tmp_path / "train.py"
    path.write_text(text)
    setup = read_setup(path, {"chips": 1, "nodes": 1, **given})
    return setup.table.framework, setup.facts


def test_a_script_of_unsloth_is_a_job(tmp_path):
    framework, facts = facts_of(tmp_path, UNSLOTH)
    assert framework == "Unsloth"
    wanted = {"seq_len": 4096, "micro_batch": 2, "accumulation": 4, "lora_rank": 32, "base_format": "nf4-dq", "optimizer": "adamw-8bit"}
    assert wanted.items() <= facts.items()
    assert "q_proj" in facts["train"]
    assert "up_proj" not in facts["train"]


def test_full_fine_tuning_undoes_adapters_and_the_quantised_base(tmp_path):
    script = UNSLOTH.replace("load_in_4bit = True", "full_finetuning = True")
    assert facts_of(tmp_path, script)[1]["train"] == "full"
    path = tmp_path / "train.py"
    assert start_from(path, Request(cluster="rtx4090-24gb", chips=1)).plan.job.train.is_full


def test_a_script_of_trl_is_a_job_with_constants_followed(tmp_path):
    framework, facts = facts_of(tmp_path, TRL)
    assert framework == "TRL"
    wanted = {"model": "meta-llama/Llama-2-13b-hf", "seq_len": 2048, "micro_batch": 3, "recompute": "none", "packed": True, "lora_rank": 8}
    assert wanted.items() <= facts.items()
    assert facts["base_format"] == "nf4-dq"


def test_arguments_that_are_no_constants_are_asked_for(tmp_path):
    framework, facts = facts_of(tmp_path, TRAINER, chips=8)
    assert (framework, facts["micro_batch"], facts["zero"]) == ("Hugging Face Trainer", 8, 3)
    path = tmp_path / "train.py"
    with pytest.raises(InputError, match=r"train.py \(Hugging Face Trainer\): --model, --seq_len: missing in the file"):
        start_from(path, Request(cluster="dgx-h100", chips=8), spelled=lambda name: f"--{name}")


def test_a_chip_without_bf16_trains_in_fp16_with_unsloth(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(UNSLOTH)
    assert str(start_from(path, Request(cluster="t4-16gb", chips=1)).plan.job.precision) == "fp16-mixed"
    assert str(start_from(path, Request(cluster="rtx4090-24gb", chips=1)).plan.job.precision) == "bf16-mixed"


def test_other_scripts_are_refused(tmp_path):
    with pytest.raises(InputError, match="no call that sets up a trainer"):
        facts_of(tmp_path, "print(1)\n")
