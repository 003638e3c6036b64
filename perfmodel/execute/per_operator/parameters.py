"""Weights, gradients and optimizer state of one rank, and what becomes of them: ZeRO stages 0 to 3.

Without ZeRO each gradient is reduced by itself after the last backward pass, all of them at once. Stage 1 has flat buffers of each unit
(`parallel/per_operator/parameters.py`); 2 and 3 are torch's `fully_shard` on modules that hold the parameters of a unit. Stage 3 frees
gathered weights after each pass, 2 after the last microbatch; both reduce gradients each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from perfmodel.execute.per_operator.interpret import Chain, Interpreter, Section, Values
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose, begin_all_reduce
from perfmodel.execute.zero.flat import Dtypes, FlatUnit, update
from perfmodel.execute.zero.optimizers import ShardOptimizer, build_optimizer, state_of
from perfmodel.parallel.per_operator.parameters import ParameterUnit, unit_traffic
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Pass
from perfmodel.workload.job import Optimizer


class Parameters:
    """ZeRO 0. `tensors`: what the rank has of each parameter, by name, a leaf that wants a gradient.

    readers    operator that a gradient's collective is put on record for
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        units: Sequence[ParameterUnit],
        plan: Plan,
        mesh: NetworkMesh,
        *,
        readers: Mapping[str, str],
        optimizer: Optimizer,
        learning_rate: float,
    ) -> None:
        self.tensors, self.units, self.plan, self.mesh, self.readers = tensors, units, plan, mesh, readers
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.times = plan.num_microbatches
        self.unreduced: Iterable[str] = [name for unit in units for name in unit.parameters]
        self.axes = {name: unit.axes for unit in units for name in unit.parameters}
        self._updates = ShardOptimizer(optimizer, learning_rate=learning_rate)

    def read(self, name: str) -> torch.Tensor:
        """As an operator reads it now."""
        return self.tensors[name]

    def module(self, interpreter: Interpreter, sections: Sequence[tuple[int, int]]) -> nn.Module | None:
        """The stage as modules, where ZeRO needs them."""
        return None

    def begin_step(self) -> None:
        """Where several microbatches add up, each gradient has a place of its own: torch hands two parameters one tensor as their gradient
        (both biases of a sum, a sample a rank), which must not be added to twice."""
        for name in self.unreduced:
            parameter = self.tensors[name]
            parameter.grad = torch.zeros_like(parameter) if self.times > 1 else None

    def begin_backward(self, microbatch: int) -> None:
        """Of a microbatch, which come in order."""

    def finish_gradients(self) -> None:
        """All at once: the ranks meet once, not for each. In place, but where two parameters have one tensor as their gradient."""
        seen: set[int] = set()
        for name in self.unreduced:
            parameter = self.tensors[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if (where := parameter.grad.untyped_storage().data_ptr()) in seen:
                parameter.grad = parameter.grad.clone()
            seen.add(where)
        under_way = []
        for name in self.unreduced:
            parameter = self.tensors[name]
            if self.axes[name] and parameter.grad is not None:
                purpose = Purpose(Pass.BACKWARD, name, self.readers[name], "gradient")
                parameter.grad = parameter.grad.contiguous()
                under_way.append(begin_all_reduce(self.mesh, parameter.grad, self.axes[name], purpose))
        for work in under_way:
            work.wait()

    def update(self) -> None:
        if self.learning_rate:
            self._updates.step(self._held())

    def _held(self) -> Iterable[torch.Tensor]:
        return self.tensors.values()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Before the update, each in the layout of its parameter. Every rank must ask."""
        for name, parameter in self.tensors.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def stored(self) -> Iterator[torch.Tensor]:
        """What lives between steps."""
        yield from self.tensors.values()
        yield from state_of(self._updates.optimizer)

    def release(self) -> None:
        """Free what lives between steps besides the weights."""
        for parameter in self.tensors.values():
            parameter.grad = None

    def _note(self, unit: ParameterUnit, ways: int, *, together: bool) -> None:
        issued = unit.padded_elements(ways, together=together)
        for row in unit_traffic(unit, self.plan.zero, self.times):
            for _ in range(row.repeats):
                self.mesh.note(row.kind, row.axes, row.num_elements, Purpose(row.phase, row.tensor, row.operator, row.what), issued=issued)


class FlatParameters(Parameters):
    """ZeRO 1: gradients add up in flat buffers, leave as shards once a step, and new weights are gathered."""

    def __init__(self, tensors: dict[str, torch.Tensor], units: Sequence[ParameterUnit], *rest: Any, **more: Any) -> None:
        super().__init__(tensors, units, *rest, **more)
        self.flat: list[tuple[ParameterUnit, FlatUnit]] = []
        for unit in units:
            own = [tensors[name] for name in unit.parameters]
            dtype = own[0].dtype
            flat = FlatUnit(
                [tensor.numel() for tensor in own],
                shard_group=self.mesh.process_group(unit.axes),
                replica_group=None,
                dtypes=Dtypes(weight=dtype, reduce=dtype, master=dtype),
                device=self.mesh.device,
            )
            for name, tensor, place in zip(unit.parameters, own, flat.places, strict=True):
                flat.weights[place] = tensor.detach().reshape(-1)
                tensors[name] = flat.weights[place].view(tensor.shape).detach().requires_grad_()
            self.flat.append((unit, flat))
        masters = [flat.master for _, flat in self.flat]
        # a stage may have no parameters at all
        self._optimizer = build_optimizer(self.optimizer, masters, learning_rate=self.learning_rate) if masters else None

    def begin_step(self) -> None:
        for unit, flat in self.flat:
            flat.gradients.zero_()
            for name, place in zip(unit.parameters, flat.places, strict=True):
                self.tensors[name].grad = flat.gradients[place].view(self.tensors[name].shape)

    def finish_gradients(self) -> None:
        for _, flat in self.flat:
            flat.launch()
        for unit, flat in self.flat:
            flat.finish()
            if unit.axes:
                self._note(unit, self.mesh.size(unit.axes), together=True)

    def update(self) -> None:
        if self._optimizer is not None:
            update(self._optimizer, [flat for _, flat in self.flat])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for unit, flat in self.flat:
            whole = flat.whole_gradients()
            for name, place in zip(unit.parameters, flat.places, strict=True):
                yield name, whole[place].view(self.tensors[name].shape).clone()

    def stored(self) -> Iterator[torch.Tensor]:
        for _, flat in self.flat:
            yield flat.weights
            yield flat.gradients
        yield from state_of(self._optimizer)

    def release(self) -> None: ...


class _Holder(nn.Module):
    """Holds the parameters of a unit for `fully_shard`, and what reads them.

    Each as a vector: `fully_shard` cuts the first dim, which of a weight with a dim for heads may be shorter than the group.
    """

    def __init__(self, unit: ParameterUnit, tensors: Mapping[str, torch.Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.places = {name: f"p{number}" for number, name in enumerate(unit.parameters)}
        for name, place in self.places.items():
            self.register_parameter(place, nn.Parameter(tensors[name].detach().reshape(-1)))
        self.shapes = {name: tensors[name].shape for name in unit.parameters}
        self.inner = inner

    def read(self, name: str) -> torch.Tensor:
        """As `fully_shard` has it now: whole while an operator computes with it."""
        return getattr(self, self.places[name]).view(self.shapes[name])  # type: ignore[no-any-return]

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        return self.inner(values, microbatch)  # type: ignore[no-any-return]


class _Plain(nn.Module):
    """Keeps the modules of `fully_shard` from torch's pipelines, which would reduce gradients once a step and keep weights gathered."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        return self.inner(values, microbatch)  # type: ignore[no-any-return]


class ShardedParameters(Parameters):
    """ZeRO 2 and 3. Parameters whose gradient no other rank adds to stay as they are."""

    def __init__(self, tensors: dict[str, torch.Tensor], units: Sequence[ParameterUnit], *rest: Any, **more: Any) -> None:
        super().__init__(tensors, units, *rest, **more)
        self.keeps_weights = self.plan.zero == 2
        self.holders: list[tuple[ParameterUnit, _Holder]] = []
        self.holder_of: dict[str, _Holder] = {}
        self.unreduced = [name for unit in units if not unit.axes for name in unit.parameters]

    def module(self, interpreter: Interpreter, sections: Sequence[tuple[int, int]]) -> nn.Module:
        start, end = interpreter.run_of
        modules = [self._held_by(number, Section(interpreter, *section)) for number, section in enumerate(sections)]
        wanted = [interpreter.wanted_from_before(*section) for section in sections]
        chain = Chain(modules, wanted, interpreter.left_for_others(start, end))
        return _Plain(self._held_by(-1, chain))

    def _held_by(self, section: int, module: nn.Module) -> nn.Module:
        """The module inside one holder for each unit of the section."""
        for unit in self.units:
            if unit.section != section or not unit.axes:
                continue
            module = holder = _Holder(unit, self.tensors, module)
            for name in unit.parameters:
                self.holder_of[name] = holder
                del self.tensors[name]
            fully_shard(holder, mesh=self.mesh.group(unit.axes), reshard_after_forward=not self.keeps_weights)
            assert isinstance(holder, FSDPModule)
            # gradients are shares of a sum
            holder.set_gradient_divide_factor(1.0)
            holder.set_force_sum_reduction_for_comms(True)
            self.holders.append((unit, holder))
        return module

    def read(self, name: str) -> torch.Tensor:
        holder = self.holder_of.get(name)
        return self.tensors[name] if holder is None else holder.read(name)

    def _sharded(self) -> Iterator[tuple[str, nn.Parameter]]:
        for _, holder in self.holders:
            for name, place in holder.places.items():
                yield name, holder.get_parameter(place)

    def begin_step(self) -> None:
        super().begin_step()
        for _, parameter in self._sharded():
            parameter.grad = None

    def begin_backward(self, microbatch: int) -> None:
        if self.keeps_weights:
            for _, holder in self.holders:
                assert isinstance(holder, FSDPModule)
                holder.set_reshard_after_backward(microbatch == self.times - 1, recurse=False)

    def finish_gradients(self) -> None:
        super().finish_gradients()
        for unit, _ in self.holders:
            self._note(unit, self.mesh.size(unit.axes), together=False)

    def _held(self) -> Iterable[torch.Tensor]:
        yield from self.tensors.values()
        for _, parameter in self._sharded():
            yield parameter

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().gradients()
        for name, parameter in self._sharded():
            assert isinstance(parameter.grad, DTensor)
            yield name, parameter.grad.full_tensor().view(self.holder_of[name].shapes[name])

    def stored(self) -> Iterator[torch.Tensor]:
        yield from super().stored()
        for _, parameter in self._sharded():
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def release(self) -> None:
        super().release()
        for _, parameter in self._sharded():
            parameter.grad = None
        for _, holder in self.holders:
            assert isinstance(holder, FSDPModule)
            holder.reshard()  # a forward pass alone may have left weights gathered


#: By ZeRO stage.
KINDS: Mapping[int, type[Parameters]] = {0: Parameters, 1: FlatParameters, 2: ShardedParameters, 3: ShardedParameters}
