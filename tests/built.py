"""Shipped models by what they are made of."""

from perfmodel.workload.models import list_models, load_model


def _is_plain(name: str) -> bool:
    model = load_model(name)
    parts = ("experts", "latent", "mamba", "delta", "attention_sinks", "attention_gate", "attention_chunk")
    return not any(model.option(part) for part in parts)


#: Of usual attention and a dense MLP alone.
DENSE = [name for name in list_models() if _is_plain(name)]
