"""The forward pass of a serving step, compiled once: the rows of its graph under an engine.

Communication of tokens with their experts is the engine's (`experts.py`), including reductions over the experts' ranks, also of shared
experts. Ranks that share the tokens of a prompt gather its latents, and each rank expands them to its heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import values_of_sizes
from perfmodel.cost.rows import RowCompiler, TimedRows
from perfmodel.cost.serving.attention import CONTEXT_AXIS
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.session import session_cache
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.rewrites import with_engine
from perfmodel.parallel.algebra.derive import ShardedGraph, derive
from perfmodel.parallel.algebra.rules import apply_rules, rule_set_of
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Region
from perfmodel.workload.kinds.cache import SEQUENCES
from perfmodel.workload.quantization import WeightPart
from perfmodel.workload.step_graph import LAST, step_graph, step_length
from perfmodel.workload.work import Pass, RoutedExperts

Array = NDArray[np.float64]

#: Operators that expand latents to keys and values of heads, for the tokens of all ranks.
_EXPANDS = ("kv_b_proj", "nope_key", "keys", "value", "values")
#: Distinct groups of ranks: tensor parallelism, ranks that share prompts, and all ranks with different tokens.
GROUPS: Mapping[str, frozenset[str]] = {
    "tp": frozenset(("tp_kv", "tp_q")),
    "pcp": frozenset((CONTEXT_AXIS,)),
    "tokens": frozenset((CONTEXT_AXIS, "dp_replicate", "dp_shard")),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingProgram:
    """Rows of one step. Segments are indices of regions, followed by the same for the cache operators of their mixers.

    groups   indices of `GROUPS` among the masks of amounts
    expert_inputs   inputs of the routed experts; of these the parameters are stored with them, biases included
    """

    model: TransformerConfig
    is_prompt: bool
    derivation: ShardedGraph
    rows: TimedRows
    regions: tuple[Region, ...]
    groups: Mapping[str, int]
    expert_inputs: frozenset[str]

    def amounts(self, sizes: Array, *, rows: Array, outputs: Array, sequences: Array) -> Array:
        """Return the [amounts, columns] of steps.

        sizes      of the groups of axes, as in `amount_values`
        rows       of all ranks that share them
        outputs    rows with logits
        sequences  that decode
        """
        length = step_length(takes_prompts=self.is_prompt)
        counted = {"": np.ones_like(rows), "b": rows / length, LAST: outputs / length, SEQUENCES: sequences}
        table = np.stack([counted[dim] for dim in self.rows.amounts.batch_dims])
        return values_of_sizes(self.rows.amounts, sizes, table[self.rows.amounts.batch])

    @property
    def counts(self) -> Array:
        """Number of times that each segment runs."""
        return np.array([float(region.count) for region in self.regions] * 2)

    @property
    def of_mixers(self) -> int:
        """First segment of the cache operators of mixers."""
        return len(self.regions)

    @property
    def num_passes(self) -> int:
        """Kernels that pass over memory, without those of states."""
        return int(np.sum(self.rows.streaming.segments < self.of_mixers))


@session_cache(maxsize=256)
def serving_program(
    model: TransformerConfig,
    *,
    is_prompt: bool,
    fuses: bool = True,
    low_parts: frozenset[WeightPart] = frozenset(),
    element_bytes: float = 2.0,
) -> ServingProgram:
    """Return the program of decode steps, or of prompts.

    fuses      kernels are fused as engines do it; otherwise each operator is a kernel
    low_parts  parts with quantized weights
    element_bytes   of all other tensors
    """
    sharded = _sharded(replace(model, num_mtp_layers=0), is_prompt=is_prompt, element_bytes=element_bytes)
    derivation = with_engine(sharded, fuses=fuses, low_parts=low_parts)
    graph = derivation.graph
    region_index = {region.name: i for i, region in enumerate(graph.regions)}
    compiler = RowCompiler(graph, load_profile("generic"), graph.activation_bytes)
    groups = {name: compiler.mask(axes) for name, axes in GROUPS.items()}
    for op in graph.operators:
        segment = region_index[op.layer] + (len(region_index) if op.group == "attention_core" else 0)
        for work in op.forward:
            compiler.work(op, derivation.shardings[op.name], work, segment=segment, name=op.name, is_backward=False)
    routed: set[str] = set()  # between a router and the residual stream, where the engine defines the communication
    routing: set[str] = set()
    for op in graph.operators:
        routing |= {op.layer} if op.kind == "route" else set()
        routed |= {op.name} if op.layer in routing else set()
    for traffic in derivation.traffic:
        if traffic.phase is Pass.FORWARD and traffic.kind is not CollectiveKind.SEND_RECV and traffic.operator not in routed:
            compiler.collective(traffic.kind, traffic.axes, traffic.amount, segment=region_index[traffic.region], name=traffic.tensor)
    segments = 2 * len(region_index)
    return ServingProgram(
        model=model,
        is_prompt=is_prompt,
        derivation=derivation,
        rows=compiler.rows(attention_kernel="flash", num_segments=segments, num_traffic_segments=segments),
        regions=graph.regions,
        groups=groups,
        expert_inputs=frozenset(
            operand.tensor for op in graph.operators if any(isinstance(work, RoutedExperts) for work in op.forward) for operand in op.inputs
        ),
    )


@session_cache(maxsize=64)
def _sharded(model: TransformerConfig, *, is_prompt: bool, element_bytes: float) -> ShardedGraph:
    """Return the sharded graph. Rows of prompts are cut over `CONTEXT_AXIS`; decode rows are replicated on it."""
    graph = step_graph(model, takes_prompts=is_prompt, element_bytes=element_bytes)
    unsharded: dict[str, tuple[str, ...]] = {"s": ()}
    expands = dict.fromkeys(_EXPANDS, unsharded) if model.parts.latent is not None and is_prompt else {}
    shardings = apply_rules(graph, replace(rule_set_of("megatron"), operators=expands))
    if not is_prompt:
        shardings = {
            name: {dim: tuple(axis for axis in axes if axis != CONTEXT_AXIS) for dim, axes in sharding.items()}
            for name, sharding in shardings.items()
        }
    return derive(graph, shardings)
