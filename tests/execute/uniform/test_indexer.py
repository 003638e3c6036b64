"""The sparse indexer: what it chooses, how it learns, and attention to what it chose."""

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.layers import indexer  # noqa: E402
from perfmodel.execute.layers.masks import causal, marked  # noqa: E402
from perfmodel.execute.uniform.latent import LatentMixer  # noqa: E402

TOP, LENGTH = 3, 10


def random(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def scores_of(q, k, weights):
    """Query by query, key by key."""
    rows = []
    for position in range(q.shape[1]):
        products = (q[:, position, None] * k[:, : position + 1, None]).sum(-1)  # [b, keys, heads]
        rows.append((weights[:, position, None] * products.relu()).sum(-1))
    return rows


def indexed():
    return random(2, LENGTH, 4, 6, seed=0), random(2, LENGTH, 6, seed=1), random(2, LENGTH, 4, seed=2)


def test_a_query_chooses_the_best_of_the_keys_before_it():
    q, k, weights = indexed()
    chosen, _ = indexer.choose_keys(q, k, weights, top=TOP, scale=1.0)
    seen = marked(chosen, LENGTH) & causal(LENGTH, LENGTH, device=chosen.device)
    for position, row in enumerate(scores_of(q, k, weights)):
        for sequence in range(2):
            best = set(row[sequence].topk(min(TOP, position + 1)).indices.tolist())
            assert set(seen[sequence, position].nonzero().flatten().tolist()) == best


def test_it_learns_by_the_cross_entropy_of_its_scores_with_its_choice():
    inputs = indexed()
    _, loss = indexer.choose_keys(*inputs, top=TOP, scale=0.25)
    gradients = torch.autograd.grad(loss, inputs)
    rows = scores_of(*inputs)
    explicit = sum((row.logsumexp(-1) - row.topk(min(TOP, position + 1)).values.mean(-1)).sum() for position, row in enumerate(rows))
    expected = torch.autograd.grad(0.25 * explicit, inputs)
    torch.testing.assert_close(gradients, expected)
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


@pytest.mark.parametrize("top", [TOP, LENGTH])
def test_attention_sees_what_was_chosen_alone(top):
    """And all keys before a query where all are chosen."""
    q, k, v = random(2, LENGTH, 4, 8, seed=3), random(2, LENGTH, 4, 8, seed=4), random(2, LENGTH, 4, 6, seed=5)
    chosen, _ = indexer.choose_keys(*indexed(), top=top, scale=1.0)
    output = LatentMixer.attend(q, k, v, chosen)
    seen = (marked(chosen, LENGTH) & causal(LENGTH, LENGTH, device=chosen.device)).unsqueeze(1)
    scores = torch.einsum("bqnd,bznd->bnqz", q, k) * 8**-0.5
    expected = torch.einsum("bnqz,bznw->bqnw", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(2)
    torch.testing.assert_close(output, expected)
    gradient = torch.randn_like(output)
    torch.testing.assert_close(*(torch.autograd.grad(result, (q, k, v), gradient) for result in (output, expected)))
    dense = LatentMixer.attend(q, k, v)
    assert torch.allclose(output, dense) == (top == LENGTH)


def test_flop_are_those_of_half_the_square():
    """s n d a query: 2 s n d over all pairs, half of which are seen; backward three times."""
    q, k, weights = torch.empty(2, 64, 4, 16), torch.empty(2, 64, 16), torch.empty(2, 64, 4)
    _, forward = indexer.PRODUCTS[torch.ops.perfmodel.index_scores]
    _, backward = indexer.PRODUCTS[torch.ops.perfmodel.index_scores_backward]
    assert forward(q, k, weights, 8) == 2 * 64 * 64 * 4 * 16
    assert backward(1.0, q, k, weights, 8) == 3 * forward(q, k, weights, 8)
