"""Activation functions that are ours have the values and gradients of torch's."""

import pytest

torch = pytest.importorskip("torch")

from perfmodel.execute.layers.activations import ACTIVATIONS  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu2_is_the_square_of_relu(dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ACTIVATIONS["relu2"](ours), torch.relu(theirs).square()
    torch.testing.assert_close(*outputs)
    sum(output.cos().sum() for output in outputs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
