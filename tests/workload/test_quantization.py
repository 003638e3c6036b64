"""Formats of weights that the name of a checkpoint states."""

import pytest

import perfmodel
from perfmodel.workload.quantization import QUANTIZATIONS, format_in_name

NAMES = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "w4a16",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": "w4a16",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": "w4a16",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": "int8-weights",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": "int8",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": "fp8",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "fp8",
    "Qwen/Qwen3-8B-FP8": "fp8-block",
    "nvidia/Llama-3.3-70B-Instruct-FP4": "nvfp4",
    "Qwen/Qwen2.5-7B-Instruct": None,
    "fp8": None,
    "llama-3.1-8b": None,
}


@pytest.mark.parametrize(("checkpoint", "quantization"), NAMES.items())
def test_a_checkpoint_names_its_format(checkpoint, quantization):
    assert format_in_name(checkpoint) == quantization
    assert quantization is None or quantization in QUANTIZATIONS


@pytest.mark.parametrize("checkpoint", [name for name, quantization in NAMES.items() if quantization])
def test_a_service_of_such_a_checkpoint_has_its_format(checkpoint):
    served = perfmodel.serve(model=checkpoint, cluster="dgx-b200", chips=1, input_len=1024, output_len=128, concurrency=1)
    assert served.job.quantization.checkpoint == QUANTIZATIONS[NAMES[checkpoint]].checkpoint
    assert any(note.startswith(f"quantization: not given, and {checkpoint} is published in") for note in served.notes)
    given = perfmodel.serve(
        model=checkpoint, cluster="dgx-b200", chips=1, input_len=1024, output_len=128, concurrency=1, quantization="bf16"
    )
    assert given.job.quantization.name == "bf16"
