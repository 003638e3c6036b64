"""One rank of the tests of `perfmodel.parallelize`, as a user writes it."""

from __future__ import annotations

import copy
import zlib

import torch

import perfmodel
from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import ROUND_OFF_FLOOR
from perfmodel.execute.modules.module import without_dropout
from perfmodel.parallel.plan import Plan
from perfmodel.workload.imported.input_spec import parse_inputs
from tests.execute.modules import user_modules


def loss_of(output, seed: int = 0) -> torch.Tensor:
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    total = torch.zeros(())
    for number, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(seed + number)
        total = total + (tensor * torch.randn(tensor.shape, generator=generator)).mean()
    return total


def train(worker: Worker, factory: str, plan: Plan, inputs: tuple[str, ...], steps: int) -> tuple[list[float], dict[str, float]]:
    """Losses less those of one process, and the worst error of the gradients of the first step."""
    torch.manual_seed(0)
    module = getattr(user_modules, factory)()
    for submodule in module.modules():
        if isinstance(submodule, torch.nn.Dropout):
            submodule.p = 0.0
    alone = copy.deepcopy(module)
    data = []
    for spec in parse_inputs(inputs):
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        is_float = spec.dtype.startswith("float")
        data.append(
            (spec.name, torch.randn(spec.shape, generator=generator) if is_float else torch.randint(2, spec.shape, generator=generator))
        )
    parallel = perfmodel.parallelize(module, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    differences, errors = [], {}
    for step in range(steps):
        loss, expected = loss_of(parallel(**dict(data))), None
        with without_dropout():
            expected = loss_of(alone(**dict(data)))
        loss.backward()
        expected.backward()
        differences.append(float((loss - expected).detach().abs()))
        if not step:
            gradients = parallel.whole_parameters(gradients=True)
            largest = max(float(parameter.grad.abs().max()) for parameter in alone.parameters() if parameter.grad is not None)
            for name, gradient in gradients.items():
                wanted = alone.get_parameter(name).grad
                errors[name] = float((gradient - wanted).abs().max() / max(float(wanted.abs().max()), ROUND_OFF_FLOOR * largest))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    return differences, errors
