"""What cannot be run of a network plan, found before anything starts. Without torch."""

from __future__ import annotations

from collections.abc import Collection

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import Layout, gradient_layout, input_layout
from perfmodel.parallel.per_operator.plan import NetworkPlan, check_plan
from perfmodel.workload.graph import Graph, TensorRole

#: Kinds that have a torch function (`network_functions.FUNCTIONS`).
KINDS = frozenset(
    {
        *(
            "attention",
            "batch_norm",
            "binary_cross_entropy",
            "concat",
            "convolution",
            "cross_entropy",
            "einsum",
            "elementwise",
            "embedding",
        ),
        *("embedding_bag", "flatten", "interaction", "layer_norm", "lstm", "pooling", "prepend", "reduction", "rms_norm", "rotary"),
        *("select", "softmax"),
    }
)


def check_runnable(network: Graph, plan: NetworkPlan, further_kinds: Collection[str] = ()) -> None:
    """The plan is legal, every kind has a torch function, and the readers of a parameter agree."""
    check_plan(plan, network)
    if len(plan.stages) > 1 or plan.num_microbatches > 1:
        raise InputError(
            f"stages={max(1, len(plan.stages))}, num_microbatches={plan.num_microbatches}: a network is run as one stage and one "
            "microbatch; `perfmodel predict` takes this plan"
        )
    for operator in network.operators:
        if operator.kind not in KINDS and operator.kind not in further_kinds:
            raise InputError(
                f"operator {operator.name}: kind {operator.kind!r} has no torch function; add one to the table or pass it as functions"
            )
    parameter_layouts(network, plan)


def parameter_layouts(network: Graph, plan: NetworkPlan) -> dict[str, Layout]:
    """Of each parameter: the layout that all its readers need, with the axes on which the sum of their gradients is partial."""
    found: dict[str, Layout] = {}
    for operator in network.operators:
        sharding = plan.shardings[operator.name]
        for operand in operator.inputs:
            if network.tensors[operand.tensor].role is not TensorRole.PARAMETER:
                continue
            layout = input_layout(sharding, operand)
            before = found.setdefault(operand.tensor, layout)
            if before.cuts != layout.cuts:
                raise InputError(
                    f"operator {operator.name}: reads parameter {operand.tensor} as {layout}, another one reads it as "
                    f"{before.resolved()}: readers of one parameter need it in one layout; cut them alike"
                )
            partial = before.partial | gradient_layout(sharding, operand).partial
            found[operand.tensor] = Layout(cuts=layout.cuts, partial=partial)
    return found
