"""Kernels that the host is predicted to launch for a layer, against those that torch runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfmodel.cost.program import PHASES, kernels_of
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.eager import EAGER_RMS_NORM, EAGER_ROTARY
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, profile_of
from tests.execute.test_eager_traffic import rms_norm, rotate_half

WIDTH, HEADS, TOKENS = 32, 4, 16


class Kernels(TorchDispatchMode):
    """How many operators compute: neither views nor new tensors."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        places = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_view = all(tensor.untyped_storage().data_ptr() in places for tensor in outputs) and not function._schema.is_mutable
        is_empty = function in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.detach.default)
        self.number += bool(outputs) and bool(places) and not is_view and not is_empty
        return result


def counted(module, x):
    """Return the kernels of both passes, where gradients are added to those of a microbatch before."""
    module(x).sum().backward()
    with Kernels() as forward:
        y = module(x)
    gradient = torch.ones_like(y)
    with Kernels() as backward:
        y.backward(gradient)
    return forward.number, backward.number


class Layer(nn.Module):
    """GPT-2's, with a product for each of queries, keys and values; without dropout, which is one kernel on accelerators alone."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norms[0](x)
        heads = (linear(y).view(1, TOKENS, HEADS, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(1, TOKENS, WIDTH)
        x = x + self.o(y)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@pytest.mark.slow
def test_the_layer_of_gpt_launches_what_torch_launches():
    program = estimator_of(make_job(make_model(dropout=0.0)), profile="composer-fsdp").programs.program(
        "megatron", AttentionKernel.FLASH, ()
    )
    launches = dict(zip(PHASES, program.launches[len(PHASES) : 2 * len(PHASES), 0], strict=True))
    forward, backward = counted(Layer(), torch.randn(1, TOKENS, WIDTH, requires_grad=True))
    assert launches["core"] + launches["rest"] + launches["tail"] == pytest.approx(forward, rel=0.2)
    assert launches["backward"] == pytest.approx(backward, rel=0.15)


@pytest.mark.parametrize(
    "function, shapes, kind, traffic",
    [
        (rms_norm, [(64, 128), (128,)], "rms_norm", {"rms_norm_traffic": EAGER_RMS_NORM}),
        (rotate_half, [(64, 4, 128)], "rotary", {"rotary_traffic": EAGER_ROTARY}),
    ],
    ids=["rms_norm", "rotary"],
)
def test_operators_that_are_written_out_launch_each_step(function, shapes, kind, traffic):
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with Kernels() as forward:
        y = function(*inputs)
    gradient = torch.ones_like(y)
    with Kernels() as backward:
        y.backward(gradient)
    graph = (
        estimator_of(make_job(make_model(**LLAMA_LIKE)), profile="torch-fsdp2")
        .programs.program("megatron", AttentionKernel.FLASH, ())
        .derivation.graph
    )
    op = next(op for op in graph.operators if op.kind == kind)
    weights = len(shapes) - 1  # whose gradients are added to those of microbatches before
    eager, fused = (
        kernels_of(graph, profile_of("torch-fsdp2").having(**changes))[op.name] for changes in (traffic, dict.fromkeys(traffic, 1.0))
    )
    assert fused == (1.0, 1.0 + weights)
    assert eager == pytest.approx((forward.number, backward.number + weights), rel=0.25)
