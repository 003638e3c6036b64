"""Models by name: configs in the folder `models`, in Hugging Face's form, each with its source.

`_hub_ids` of a config are the Hugging Face hub ids with these sizes: the one that it was read from, then further releases, such as
instruction-tuned ones. They are resolved offline, with or without their owner (`deepseek-r1`). A copy under another owner or with quantised
weights (`unsloth/Qwen3-8B-bnb-4bit`) has the sizes of the id with the same name. `_vision_hub_ids` are vision-language models whose
language model has these sizes; their vision tower is not counted.
"""

import json
import re
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.foundation.values import check_path
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.huggingface import VISION_TOWER, model_of, read_config

_FOLDER = Path(__file__).parent / "models"


_HUB_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w.-]{1,95}", re.ASCII)
#: Suffixes of the names of copies, mostly of quantised weights.
_PACKED = re.compile(r"(?:-(?:hf|unsloth|bnb|gptq|awq|nvfp4|mxfp4|fp8|bf16|fp16|nf4|int4|int8|4bit|8bit|dequantized|dynamic))+$")


@lru_cache(maxsize=2)
def _hub_ids(key: str) -> dict[str, str]:
    """Return hub id in lower case -> name of the shipped model. key: `_hub_ids` or `_vision_hub_ids`."""
    names = {}
    for path in _FOLDER.glob("*.json"):
        for hub_id in json.loads(path.read_text(encoding="utf-8")).get(key, ()):
            names[hub_id.lower()] = path.stem
    return names


def hub_id_of(name: str) -> str:
    """Return the hub id that a shipped model was read from; the name itself if there is none."""
    path = _FOLDER / f"{name}.json"
    if not path.is_file():
        return name
    return str(next(iter(json.loads(path.read_text(encoding="utf-8")).get("_hub_ids", ())), name))


def list_models() -> tuple[str, ...]:
    """Return the model names for `load_model`, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_model(name_or_path: str | Path) -> TransformerConfig:
    """Return a shipped model by name or hub id, or any other model by the path of its config.json or folder."""
    check_path(name_or_path, "model")
    text = str(name_or_path)
    shipped = _FOLDER / f"{text}.json"
    try:
        if Path(text).name == text and shipped.is_file():
            return _shipped_model(text)
        if text and Path(text).exists():
            return read_config(Path(text))
    except (OSError, ValueError) as error:  # a name that is invalid as a path
        if isinstance(error, InputError):
            raise
    has_owner = _HUB_ID.fullmatch(text) is not None
    name = _PACKED.sub("", (text.partition("/")[2] if has_owner else text).lower())
    for ids, left_out in ((_hub_ids("_hub_ids"), ""), (_hub_ids("_vision_hub_ids"), VISION_TOWER)):
        model_name = ids.get(text.lower())
        if model_name is None:  # a copy of the only model with its name
            models = {model for hub_id, model in ids.items() if _PACKED.sub("", hub_id.partition("/")[2]) == name}
            model_name = models.pop() if len(models) == 1 else None
        if model_name is not None:
            return _shipped_model(model_name).having(left_out=left_out)
    shown = text if len(text) <= 80 else text[:77] + "..."
    if text.endswith(".json") or text.startswith((".", "/", "~")):
        raise InputError(f"model={shown}: there is no such file; give a config.json, its folder, or the name of a shipped model")
    if has_owner:
        near = suggest(text.partition("/")[2], list_models())
        raise InputError(f"model={shown}: no shipped model has this hub id; give its config.json{near if 'did you mean' in near else ''}")
    near = suggest(text, list_models())
    remedy = near if "did you mean" in near else "; `perfmodel models` lists them"
    raise InputError(f"model={shown}: no shipped model has this name, and there is no such file{remedy}")


@lru_cache(maxsize=256)
def _shipped_model(name: str) -> TransformerConfig:
    path = _FOLDER / f"{name}.json"
    return model_of(json.loads(path.read_text(encoding="utf-8")), origin=str(path), name=name)


def is_model(name_or_path: str | Path) -> bool:
    """Return whether `load_model` returns a model."""
    try:
        load_model(name_or_path)
    except InputError:
        return False
    return True
