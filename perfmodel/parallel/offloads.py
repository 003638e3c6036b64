"""Offloads to host memory, as one option: `--offload checkpoints,optimizer`."""

from __future__ import annotations

from perfmodel.foundation.errors import bad_field, one_line, suggest

#: Offloaded state -> its setting.
OFFLOADS = {
    "checkpoints": "checkpoint_offload",
    "activations": "activation_offload",
    "optimizer": "optimizer_offload",
    "parameters": "parameter_offload",
}


def read_offloads(value: object, name: str = "offload") -> tuple[str, ...]:
    """Return the names of offloaded state, from a list or a text with commas; `none` is nothing."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise bad_field(name, one_line(value), "must be a list of names", f"use {', '.join(OFFLOADS)} or none")
    names = [text.strip().lower() for text in texts]
    if names == ["none"]:
        return ()
    if "none" in names:
        raise bad_field(name, one_line(value), "names none next to others", "write none alone, or ask once with each")
    for text in names:
        if text not in OFFLOADS:
            raise bad_field(name, one_line(text), f"is not known{suggest(text, OFFLOADS)}", f"use {', '.join(OFFLOADS)} or none")
    return tuple(dict.fromkeys(names))
