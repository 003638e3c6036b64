"""The RMSNorm of ours computes what torch's does, and keeps less."""

import pytest
import torch
import torch.nn.functional as F

from perfmodel.execute.layers.norm import rms_norm


def gradients(norm, x, weight):
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = norm(x, weight)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_torch(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=generator).to(dtype)
    weight = torch.rand(16, generator=generator).to(dtype) + 0.5
    ours = gradients(lambda x, w: rms_norm(x, w, 1e-5), x, weight)
    theirs = gradients(lambda x, w: F.rms_norm(x, (16,), w, 1e-5), x, weight)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_it_keeps_its_input_and_one_number_a_row():
    saved = []
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16).requires_grad_(), torch.ones(8, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
    assert sorted(t.numel() * t.element_size() for t in saved) == [4 * 4, 8 * 2, 4 * 8 * 2]
