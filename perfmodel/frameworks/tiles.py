"""Tiling: losses and feed-forwards that run over pieces of the sequence, so that their largest tensors are never complete in memory.

A rewrite of operators, as in `frameworks/rewrites.py`. Tensors that live one piece at a time count with that share of their bytes. Their
traffic stays the same, and recomputation is work of backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2, prod

from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.parallel.choices import CHUNKED_LOSS, UPCAST_LOSS, UPCAST_SHARE, WHOLE_LOSS
from perfmodel.workload.graph import Graph, Operator, Tensor
from perfmodel.workload.work import Data, Product, Stream, Work, count_of

CHUNK_TOKENS = 256
"""Tokens of a chunk of the loss (TRL 1.13, `SFTConfig.loss_type="chunked_nll"`)."""

FEED_FORWARD = "ffn"
"""Logical name of the inner dim of a dense feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """Rewritten operators that run in pieces, and the live share of their tensors, by name.

    tokens_at_once   live tokens of the tensors of the loss, in place of a share; 0: the share counts
    """

    operators: Mapping[str, Operator] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    tokens_at_once: Mapping[str, int] = field(default_factory=dict)

    def share_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the bytes that are live at once."""
        share, tokens = self.shares.get(tensor.name, 1.0), self.tokens_at_once.get(tensor.name, 0)
        return replace(tensor, itemsize=tensor.itemsize * share, tokens_at_once=tokens)


def tiled(graph: Graph, operators: Mapping[str, Operator], profile: ExecutionProfile) -> Tiled:
    """Return the operators that the profile runs in tiles."""
    rewritten, shares, tokens = dict[str, Operator](), dict[str, float](), dict[str, int]()
    form = profile.kernels.loss_form
    for loss in graph.operators if form not in (WHOLE_LOSS, UPCAST_LOSS) else ():
        if loss.kind != "cross_entropy" or not loss.backward:
            continue
        # from the product of the logits to the loss; only the inputs of the product are saved
        _, *before = members = _logit_operators(graph, loss)
        shares |= dict.fromkeys([op.output.tensor for op in before], _loss_share(graph, loss, form))
        for member in members:
            op = with_traffic(operators[member.name], graph)
            backward = (*op.forward, *op.backward) if form == CHUNKED_LOSS else op.backward
            kept = tuple(data for data in op.saved if data.of is not None and op.operands[data.of].tensor not in shares)
            rewritten[member.name] = replace(op, backward=backward, saved=kept, scratch=())
        tokens |= dict.fromkeys(shares, tokens_at_once(loss, profile))
    if profile.kernels.tiles_mlp:
        _tile_feed_forwards(graph, operators, rewritten, shares)
    return Tiled(operators=rewritten, shares=shares, tokens_at_once=tokens)


def logit_share(graph: Graph, profile: ExecutionProfile) -> float:
    """Return the share of the logits in memory at once, if `tokens_at_once` is 0."""
    if profile.kernels.loss_form == WHOLE_LOSS or not graph.loss:
        return 1.0
    if profile.kernels.loss_form == UPCAST_LOSS:
        return UPCAST_SHARE
    return _loss_share(graph, graph.operator(graph.loss), profile.kernels.loss_form)


def tokens_at_once(loss: Operator, profile: ExecutionProfile) -> int:
    """Return the tokens whose logits are in memory at once, for a graph of one token; 0: `logit_share` of them."""
    return CHUNK_TOKENS if profile.kernels.loss_form == CHUNKED_LOSS and loss.roles.per_token else 0


def _loss_share(graph: Graph, loss: Operator, form: str) -> float:
    """Return the live share of the logits: one chunk of tokens, or for a fused loss a piece as large as the hidden states.

    Source: Liger-Kernel 0.6, `ops/fused_linear_cross_entropy.py`: the number of chunks is the power of two from ceil(V / H) on.
    """
    if form == CHUNKED_LOSS:
        return 1.0 if loss.roles.per_token else min(1.0, CHUNK_TOKENS / prod(loss.dims[dim] for dim in loss.output.dims if dim))
    vocabulary = prod(loss.dims[dim] for dim in str(loss.settings["over"]).split())
    depth = next((count_of(work.k) for work in _logit_operators(graph, loss)[-1].forward if isinstance(work, Product)), 1.0)
    return 1.0 / 2.0 ** max(ceil(log2(vocabulary / depth)), 0)


def _logit_operators(graph: Graph, loss: Operator) -> list[Operator]:
    """Return the operators from the loss back to the product of its logits, which is before their bias or scale."""
    operators = [loss]
    while not operators[-1].is_product and (maker := graph.producer(operators[-1].inputs[0].tensor)) is not None:
        operators.append(maker)
    return operators


def _tile_feed_forwards(graph: Graph, operators: Mapping[str, Operator], rewritten: dict[str, Operator], shares: dict[str, float]) -> None:
    """Tile dense feed-forwards: the number of tiles is the sequence length over the hidden size, rounded up.

    Source: DeepSpeed 0.17, `runtime/sequence_parallel/ulysses_sp.py` (`TiledMLP`: forward without a graph, each shard again in backward);
    ArcticTraining 0.0.5, `ceil(seqlen / hidden_size)` shards.
    """
    inner = {op.name: op for op in graph.operators if FEED_FORWARD in map(op.logical_name, op.dims)}
    for op in inner.values():
        if FEED_FORWARD in map(op.logical_name, op.output.dims):
            width = next((count_of(work.k) for work in op.forward if isinstance(work, Product)), 0.0)
            rows = prod(op.dims[dim] for dim in op.output.dims if op.logical_name(dim) != FEED_FORWARD)
            shares[op.output.tensor] = 1.0 / ceil(rows / width) if width else min(shares.get(o.tensor, 1.0) for o in op.inputs)
    for name in inner:
        op = with_traffic(operators[name], graph)
        saved = tuple(_share_of(op, data, graph, shares) for data in op.saved)
        scratch = tuple(_share_of(op, data, graph, shares) for data in op.scratch)
        rewritten[name] = replace(op, backward=(*op.forward, *op.backward), saved=saved, scratch=scratch)


def _share_of(op: Operator, data: Data, graph: Graph, shares: Mapping[str, float]) -> Data:
    share = shares.get((op.output if data.of is None else op.operands[data.of]).tensor, 1.0)
    return data if share == 1.0 else replace(data, itemsize=graph.itemsize(op, data) * share)


def with_traffic(op: Operator, graph: Graph, *, factor: float = 1.0) -> Operator:
    """Return the operator with explicit bytes for all accesses, times `factor`: traffic does not shrink with the live share."""
    passes: list[list[Work]] = [[], []]
    for sized, works in zip(passes, (op.forward, op.backward), strict=True):
        for work in works:
            if isinstance(work, Stream):
                work = replace(work, accesses=tuple(replace(data, itemsize=graph.itemsize(op, data) * factor) for data in work.accesses))
            sized.append(work)
    return replace(op, forward=tuple(passes[0]), backward=tuple(passes[1]))
