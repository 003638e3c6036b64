"""Shipped models by what is made of them; the others are read and counted."""

from perfmodel.workload.layer_specs import not_built
from perfmodel.workload.models import list_models, load_model


def _is_plain(name: str) -> bool:
    model = load_model(name)
    parts = (model.experts, model.latent, model.mamba, model.delta, model.attention_sinks, model.attention_gate, model.attention_chunk)
    return not any(parts)


#: Of which a graph is built.
BUILT = [name for name in list_models() if not not_built(load_model(name))]
#: Of usual attention and a dense MLP alone.
DENSE = [name for name in list_models() if _is_plain(name)]
