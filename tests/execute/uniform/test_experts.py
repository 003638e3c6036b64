"""Shards of the experts' matrices and biases on the ranks of ep and etp."""

from itertools import product

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.uniform.experts import expert_shard, unsharded_shape  # noqa: E402
from perfmodel.execute.uniform.sharding import ExpertSharding  # noqa: E402
from perfmodel.workload.layer_specs import Experts  # noqa: E402

HIDDEN, WIDTH, NUMBER = 4, 6, 8
EXPERTS = Experts(num_experts=NUMBER, top_k=2, width=WIDTH, bias=True, gated=True)
SHAPES = {
    "experts_up.weight": (NUMBER * 2 * WIDTH, HIDDEN),
    "experts_down.weight": (NUMBER * HIDDEN, WIDTH),
    "experts_up.bias": (NUMBER * 2 * WIDTH,),
    "experts_down.bias": (NUMBER * HIDDEN,),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (1, 2), (2, 3)])
def test_ranks_hold_each_entry_once_and_the_last_biases_on_each_rank_of_an_expert(name, ep, etp):
    matrix = torch.arange(float(torch.Size(SHAPES[name]).numel())).view(SHAPES[name])
    ranks = [ExpertSharding(ep=ep, etp=etp, ep_rank=i, etp_rank=j) for i, j in product(range(ep), range(etp))]
    pieces = [expert_shard(matrix, name, EXPERTS, rank) for rank in ranks]
    copies = etp if name == "experts_down.bias" else 1
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces]).sort().values, matrix.flatten().repeat_interleave(copies))
    assert {unsharded_shape(piece.shape, name, rank) for piece, rank in zip(pieces, ranks, strict=True)} == {matrix.shape}
