"""Every shipped model loads, names its source and has no unchecked key."""

import json
from pathlib import Path

import pytest

import perfmodel.workload.models as models
from perfmodel.foundation.errors import InputError
from perfmodel.workload.config import TransformerConfig

FILES = sorted((Path(models.__file__).parent / "models").glob("*.json"))

#: Names that users and checks from outside call.
PROMISED = {
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3.1-8b",
    "llama-3-70b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "mistral-7b",
    "qwen2.5-7b",
    "qwen2.5-72b",
    "qwen3-8b",
    "gemma-7b",
    "gemma-2-9b",
    "phi-2",
    "gpt-neox-20b",
    "falcon-7b",
    "falcon-40b",
    "opt-125m",
    "opt-175b",
    "megatron-1.7b",
    "megatron-3.6b",
    "megatron-7.5b",
    "megatron-18b",
    "megatron-22b",
    "megatron-39b",
    "megatron-76b",
    "megatron-145b",
    "megatron-175b",
    "megatron-310b",
    "megatron-530b",
    "megatron-1t",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "qwen2-57b-a14b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama-4-scout",
    "llama-4-maverick",
    "glm-4.5",
    "glm-4.5-air",
    "glm-5",
    "dbrx",
    "grok-1",
    "minimax-m2",
    "qwen3-next-80b-a3b",
    "nemotron-h-8b",
    "gemma-3-27b",
}


def test_the_promised_names_are_there():
    assert set(models.list_models()) >= PROMISED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_model_loads_and_has_a_source(path):
    model = models.load_model(path.stem)
    assert isinstance(model, TransformerConfig)
    assert model.name == path.stem
    assert model.origin.source == json.loads(path.read_text(encoding="utf-8"))["_source"]
    assert len(model.origin.source) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_name_agrees_with_the_size(path):
    size = path.stem.split("-")[-1]
    unit = {"m": 1e6, "b": 1e9, "t": 1e12}.get(size[-1])
    if unit is None or not size[0].isdigit() or "x" in size:  # mixtral-8x7b: its experts share their attention
        return
    # Marketing rounds freely: gemma-7b has 8.5 B, llama-3.2-1b 1.24 B, olmo-2-1b 1.48 B.
    allowed = 0.5 if path.stem == "olmo-2-1b" else 0.25
    assert float(size[:-1]) * unit == pytest.approx(models.load_model(path.stem).num_parameters, rel=allowed)


HUB_IDS = {hub_id: path.stem for path in FILES for hub_id in json.loads(path.read_text(encoding="utf-8")).get("_hub_ids", ())}


def test_a_hub_id_stands_for_one_shipped_model():
    listed = [hub_id for path in FILES for hub_id in json.loads(path.read_text(encoding="utf-8")).get("_hub_ids", ())]
    assert len({hub_id.lower() for hub_id in listed}) == len(listed) > 100
    for hub_id in ("meta-llama/Llama-3.1-8B", "qwen/qwen2.5-7b-instruct", "deepseek-ai/DeepSeek-R1"):
        name = next(name for known, name in HUB_IDS.items() if known.lower() == hub_id.lower())
        assert models.load_model(hub_id) == models.load_model(name)


@pytest.mark.parametrize(
    ("copy", "name"),
    [
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("TheBloke/Llama-2-7B-GPTQ", "llama-2-7b"),
        ("models/Qwen2.5-7B", "qwen2.5-7b"),
        ("deepseek-r1", "deepseek-v3"),
        ("Qwen2.5-72B-Instruct", "qwen2.5-72b"),
    ],
)
def test_a_copy_or_a_name_without_owner_has_the_sizes_of_the_hub_model(copy, name):
    assert models.load_model(copy) == models.load_model(name)


@pytest.mark.parametrize("other", ["someone/Qwen3-8B-pruned", "someone/gpt", "someone/-hf", "someone/hf"])
def test_another_name_is_no_copy(other):
    with pytest.raises(InputError, match="no shipped model has this hub id"):
        models.load_model(other)


def test_the_source_of_a_config_from_the_hub_names_its_first_id():
    for path in FILES:
        config = json.loads(path.read_text(encoding="utf-8"))
        if "_hub_ids" in config:
            assert config["_source"].startswith(f"Hugging Face {config['_hub_ids'][0]},")


def test_an_unknown_hub_id_asks_for_its_config():
    with pytest.raises(InputError, match=r"no shipped model has this hub id; give its config.json; did you mean 'llama-3.1-8b'"):
        models.load_model("meta-llama/Llama-3.1-8B-Vision")


VISION_IDS = {hub_id: path.stem for path in FILES for hub_id in json.loads(path.read_text(encoding="utf-8")).get("_vision_hub_ids", ())}


def test_a_vision_language_model_by_its_hub_id_is_its_language_model():
    assert len({hub_id.lower() for hub_id in VISION_IDS}) == len(VISION_IDS) > 20
    assert not {hub_id.lower() for hub_id in VISION_IDS} & {hub_id.lower() for hub_id in HUB_IDS}
    for hub_id, name in VISION_IDS.items():
        model = models.load_model(hub_id)
        assert model == models.load_model(name).having(left_out="its vision tower")
    assert models.load_model("unsloth/Qwen2.5-VL-7B-Instruct-bnb-4bit").origin.left_out
