"""Shipped models of which a graph is built; the others are read and counted."""

from perfmodel.workload.layer_specs import not_built
from perfmodel.workload.models import list_models, load_model

BUILT = [name for name in list_models() if not not_built(load_model(name))]
