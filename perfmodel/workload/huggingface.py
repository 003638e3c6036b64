"""Read a Hugging Face `config.json` into a `TransformerConfig`, without `transformers`.

This file selects the language-model part of the config, refuses unsupported models and names missing parts; `families` reads the keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.foundation.errors import InputError, bad_field, suggest
from perfmodel.foundation.files import listed, read_text
from perfmodel.foundation.session import session_cache
from perfmodel.workload.config import TransformerConfig, printable
from perfmodel.workload.config_fields import ConfigFields
from perfmodel.workload.families import family_table, parts_of_family, read_family
from perfmodel.workload.imported.decoder import decoder_of, is_saved_graph, read_graph


def read_config(source: Mapping[str, Any] | str | Path, *, name: str = "") -> TransformerConfig:
    """Return the model of a `config.json`, given as its contents, its path or its folder. Also reads the decoder in a file that `perfmodel
    import --save` wrote."""
    if not isinstance(source, (str, Path)):
        return _model_of(source, "config", name)
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{path}: cannot be read ({reason}); give a config.json or the folder that holds it") from None
    text = read_text(path, "config.json or of the folder that holds it")
    return _config_of(text, str(path), name or (path.parent.resolve().name if path.name == "config.json" else path.stem))


@session_cache(maxsize=32)
def _config_of(text: str, path: str, name: str) -> TransformerConfig:
    """Return the model of a file's text; cached, because every prediction reads the same few files."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error}); give a Hugging Face config.json") from None
    return _model_of(data, path, name)


def _model_of(data: object, origin: str, name: str) -> TransformerConfig:
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: must be a JSON object of fields, not {type(data).__name__}; give a Hugging Face config.json")
    if "schema_version" in data and is_saved_graph(data):
        return decoder_of(read_graph(data, where=origin), name=name)
    left_out = " and ".join(part for key, part in _TOWERS.items() if isinstance(data.get(key), Mapping) and data[key])
    nested = data.get("text_config")
    if isinstance(nested, Mapping):  # a vision-language model: only its language model is modelled
        text = dict(nested)
        text.setdefault("tie_word_embeddings", data.get("tie_word_embeddings"))
        text.setdefault("model_type", family_table().family_with("text_of", _text(data, "model_type")) or None)
        model_type = _model_type(text)
        fields = ConfigFields(data=text, model_type=model_type, defaults=family_table().families[model_type].get("class_defaults", {}))
    else:  # older Qwen files have no text_config: the language model's keys are next to the tower's
        model_type = (left_out and family_table().family_with("text_of", _text(data, "model_type"))) or _model_type(data)
        fields = ConfigFields(data=data, model_type=model_type, defaults={})
    _refuse(fields)
    try:
        values = read_family(fields)
    except InputError:
        if not fields.faults:  # otherwise a placeholder may have caused it
            raise
    if fields.faults:
        raise InputError(listed(list(dict.fromkeys(fields.faults))))
    called = name or _text(data, "_name_or_path").rstrip("/").rpartition("/")[2] or model_type
    return TransformerConfig.of(name=called, architecture=model_type, left_out=left_out, source=_text(data, "_source") or origin, **values)


#: Parts of a model other than the language model, by key.
VISION_TOWER = "its vision tower"
_TOWERS: Mapping[str, str] = {"vision_config": VISION_TOWER, "audio_config": "its audio tower"}


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


# --- unsupported configs ------------------------------------------------------------------------------------------------

_MOE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_ENCODER_DECODER = "an encoder with cross-attention to the decoder"


def _refuse(fields: ConfigFields) -> None:
    """Refuse keys that change a decoder of a known family into something else."""
    data, family = fields.data, fields.model_type
    parts = parts_of_family(family)
    for keys, is_read, above in ((_MOE_KEYS, bool(parts), 1), (_MLA_KEYS, "latent" in parts, 0)):
        for key in keys:
            value = data.get(key)
            if not is_read and isinstance(value, (int, float)) and not isinstance(value, bool) and value > above:
                fields.refuse(key, f"model_type={family} has no such key", "name the family that has it, or leave it out")
                break
    if data.get("is_encoder_decoder") is True or data.get("add_cross_attention") is True:
        raise _not_modelled(family, _ENCODER_DECODER)
    for key, lacking in family_table().variants.items():
        if data.get(key) and key != parts.get("latent", {}).get("index_top"):
            fields.refuse(key, f"{lacking} not modelled yet", "only models without are")


def _not_modelled(model_type: str, lacking: str) -> InputError:
    return bad_field("model_type", model_type, f"needs {lacking}, which perfmodel does not model yet", "give another model")


def _model_type(data: Mapping[str, Any]) -> str:
    value = data.get("model_type")
    if value is None:
        names = data.get("architectures")
        first = names[0] if isinstance(names, (list, tuple)) and names else None
        value = (family_table().family_with("classes", first) or None) if isinstance(first, str) else None
        if value is None and isinstance(data.get("_class_name"), str):
            rule = "is a diffusers config, of a network that is no language model"
            remedy = "`perfmodel shard MODULE:FACTORY` takes any torch module"
            raise bad_field("_class_name", data["_class_name"], rule, remedy)
        if value is None:
            known = f"use one of {', '.join(family_table().families)}"
            raise InputError(f"model_type: is missing, and architectures does not tell it either; {known}")
    if not isinstance(value, str):
        raise bad_field("model_type", printable(value), "must be a text", "use one of " + ", ".join(family_table().families))
    if value in family_table().families:
        return value
    unsupported = {prefix: lacking for lacking, prefixes in family_table().unsupported.items() for prefix in prefixes}
    prefix = max((known for known in unsupported if value.startswith(known)), key=len, default="")
    if prefix:
        raise _not_modelled(value, unsupported[prefix])
    raise InputError(f"model_type={value[:80]!r}: there is no reader for this architecture{suggest(value, family_table().families)}")
