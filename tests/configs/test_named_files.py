"""Launch lines whose DeepSpeed or accelerate configuration is not next to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfmodel.configs.read import read_setup
from perfmodel.foundation.errors import InputError

TRL = "accelerate launch --num_processes 8 --config_file {name} sft.py --model_name_or_path Qwen/Qwen2.5-14B --max_length 4096"
FACTORY = "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\ndeepspeed: {name}\n"


def script(folder: Path, name: str) -> Path:
    path = folder / "go.sh"
    path.write_text(TRL.format(name=name))
    return path


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("examples/accelerate_configs/deepspeed_zero3.yaml", {"zero": 3}),
        ("recipes/accelerate_configs/zero2.yaml", {"zero": 2}),
        ("examples/accelerate_configs/fsdp2.yaml", {"zero": 3}),
        ("examples/accelerate/fsdp_config_offload.yaml", {"zero": 3, "parameter_offload": True}),
        ("examples/accelerate_configs/multi_gpu.yaml", {"zero": 0}),
    ],
)
def test_configurations_that_frameworks_ship_are_read_by_their_names(tmp_path, name, facts):
    setup = read_setup(script(tmp_path, name), {"chips": 8})
    assert facts.items() <= setup.facts.items()
    assert any(f"config_file={name}: is not next to go.sh; read from its name" in note for note in setup.notes)


def test_offloads_of_a_named_configuration_are_read(tmp_path):
    path = tmp_path / "lora.yaml"
    path.write_text(FACTORY.format(name="examples/deepspeed/ds_z3_offload_config.json"))
    facts = read_setup(path, {"chips": 8}).facts
    assert (facts["zero"], facts["optimizer_offload"], facts["parameter_offload"]) == (3, True, True)


def test_a_file_next_to_the_script_counts_more_than_its_name(tmp_path):
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\nnum_processes: 8\n")
    assert read_setup(script(tmp_path, "zero3.yaml")).facts["zero"] == 1


@pytest.mark.parametrize("name", ["configs/mine.yaml", "my.json"])
def test_other_missing_configurations_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=rf"^config_file={name}: is not next to go.sh, and decides .*; copy it there$"):
        read_setup(script(tmp_path, name))
