"""Differentiable functions save what they name and nothing else, and operators have a result under fake tensors."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from perfmodel.execute.layers.kernel import differentiable, fused, operator  # noqa: E402


@operator("test_doubled", lambda x: x.new_empty(x.shape))
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


@operator("test_cleared", lambda x: x.new_empty(()), mutates={"x"})
def cleared(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    x.zero_()
    return total


@fused("test_tripled", lambda x: x.new_empty(x.shape), keeps_inputs=False)
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3.0 * x


@tripled.backward(lambda gradient: gradient.new_empty(gradient.shape))
def tripled_backward(gradient: torch.Tensor) -> torch.Tensor:
    return 3.0 * gradient


def test_a_kernel_is_one_operator_in_each_pass():
    x = torch.ones(4, requires_grad=True)
    with torch.profiler.profile() as profile:
        tripled(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 4
    names = [event.key for event in profile.key_averages()]
    assert {"perfmodel::test_tripled", "perfmodel::test_tripled_backward"} <= set(names)
    with FakeTensorMode():
        assert torch.ops.perfmodel.test_tripled_backward(torch.empty(5)).shape == (5,)


def test_an_operator_has_a_shape_without_values():
    with FakeTensorMode():
        assert torch.ops.perfmodel.test_doubled(torch.empty(3, 4)).shape == (3, 4)


def test_an_operator_may_change_the_arguments_that_it_names():
    x = torch.ones(3)
    assert float(cleared(x)) == 3.0
    assert float(x.sum()) == 0.0


def test_tensors_that_only_forward_reads_are_freed():
    mask = torch.ones(4)
    scale, freed = 3.0, weakref.ref(mask)

    def scaled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return differentiable(lambda x: scale * x * mask, lambda gradient: scale * gradient, keeps_inputs=False)(x)

    x = torch.ones(4, requires_grad=True)
    y = scaled(x, mask)
    del mask
    gc.collect()
    assert freed() is None
    y.sum().backward()
    assert x.grad.tolist() == [3.0] * 4
