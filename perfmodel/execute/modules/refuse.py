"""Checks of a plan for a user's module before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.per_operator.options import ModuleReference
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.per_operator.assignment import check_assignment
from perfmodel.parallel.plan import Plan
from perfmodel.workload.imported.graph import ImportedKind, ImportedVertex


def readable_module(reference: ModuleReference, plan: Plan) -> UserModule:
    """Return the module of a plan without its weights. Raise InputError if its graph differs from the plan's or the plan cannot run."""
    module = UserModule.read(reference.name, reference.inputs)
    check_module_plan(module, plan)
    return module


def check_module_plan(module: UserModule, plan: Plan) -> None:
    """Check that the plan belongs to this graph, and that every operator can run as planned."""
    if plan.cuts.stages:
        raise bad_field("stages", len(plan.cuts.stages), "a module runs as one stage", "search without --stages")
    check_assignment(plan.cuts, module.network, needs_held=True)
    if module.exported.num_shares:
        rule = "has sizes that depend on values"
        raise bad_field("network", module.network.name, rule, "compute with all entries and weights that may be zero")
    module.functions(module.network)
    for operator in module.network.operators:
        source = module.imported.sources[operator.name]
        vertex = module.imported.graph.vertices[source.vertex]
        sharding = plan.cuts.shardings[operator.name]
        for function in vertex.functions:
            if function in _RANDOM and plan.num_chips > 1:
                raise InputError(f"operator {operator.name} ({vertex.operator}): draws other numbers on each rank; pass them as an input")
        for dim in unshardable_dims(vertex, module.arguments(source.vertex)):
            for name, _ in module.imported.dims_of(source.vertex, dim):
                axes = [axis for axis in sharding.get(name, ()) if plan.cuts.size((axis,)) > 1]
                if axes:
                    rule = f"operator {operator.name} ({vertex.operator}), dim {name}, axis {axes[0]}: is not run with this dim cut"
                    raise InputError(f"{rule}; use a plan that leaves it whole: another number of chips, or data parallelism")


_RANDOM = frozenset({"rand", "randn", "rand_like", "randn_like", "bernoulli", "randint", "randperm", "multinomial", "normal"})
#: Linear reductions: the local results can be summed over ranks.
_LINEAR = frozenset(
    {"mean", "sum", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"}
    | {"binary_cross_entropy_with_logits"}
)


def unshardable_dims(vertex: ImportedVertex, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dims of a vertex that this executor cannot shard, though a plan may."""
    function, dims = vertex.function, tuple(vertex.dims)
    if function in ("group_norm", "instance_norm"):
        return vertex.reduced
    if vertex.kind is ImportedKind.RECURRENT:
        return tuple(dim for dim in dims if dim != "b")
    if function in ("tril", "triu"):
        return dims[-2:]
    if vertex.kind is ImportedKind.REDUCTION:
        return () if function in _LINEAR else vertex.reduced
    if vertex.kind is ImportedKind.SOFTMAX:
        return () if function == "softmax" else vertex.reduced
    if vertex.kind is ImportedKind.CROSS_ENTROPY:
        is_plain = function == "cross_entropy_loss" and arguments.get("weight") is None and not arguments.get("label_smoothing")
        return () if is_plain and len(vertex.inputs[1].shape) < len(vertex.inputs[0].shape) else ("v",)
    if function == "embedding_bag":
        return () if arguments.get("mode") == 0 and arguments.get("per_sample_weights") is None else ("v",)
    if vertex.kind is ImportedKind.CONVOLUTION and ("transpose" in function or isinstance(arguments.get("padding"), str)):
        return tuple(dim for dim in dims if dim in "uhw" and dim not in vertex.unsplit)
    return ()
