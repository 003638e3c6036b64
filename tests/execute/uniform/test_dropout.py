"""Dropout as one operator, for audits."""

import torch

from perfmodel.execute.layers.dropout import dropout


def test_what_is_kept_is_scaled_and_so_is_its_gradient():
    torch.manual_seed(0)
    x = torch.ones(100, 100, requires_grad=True)
    y = dropout(x, 0.25)
    kept = y != 0
    assert 0.7 < kept.float().mean().item() < 0.8
    assert torch.all(y[kept] == 1 / 0.75)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_without_a_probability_nothing_happens():
    x = torch.ones(3)
    assert dropout(x, 0.0) is x
