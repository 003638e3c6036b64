"""Default layers of each pipeline stage: even stages if all layers are alike, else stages balanced by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.session import session_cache
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.layout import Placement, even_stage_layers, rank_of_stage, stages_of_ranks
from perfmodel.workload.by_length import ByLength
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.job import PRECISION_POLICIES, Precision, TrainingJob
from perfmodel.workload.layer_specs import layer_order
from perfmodel.workload.low_precision import with_recipe
from perfmodel.workload.transformer import build_graph, graph_length
from perfmodel.workload.work import CacheAttention, FusedAttention, Product, RoutedExperts, Stream, Work, count_of, flops_of, length_power

Array = NDArray[np.float64]

FLOP_PER_BYTE = 250.0
"""[FLOP/byte] Ratio of 16-bit FLOP rate to memory bandwidth: 200 of an A100, 295 of an H100, 281 of a B200, by their data sheets."""

BACKWARD_ATTENTION = 2.5
"""Products of fused attention in backward over those in forward: backward recomputes the scores (Dao et al. 2022)."""


USUAL_SEQUENCE, LONG_SEQUENCE = 4096, 32768
"""[tokens] Stages are balanced at the first of these lengths, and beyond the second at the job's own. A layer that moves to another rank
moves its optimizer states, so with stages balanced at every length a longer sequence could be faster."""


def default_stage_layers(job: TrainingJob, num_ranks: int, virtual_stages: int, placement: Placement = Placement.LOOP) -> tuple[int, ...]:
    """Return the layers of each virtual stage, in model order."""
    model, num_stages = job.transformer, num_ranks * virtual_stages
    even = even_stage_layers(model.num_hidden_layers, num_stages)
    if num_ranks == 1 or are_alike(model):
        return even
    length = job.seq_len if job.seq_len > LONG_SEQUENCE else USUAL_SEQUENCE
    return _by_cost(model, length, job.precision, num_ranks, virtual_stages, placement)


def are_alike(model: TransformerConfig) -> bool:
    """Return whether all layers are of one kind, and the model has no multi-token-prediction modules next to the head."""
    return len(model.layer_kinds) == 1 and not model.num_mtp_layers


@session_cache(maxsize=4096)
def _by_cost(
    model: TransformerConfig, seq_len: int, precision: Precision, num_ranks: int, virtual_stages: int, placement: Placement
) -> tuple[int, ...]:
    """Return the layers of each stage by cost: the better of two heuristics by the slowest rank. Every inner stage has a layer."""
    by_length = _costs_by_length(model, graph_length(model, seq_len), precision)
    costs = {region: sum(cost.at(seq_len) for cost in by_region) for region, by_region in by_length.items()}  # of a sequence
    until = np.cumsum([0.0, *(costs[name] for name in layer_order(model.layer_kinds))])
    extra_costs = np.zeros(num_ranks)
    extra_costs[0] += costs["embedding"]
    extra_costs[rank_of_stage(num_ranks * virtual_stages - 1, num_ranks, placement)] += costs["head"]
    mean = (until[-1] + extra_costs.sum()) / num_ranks
    until, extra_costs = until / mean, extra_costs / mean
    ways = [_balanced_stages(until, extra_costs, virtual_stages, placement)]
    if virtual_stages > 1 and all((ranks := _balanced_ranks(until, extra_costs, virtual_stages, placement))[1:-1]):
        ways.append(ranks)

    by_chunk = np.array(stages_of_ranks(num_ranks, num_ranks * virtual_stages, placement)).T

    def slowest(layers: tuple[int, ...]) -> float:
        taken = np.diff(until[np.cumsum([0, *layers])])[by_chunk].sum(axis=0) + extra_costs
        return float(_eighth_power(taken).sum())

    return min(ways, key=slowest)


def _eighth_power(taken: Array) -> Array:
    """Return the eighth power of costs, whose sum approximates the maximum but depends on all terms.

    It is computed by products, because a power may differ between machines.
    """
    squared = taken * taken
    fourth = squared * squared
    return fourth * fourth


def _balanced_stages(until: Array, extra_costs: Array, virtual_stages: int, placement: Placement = Placement.LOOP) -> tuple[int, ...]:
    """Return the layers with the least sum of `_eighth_power` of the stages' costs, by dynamic programming.

    until        cumulative cost of the layers before each layer, and of all
    extra_costs  costs of each rank in addition to layers (embedding, head), divided evenly among its stages
    """
    of_stage = np.round(until[None, :] - until[:, None], 9)  # [first layer, layer after the last]; like layers are equal to the bit
    shared = extra_costs / virtual_stages
    # [layer after the last, first layer], the last first: ties go to fewer layers at the end
    backwards = {extra: _eighth_power(np.where(of_stage >= 0, of_stage + extra, np.inf)).T[:, ::-1] for extra in set(shared.tolist())}
    nothing = np.diag(np.full(len(until), np.inf))[:, ::-1]
    ends = {extra: np.ascontiguousarray(powers) for extra, powers in backwards.items()}
    inner = {extra: powers + nothing for extra, powers in ends.items()}  # without stages that have no layers
    least = np.full(len(until), np.inf)
    least[0] = 0.0
    begins = []
    num_ranks = len(shared)
    stages = [float(shared[rank_of_stage(stage, num_ranks, placement)]) for stage in range(num_ranks * virtual_stages)]
    for stage, extra in enumerate(stages):
        total = least[::-1] + (inner if 0 < stage < len(stages) - 1 else ends)[extra]
        chosen = total.argmin(axis=1)
        begins.append(len(until) - 1 - chosen)
        least = total[np.arange(len(until)), chosen]
    layers, end = [], len(until) - 1
    for begin in reversed(begins):
        layers.append(end - int(begin[end]))
        end = int(begin[end])
    return tuple(reversed(layers))


def layers_of_stages(held: Sequence[int], virtual_stages: int, placement: Placement) -> tuple[int, ...]:
    """Return the layers of each virtual stage, from those of each rank."""
    num_ranks, layers = len(held), list[int]()
    for stage in range(num_ranks * virtual_stages):
        count, extra = divmod(held[rank_of_stage(stage, num_ranks, placement)], virtual_stages)
        layers.append(count + (stage // num_ranks < extra))
    return tuple(layers)


def _balanced_ranks(until: Array, extra_costs: Array, virtual_stages: int, placement: Placement) -> tuple[int, ...]:
    """Return the layers of a greedy balance: each layer, at mean cost, goes to the cheapest rank, inner ranks first."""
    num_layers, ranks = len(until) - 1, [*range(1, len(extra_costs) - 1), 0, len(extra_costs) - 1]
    held, taken = [0] * len(extra_costs), extra_costs.tolist()
    for _ in range(num_layers):
        rank = min(ranks, key=taken.__getitem__)
        held[rank] += 1
        taken[rank] += float(until[-1]) / num_layers
    return layers_of_stages(held, virtual_stages, placement)


@session_cache(maxsize=64)
def _costs_by_length(model: TransformerConfig, length: int, precision: Precision) -> Mapping[str, list[ByLength]]:
    """Return the costs in each region, forward and backward, for all sequence lengths with the graph of this length. [FLOP in 16 bits]"""

    graph = build_graph(
        model, seq_len=length, attention=AttentionKernel.FLASH, dropout=False, activation_bytes=2.0, parameter_bytes=2.0
    )  # fmt: skip
    recipe, low = PRECISION_POLICIES[precision].recipe, 1.0
    if recipe is not None:
        graph, low = with_recipe(graph, recipe), itemsize(recipe.product) / itemsize(Dtype.BF16)
    costs: dict[str, list[ByLength]] = {region.name: [] for region in graph.regions}
    for op in graph.operators:
        for work in op.forward:
            costs[op.layer] += _cost(work, op, graph, low)
        for work in op.backward:
            costs[op.layer] += _cost(work, op, graph, low, attention=BACKWARD_ATTENTION)
    return costs


def _cost(work: Work, op: Operator, graph: Graph, low: float, attention: float = 1.0) -> list[ByLength]:
    match work:
        case Product():
            return [flops_of(work, op.roles.per_token).times(low if work.is_low else 1.0)]
        case FusedAttention() | CacheAttention() | RoutedExperts():
            return [flops_of(work, op.roles.per_token).times(attention)]
        case Stream():
            return [
                ByLength(
                    base=FLOP_PER_BYTE * work.repeats * count_of(data.extent) * graph.itemsize(op, data),
                    power=length_power(data.extent, op.roles.per_token),
                )
                for data in work.accesses
            ]


# --- placement by the cost of layers and head -------------------------------------------------------------------------


@session_cache(maxsize=4096)
def stage_layers_by_cost(model: TransformerConfig, num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage with blocks placed by their cumulative cost, as in nanotron.

    A block starts the next stage once the running sum of costs has reached k / p of the total; the head is a block too, on the last
    stage. Costs: a layer 4 h^2 + 3 h f, the head V h, all else 0.

    Source: nanotron v0.5, `get_block_compute_costs` and the placement in `models/base.py`.
    """
    if num_stages > model.num_hidden_layers:
        raise InputError(f"pp={num_stages}: must not exceed num_hidden_layers={model.num_hidden_layers}; use fewer stages")
    h, f = model.hidden_size, model.intermediate_size
    if model.is_plain:
        layer = 4 * h * model.num_attention_heads * model.head_dim + 3 * h * f
    else:  # mean active parameters of a layer
        outside = sum(shape.num_elements for shape in (*model.embedding_shapes(), *model.head_shapes()))
        layer = (model.num_active_parameters - outside) // model.num_hidden_layers
    total = model.num_hidden_layers * layer + model.vocab_size * h
    layers, stage, running = [0] * num_stages, 0, 0
    for _ in range(model.num_hidden_layers):
        if stage < num_stages - 1 and running * num_stages >= total * (stage + 1):
            stage += 1
        layers[stage] += 1
        running += layer
    return tuple(layers)


def imbalance(model: TransformerConfig, num_stages: int, held: Sequence[Column]) -> tuple[Column, ...]:
    """Return the ratio of layers under placement by cost to layers held, for each distinct rank; at least 1.

    held   layers of each distinct rank: the first, inner ones, the last
    """
    if num_stages > model.num_hidden_layers:
        return (1.0,) * len(held)
    first, *between, last = stage_layers_by_cost(model, num_stages)
    by_cost = (first, *[max(between, default=0)] * (len(held) - 2), last)
    ratios: list[Column] = []
    for count, layers in zip(by_cost, held, strict=True):
        ratios.append(np.where(layers == 0.0, 1.0, np.maximum(count / np.maximum(layers, 1.0), 1.0))[()])
    return tuple(ratios)
