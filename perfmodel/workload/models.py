"""Models by name: the configs beside this file, in Hugging Face's form, each with its source."""

from pathlib import Path

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.foundation.values import check_path
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.huggingface import read_config

_FOLDER = Path(__file__).parent / "models"


def list_models() -> tuple[str, ...]:
    """The names that `load_model` knows, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_model(name_or_path: str | Path) -> TransformerConfig:
    """A shipped model by its name, or any other by the path of its config.json or of the folder that holds it."""
    check_path(name_or_path, "model")
    text = str(name_or_path)
    shipped = _FOLDER / f"{text}.json"
    try:
        if Path(text).name == text and shipped.is_file():
            return read_config(shipped, name=text)
        if text and Path(text).exists():
            return read_config(Path(text))
    except (OSError, ValueError) as error:  # a name that no file system takes
        if isinstance(error, InputError):
            raise
    shown = text if len(text) <= 80 else text[:77] + "..."
    if text.endswith(".json") or text.startswith((".", "/", "~")):
        raise InputError(f"model={shown}: there is no such file; give a config.json, its folder, or the name of a shipped model")
    raise InputError(f"model={shown}: no shipped model has this name, and there is no such file{suggest(text, list_models())}")
