"""The loss and the token vectors of one process are those of torch."""

import pytest
import torch
import torch.nn.functional as F

from perfmodel.execute.layers.vocabulary import cross_entropy, token_vectors


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_loss_and_its_gradient(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 11, generator=generator).to(dtype)
    targets = torch.randint(11, (2, 7), generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets).sum()
    expected = F.cross_entropy(theirs.float().flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert torch.equal(logits, ours.detach())  # what it was given stays as it was
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_pad_have_no_probability_and_no_gradient(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 12, generator=generator).to(dtype)
    logits[..., 11] = 100.0
    targets = torch.randint(11, (2, 7), generator=generator)
    padded, plain = logits.clone().requires_grad_(), logits[..., :11].clone().requires_grad_()
    losses = cross_entropy(padded, targets, size=11).sum(), cross_entropy(plain, targets).sum()
    assert torch.equal(*losses)
    sum(losses).backward()
    assert torch.equal(padded.grad[..., :11], plain.grad)
    assert not padded.grad[..., 11].any()


def test_pieces_of_a_table_add_up_to_its_rows():
    generator = torch.Generator().manual_seed(0)
    table, tokens = torch.randn(10, 4, generator=generator), torch.randint(10, (2, 6), generator=generator)
    pieces = [table[:5].clone().requires_grad_(), table[5:].clone().requires_grad_()]
    vectors = [token_vectors(piece, tokens, first=5 * i) for i, piece in enumerate(pieces)]
    unsharded = table.clone().requires_grad_()
    expected = F.embedding(tokens, unsharded)
    assert torch.equal(vectors[0] + vectors[1], expected)
    weights = torch.randn(expected.shape, generator=generator)
    for output in (*vectors, expected):
        (output * weights).sum().backward()
    torch.testing.assert_close(torch.cat([piece.grad for piece in pieces]), unsharded.grad)
