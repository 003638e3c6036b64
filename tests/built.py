"""Shipped models by what they are made of."""

from perfmodel.workload.models import list_models, load_model


def _is_plain(name: str) -> bool:
    model = load_model(name)
    parts = (model.experts, model.latent, model.mamba, model.delta, model.attention_sinks, model.attention_gate, model.attention_chunk)
    return not any(parts)


#: Of usual attention and a dense MLP alone.
DENSE = [name for name in list_models() if _is_plain(name)]
