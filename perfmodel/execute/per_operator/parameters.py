"""Weights, gradients and optimizer state of one rank under ZeRO stages 0 to 3.

Stages 0 and 1 use flat buffers per unit (`parallel/per_operator/parameters.py`), reduced once a step and overlapped with
backward. Stages 2 and 3 use torch's `fully_shard` on modules that hold the parameters of a unit. Stage 3 reshards
weights after each pass, stage 2 after the last micro-batch; both reduce gradients every micro-batch. In a pipeline, both keep weights
gathered and reduce gradients once a step, as torch does. Gradients of shards with several replicas (`dp_replicate`, weights of norms
that tp reads in parts) are all-reduced over them once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from perfmodel.execute.layers.kernel import differentiable
from perfmodel.execute.local import local_tensor
from perfmodel.execute.per_operator.interpret import Chain, Interpreter, Section, Values
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose, all_reduce, begin_all_reduce
from perfmodel.execute.zero import Dtypes, FlatUnit, ShardOptimizer, build_optimizer, state_of, update
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.parallel.per_operator.parameters import ParameterUnit, tied_traffic, unit_traffic
from perfmodel.parallel.plan import Plan
from perfmodel.workload.job import Optimizer
from perfmodel.workload.work import Pass


class Parameters:
    """Replicated parameters; each gradient is all-reduced separately after the last backward pass.

    tensors    local part of each trained parameter, by name: an autograd leaf
    frozen     the same of frozen parameters
    masters    tensors that the optimizer updates; equal to `tensors` without master copies
    sums       accumulated gradients, if they are accumulated and reduced in another dtype
    readers    operator under which a gradient's collective is recorded
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        units: Sequence[ParameterUnit],
        plan: Plan,
        mesh: NetworkMesh,
        *,
        dtypes: Dtypes,
        readers: Mapping[str, str],
        optimizer: Optimizer,
        learning_rate: float,
    ) -> None:
        self.frozen = {name: tensor.to(dtypes.weight) for name, tensor in tensors.items() if not tensor.requires_grad}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self.units, self.plan, self.mesh, self.readers, self.dtypes = units, plan, mesh, readers, dtypes
        self.masters, self.tensors = tensors, tensors
        self.sums: dict[str, torch.Tensor] = {}
        if dtypes.has_master_copy:
            self.tensors = {name: tensor.detach().to(dtypes.weight).requires_grad_() for name, tensor in tensors.items()}
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.times = plan.num_microbatches
        self.unreduced: Iterable[str] = [name for unit in units for name in unit.parameters if not unit.is_frozen]
        self.axes = {name: unit.axes for unit in units for name in unit.parameters}
        self._updates = ShardOptimizer(optimizer, learning_rate=learning_rate)
        self._has_hooks = False

    @property
    def adds_up(self) -> bool:
        """Whether gradients are accumulated in another dtype than that of backward."""
        return self.dtypes.reduce != self.dtypes.weight

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter as an operator reads it."""
        return self.tensors[name] if name in self.tensors else self.frozen[name]

    def module(self, interpreter: Interpreter, stage: int, sections: Sequence[tuple[int, int]]) -> nn.Module | None:
        """Return a stage as modules, where ZeRO needs them."""
        return None

    def begin_step(self) -> None:
        """Give each gradient its own buffer if several micro-batches accumulate: autograd may return one tensor as the gradient of two
        parameters (both biases of a sum, one sample per rank), and accumulation must not add to it twice."""
        if self.adds_up and not self._has_hooks:  # that add each gradient to its sum as soon as it is computed
            for name in self.unreduced:
                self.tensors[name].register_post_accumulate_grad_hook(partial(_add_up, self.sums, name))
        self._has_hooks = True
        for name in self.unreduced:
            parameter = self.tensors[name]
            parameter.grad = torch.zeros_like(parameter) if self.times > 1 and not self.adds_up else None
            if self.adds_up:
                self.sums[name] = torch.zeros_like(parameter, dtype=self.dtypes.reduce)

    def begin_backward(self, microbatch: int, stage: int) -> None:
        """Prepare the backward pass of a micro-batch through a stage; called in order."""

    def finish_gradients(self) -> None:
        """Reduce the gradients of all micro-batches."""
        self._reduce()
        for unit in self.units:
            if len(unit.holders) > 1 and not unit.is_frozen:
                row = tied_traffic(unit, self.plan.zero)
                for gradient in self._kept_gradients(unit):
                    purpose = Purpose(row.phase, row.tensor, row.operator, row.what)
                    self.mesh.note(row.kind, row.axes, row.num_elements, purpose, issued=gradient.numel())
                    dist.all_reduce(gradient, group=self.mesh.holders_group(unit.holders))

    def _kept_gradients(self, unit: ParameterUnit) -> Iterator[torch.Tensor]:
        """Yield this rank's reduced gradients of a unit."""
        for name in unit.parameters:
            gradient = self.sums[name] if self.adds_up else self.tensors[name].grad
            assert gradient is not None
            yield gradient

    def _reduce(self) -> None:
        """All-reduce all gradients at once, in place, so that the ranks synchronise only once. Aliased gradients are cloned first."""
        seen: set[int] = set()
        for name in () if self.adds_up else self.unreduced:
            parameter = self.tensors[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if (where := parameter.grad.untyped_storage().data_ptr()) in seen:
                parameter.grad = parameter.grad.clone()
            seen.add(where)
            parameter.grad = parameter.grad.contiguous()
        pending = []
        for name in self.unreduced:
            gradient = self.sums[name] if self.adds_up else self.tensors[name].grad
            if self.axes[name] and gradient is not None:
                purpose = Purpose(Pass.BACKWARD, name, self.readers[name], "gradient")
                pending.append(begin_all_reduce(self.mesh, gradient, self.axes[name], purpose))
        for work in pending:
            work.wait()

    def update(self) -> None:
        if not self.learning_rate:
            return
        for name, gradient in self.sums.items():
            self.masters[name].grad = gradient.to(self.dtypes.master)
        self.sums.clear()
        self._updates.step(self._held())
        if self.dtypes.has_master_copy:
            for name, tensor in self.tensors.items():
                tensor.detach().copy_(self.masters[name])

    def _held(self) -> Iterable[torch.Tensor]:
        return self.masters.values()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients before the update, in the layouts of their parameters. Collective: call it on every rank."""
        yield from self.sums.items()
        for name, parameter in self.tensors.items():
            if parameter.grad is not None:
                yield name, parameter.grad

    def stored(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that persist between steps."""
        yield from self.frozen.values()
        yield from self.tensors.values()
        yield from self.masters.values() if self.dtypes.has_master_copy else ()
        yield from state_of(self._updates.optimizer)

    def release(self) -> None:
        """Free all memory that persists between steps, except the weights."""
        self.sums.clear()
        for parameter in self.tensors.values():
            parameter.grad = None

    def _note(self, unit: ParameterUnit, *, together: bool) -> None:
        padded = unit.padded_elements(together=together) if self.plan.zero else unit.num_elements
        for row in unit_traffic(unit, self.plan.zero, self.times, keeps=self.plan.layout.pp > 1):
            if row.what == "sum":
                continue  # recorded where it is issued
            issued = padded // unit.ways if row.kind is CollectiveKind.ALL_REDUCE and self.plan.zero else padded
            for _ in range(row.repeats):
                self.mesh.note(row.kind, row.axes, row.num_elements, Purpose(row.phase, row.tensor, row.operator, row.what), issued=issued)


def _add_up(sums: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    """Add a gradient to its sum. (The hook does not reference its parameter, which would keep it alive.)"""
    assert parameter.grad is not None
    sums[name].add_(parameter.grad)
    parameter.grad = None


class FlatParameters(Parameters):
    """ZeRO 0 and 1: gradients accumulate in flat buffers, reduced once a step. ZeRO 1 reduce-scatters them and all-gathers new weights."""

    def __init__(self, tensors: dict[str, torch.Tensor], units: Sequence[ParameterUnit], *rest: Any, **more: Any) -> None:
        super().__init__(tensors, units, *rest, **more)
        self.masters = {}
        self.flat: list[tuple[ParameterUnit, FlatUnit]] = []
        for unit in units:
            shards = unit.shard_axes if self.plan.zero else frozenset[str]()
            flat = FlatUnit(
                {name: tensors[name].numel() for name in unit.parameters},
                shard_group=self.mesh.process_group(shards),
                replica_group=self.mesh.process_group(unit.axes - shards),
                dtypes=self.dtypes,
                device=self.mesh.device,
            )
            flat.fill((name, tensors[name].detach()) for name in unit.parameters)
            for name, span in flat.places.items():
                parameter = self.tensors[name] = flat.weights[span].view(tensors[name].shape).detach().requires_grad_()
                parameter.register_post_accumulate_grad_hook(partial(flat.accumulate, name, local_tensor))
            self.flat.append((unit, flat))
        masters = [flat.master for _, flat in self.flat]
        # a stage may have no parameters
        self._optimizer = build_optimizer(self.optimizer, masters, learning_rate=self.learning_rate) if masters else None

    def begin_step(self) -> None:
        for _, flat in self.flat:
            flat.begin_step(len(flat.places) * self.times)

    def _kept_gradients(self, unit: ParameterUnit) -> Iterator[torch.Tensor]:
        yield from (flat.gradients[flat.shard] for owner, flat in self.flat if owner is unit)

    def _reduce(self) -> None:
        for _, flat in self.flat:
            flat.complete()
        for unit, flat in self.flat:
            flat.finish()
            if unit.axes:
                self._note(unit, together=True)

    def update(self) -> None:
        if self._optimizer is not None:
            update(self._optimizer, [flat for _, flat in self.flat])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for _, flat in self.flat:
            full = flat.full_gradients()
            for name, span in flat.places.items():
                yield name, full[span].view(self.tensors[name].shape).clone()

    def stored(self) -> Iterator[torch.Tensor]:
        yield from self.frozen.values()
        for _, flat in self.flat:
            yield flat.weights
            yield flat.gradients
            yield flat.master
        yield from state_of(self._optimizer)

    def release(self) -> None: ...


#: (tensor, mesh, axes, purpose) -> the tensor; its gradient is all-reduced over the axes.
summed = differentiable(
    lambda tensor, mesh, axes, purpose: tensor.view_as(tensor),
    lambda gradient, mesh, axes, purpose: all_reduce(mesh, gradient.clone(), axes, purpose),
    keeps_inputs=False,
    is_contiguous=False,
)


class _Holder(nn.Module):
    """Module that holds the parameters of a unit for `fully_shard`, and the module that reads them.

    Parameters are flattened: `fully_shard` shards the first dim, and that of a weight with a heads dim may be shorter than the group.
    """

    def __init__(self, unit: ParameterUnit, tensors: Mapping[str, torch.Tensor], inner: nn.Module, mesh: NetworkMesh) -> None:
        super().__init__()
        self.unit, self.mesh = unit, mesh
        self.places = {name: f"p{number}" for number, name in enumerate(unit.parameters)}
        for name, attribute in self.places.items():
            self.register_parameter(attribute, nn.Parameter(tensors[name].detach().reshape(-1), requires_grad=not unit.is_frozen))
        self.shapes = {name: tensors[name].shape for name in unit.parameters}
        self.inner = inner

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter as `fully_shard` provides it: unsharded while an operator computes with it."""
        weight = getattr(self, self.places[name]).view(self.shapes[name])
        axes = self.unit.summed.get(name)
        if axes is None:
            return weight  # type: ignore[no-any-return]
        purpose = Purpose(Pass.BACKWARD, name, self.unit.operator, "sum")
        return summed(weight, self.mesh, axes, purpose)

    def forward(self, values: Mapping[str, torch.Tensor], microbatch: int) -> Values:
        return self.inner(values, microbatch)  # type: ignore[no-any-return]


class ShardedParameters(Parameters):
    """ZeRO 2 and 3. Parameters that no axis shards are handled as under ZeRO 0."""

    def __init__(self, tensors: dict[str, torch.Tensor], units: Sequence[ParameterUnit], *rest: Any, **more: Any) -> None:
        super().__init__(tensors, units, *rest, **more)
        self.adds_up_whole = self.plan.layout.pp > 1
        self.keeps_weights = self.plan.zero == 2 or self.adds_up_whole
        self.holders: list[tuple[ParameterUnit, _Holder]] = []
        self.holder_of: dict[str, _Holder] = {}
        self.unreduced = [name for unit in units if not (unit.shard_axes or unit.is_frozen) for name in unit.parameters]

    def module(self, interpreter: Interpreter, stage: int, sections: Sequence[tuple[int, int]]) -> nn.Module:
        start, end = interpreter.run_of
        modules = [self._held_by(stage, number, Section(interpreter, *section)) for number, section in enumerate(sections)]
        wanted = [interpreter.external_inputs(*section) for section in sections]
        chain = Chain(modules, wanted, interpreter.external_outputs(start, end))
        return self._held_by(stage, -1, chain)

    def _held_by(self, stage: int, section: int, module: nn.Module) -> nn.Module:
        """Return the module wrapped in one holder for each unit of the section."""
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.dtypes.has_master_copy:
            policy = MixedPrecisionPolicy(param_dtype=self.dtypes.weight, reduce_dtype=self.dtypes.reduce, cast_forward_inputs=False)
        for unit in self.units:
            if (unit.stage, unit.section) != (stage, section) or not unit.shard_axes:
                continue
            module = holder = _Holder(unit, self.frozen if unit.is_frozen else self.masters, module, self.mesh)
            for name in unit.parameters:
                self.holder_of[name] = holder
                for held in (self.tensors, self.masters, self.frozen):
                    held.pop(name, None)
            for axes in unit.summed.values():
                self.mesh.group(axes)
            mesh = self.mesh.shard_mesh(unit.shard_axes, unit.replica_axes)
            frees = not self.keeps_weights and not unit.is_wanted_at_once
            fully_shard(holder, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
            assert isinstance(holder, FSDPModule)
            # each rank has a partial gradient: sum, do not average
            holder.set_gradient_divide_factor(1.0)
            holder.set_force_sum_reduction_for_comms(True)
            self.holders.append((unit, holder))
        return module

    def read(self, name: str) -> torch.Tensor:
        holder = self.holder_of.get(name)
        return super().read(name) if holder is None else holder.read(name)

    def _sharded(self) -> Iterator[tuple[str, nn.Parameter]]:
        for _, holder in self.holders:
            for name, attribute in holder.places.items():
                yield name, holder.get_parameter(attribute)

    def full_tensors(self, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """Return the parameters that `fully_shard` holds, or their gradients, in the layouts of the plan. A collective call."""
        shards = {}
        for name, parameter in self._sharded():
            tensor = parameter.grad if gradients else parameter
            if isinstance(tensor, DTensor):
                shards[name] = tensor.full_tensor().view(self.holder_of[name].shapes[name])
        return shards

    def begin_step(self) -> None:
        super().begin_step()
        for _, parameter in self._sharded():
            parameter.grad = None

    def begin_backward(self, microbatch: int, stage: int) -> None:
        is_last = microbatch == self.times - 1
        for unit, holder in self.holders:
            assert isinstance(holder, FSDPModule)
            if unit.stage != stage:
                continue
            if self.adds_up_whole:
                holder.set_requires_gradient_sync(is_last, recurse=False)
            if self.keeps_weights:
                holder.set_reshard_after_backward(is_last, recurse=False)
            if unit.replica_axes:
                holder.set_requires_all_reduce(is_last, recurse=False)

    def _kept_gradients(self, unit: ParameterUnit) -> Iterator[torch.Tensor]:
        if not unit.shard_axes:
            yield from super()._kept_gradients(unit)
            return
        for name in unit.parameters:
            holder = self.holder_of[name]
            gradient = holder.get_parameter(holder.places[name]).grad
            assert isinstance(gradient, DTensor)
            yield gradient.to_local()

    def _reduce(self) -> None:
        super()._reduce()
        for unit, holder in self.holders:
            self._note(unit, together=False)
            if not unit.runs_backward:
                assert isinstance(holder, FSDPModule)
                holder.reshard()  # as torch does after a backward pass

    def _held(self) -> Iterable[torch.Tensor]:
        yield from super()._held()
        for _, parameter in self._sharded():
            yield parameter

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().gradients()
        for name, parameter in self._sharded():
            if not parameter.requires_grad:
                continue
            assert isinstance(parameter.grad, DTensor)
            yield name, parameter.grad.full_tensor().view(self.holder_of[name].shapes[name])

    def stored(self) -> Iterator[torch.Tensor]:
        yield from super().stored()
        for _, parameter in self._sharded():
            yield local_tensor(parameter)

    def release(self) -> None:
        super().release()
        for _, parameter in self._sharded():
            parameter.grad = None
        for _, holder in self.holders:
            assert isinstance(holder, FSDPModule)
            holder.reshard()  # a forward pass without backward may have left weights gathered


#: By ZeRO stage.
KINDS: Mapping[int, type[Parameters]] = {0: FlatParameters, 1: FlatParameters, 2: ShardedParameters, 3: ShardedParameters}
