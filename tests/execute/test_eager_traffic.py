"""Memory traffic of operators written out in torch, counted kernel by kernel."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfmodel.parallel.eager import EAGER_ADAMW, EAGER_COMPLEX_ROTARY, EAGER_RMS_NORM, EAGER_ROTARY
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision

ROWS, HEADS, WIDTH = 64, 4, 128


class Traffic(TorchDispatchMode):
    """Bytes of the inputs, each once, and outputs of every kernel. Views move nothing."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = list({id(leaf): leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}.values())
        written = args[0] if result is None and function._schema.is_mutable else result  # lists that change in place are not given back
        outputs = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        is_view = outputs and all(tensor.untyped_storage().data_ptr() in places for tensor in outputs) and not function._schema.is_mutable
        if not is_view:
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *outputs))
        return result


def counted(function, *shapes):
    """Bytes an element of both passes."""
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    gradient = torch.randn_like(function(*inputs))
    with Traffic() as traffic:
        function(*inputs).backward(gradient)
    return traffic.num_bytes / inputs[0].numel()


def rms_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


def rotate_half(x):
    cos, sin = torch.ones(ROWS, 1, WIDTH, dtype=torch.bfloat16), torch.ones(ROWS, 1, WIDTH, dtype=torch.bfloat16)
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_complex(x):
    angles = torch.ones(ROWS, 1, WIDTH // 2, dtype=torch.complex64)
    pairs = torch.view_as_complex(x.float().reshape(ROWS, HEADS, -1, 2))
    return torch.view_as_real(pairs * angles).flatten(2).type_as(x)


@pytest.mark.parametrize(
    "function, shapes, least, factor",
    [
        (rms_norm, [(ROWS, WIDTH), (WIDTH,)], 10.0, EAGER_RMS_NORM),
        (rotate_half, [(ROWS, HEADS, WIDTH)], 8.0, EAGER_ROTARY),
        (rotate_complex, [(ROWS, HEADS, WIDTH)], 8.0, EAGER_COMPLEX_ROTARY),
    ],
    ids=["rms_norm", "rotary", "complex rotary"],
)
def test_kernels_move_as_many_bytes_as_profiles_say(function, shapes, least, factor):
    assert counted(function, *shapes) / least == pytest.approx(factor, rel=0.1)


def test_torchs_own_kernels_move_the_least():
    weight = [(ROWS, WIDTH), (WIDTH,), (WIDTH,)]
    assert counted(lambda x, w, b: torch.nn.functional.layer_norm(x, (WIDTH,), w, b), *weight) == pytest.approx(10.0, rel=0.1)
    assert counted(torch.nn.functional.gelu, (ROWS, WIDTH)) == pytest.approx(10.0)


def test_an_optimizer_of_many_kernels_moves_as_much_as_the_setting_says():
    weights = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1, foreach=True)
    for _ in range(2):  # the first step makes the moments
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with Traffic() as traffic:
            optimizer.step()
    elements = sum(weight.numel() for weight in weights)
    fused = PRECISION_POLICIES[Precision.FP32].step_bytes_per_parameter(Optimizer.ADAMW)
    assert traffic.num_bytes / elements / fused == pytest.approx(EAGER_ADAMW, rel=0.1)
