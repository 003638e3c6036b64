"""Training program of a network on one rank: its operators in order, each in the layouts of the plan.

Inputs and parameters are generated at full size from a seed, the same on every rank and in one process, then sharded for their
readers. The loss is the mean of the network's outputs over all micro-batches. A tensor with several readers is redistributed through
the layout that holds it. A parameter's gradient is reduced over the axes on which it is partial.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.layers.norm import wide
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.functions import FUNCTIONS, NetworkFunction
from perfmodel.execute.per_operator.interpret import Interpreter, NetworkEnds, Values
from perfmodel.execute.per_operator.mesh import NetworkMesh
from perfmodel.execute.per_operator.padding import padded_network
from perfmodel.execute.per_operator.parameters import KINDS
from perfmodel.execute.per_operator.pipeline import NetworkStage, StagePipeline
from perfmodel.execute.per_operator.redistribute import local_part
from perfmodel.execute.per_operator.refuse import check_runnable
from perfmodel.execute.zero import Dtypes, dtypes_of
from perfmodel.parallel.algebra.sharding import Held, Layout
from perfmodel.parallel.choices import PipelineSchedule, Recompute, ZeroStage
from perfmodel.parallel.layout import ParallelLayout
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.per_operator.parameters import parameter_units
from perfmodel.parallel.per_operator.stages import sections_of, stage_runs
from perfmodel.parallel.per_operator.traffic import derive_assigned
from perfmodel.parallel.plan import Plan
from perfmodel.workload.graph import Graph, TensorRole
from perfmodel.workload.job import Optimizer

if TYPE_CHECKING:
    from perfmodel.execute.modules.module import UserModule

NO_FUNCTIONS: Mapping[str, NetworkFunction] = MappingProxyType({})


def one_process(network: Graph, plan: Plan) -> Plan:
    """Return the unsharded plan without recomputation; the number of micro-batches stays."""
    held = {tensor: Held(cuts=((),) * len(network.tensors[tensor].shape)) for tensor in plan.cuts.held}
    unsharded = Assignment(axes=(), shardings={operator.name: {} for operator in network.operators}, held=held)
    alone: dict[str, Any] = {"layout": ParallelLayout(), "schedule": PipelineSchedule.ONE_F_ONE_B, "virtual_stages": 1}
    return replace(plan, num_chips=1, zero=ZeroStage.NONE, recompute=Recompute.NONE, sharding=unsharded, **alone)


def index_limit(network: Graph, tensor: str) -> int:
    """Return the upper bound of an index tensor: the rows of the smallest table that it indexes, or the number of classes."""
    limits = []
    for index, position in network.readers().get(tensor, []):
        operator = network.operators[index]
        named = operator.settings.get("over", "") if position else operator.inputs[1].dims[0] if len(operator.inputs) > 1 else ""
        limits.append(operator.dims[str(named)] if named else 2)
    return min(limits, default=2)


def make_tensor(network: Graph, name: str, seed: int, dtype: torch.dtype, microbatch: int = 0) -> torch.Tensor:
    """Generate a tensor that no operator computes, at full size, seeded by its name. Weights are scaled to keep activations near one."""
    tensor = network.tensors[name]
    drawn_by = f"{name} of microbatch {microbatch}" if microbatch else name
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(drawn_by.encode()))
    if tensor.role is TensorRole.INDEX:
        return torch.randint(index_limit(network, name), tensor.shape, generator=generator)
    values = torch.randn(tensor.shape, generator=generator)
    if tensor.role is TensorRole.PARAMETER:
        if len(tensor.shape) > 1:
            values /= sqrt(prod(tensor.shape[1:]))
        else:
            values = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    return values.to(dtype)


class NetworkProgram:
    """One rank's part of the training step. `network` must be the network of the plan.

    dtype       of all tensors; None: according to the plan's precision
    optimizer   "" for the plan's
    functions   kind -> torch function, with priority over `FUNCTIONS`
    module      the user's module that the network was imported from: its weights, data and functions
    imitate     sharded plan that a single process is compared with (`OperatorContext.imitate`)
    """

    def __init__(
        self,
        worker: Worker,
        network: Graph,
        plan: Plan,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = torch.float32,
        optimizer: str = Optimizer.SGD,
        learning_rate: float = 0.0,
        functions: Mapping[str, NetworkFunction] = NO_FUNCTIONS,
        imitate: Plan | None = None,
        module: UserModule | None = None,
    ) -> None:
        check_runnable(network, plan, functions if module is None else {operator.kind for operator in network.operators})
        self.worker, self.plan, self.given, self.module, self.seed = worker, plan, network, module, seed
        self.network = padded_network(network, plan)
        self.mesh = NetworkMesh(worker, plan.cuts.axes, num_stages=plan.layout.pp)
        dtypes = dtypes_of(plan.job.precision) if dtype is None else Dtypes(weight=dtype, reduce=dtype, master=dtype)
        self.dtype = dtypes.weight
        self.derivation = derive_assigned(self.network, plan.cuts)
        self.producers, self.readers = self.network.producers(), self.network.readers()
        self.layouts: dict[str, Layout] = {}
        self.inputs: dict[tuple[str, Layout, int], torch.Tensor] = {}
        runs = dict(enumerate(stage_runs(self.network, plan)))
        runs = {index: run for index, run in runs.items() if index % plan.layout.pp == self.mesh.stage}
        self.local_operators = {index for run in runs.values() for index in range(*run)}
        units = parameter_units(self.network, plan)
        for unit in units:
            if len(unit.holders) > 1:
                self.mesh.holders_group(unit.holders)
        self.known: dict[str, list[torch.Tensor]] = {}
        parameters = self._fill(dtypes.master)
        self.parameters = KINDS[plan.zero](
            parameters,
            [unit for unit in units if unit.stage in runs],
            plan,
            self.mesh,
            dtypes=dtypes,
            readers={name: self.network.operators[self.readers[name][0][0]].name for name in parameters},
            optimizer=Optimizer(optimizer or plan.job.optimizer),
            learning_rate=learning_rate,
        )
        table = {**FUNCTIONS, **functions, **({} if module is None else module.functions(self.network))}
        returned = [] if module is None else module.outputs()
        self.stages = self._build_stages(runs, table, returned, imitate)
        self.outputs = returned or [name for stage in self.stages for name in stage.left if name not in self.readers]
        self.leaving = {name: self.stages[-1].interpreter.leave(name) for name in self.outputs if name in self.readers}
        self.loss_weights: dict[str, torch.Tensor] = {}
        if module is not None:
            for name in returned:
                weight = self.padded(name, module.loss_weight(name, seed, self.dtype, network.tensors[name].shape))
                self.loss_weights[name] = local_part(weight, self._left(name), self.mesh).clone().to(worker.device)
        self.pipeline = StagePipeline(self) if self.mesh.num_stages > 1 else None

    def _build_stages(
        self, runs: Mapping[int, tuple[int, int]], functions: Mapping[str, NetworkFunction], outputs: Sequence[str], imitate: Plan | None
    ) -> list[NetworkStage]:
        contexts = {}
        for index in sorted(self.local_operators):
            operator, copied = self.network.operators[index], {}
            if imitate is not None:
                copied = {dim: imitate.cuts.size(tuple(axes)) for dim, axes in imitate.cuts.shardings[operator.name].items()}
            sharding, dims = self.plan.cuts.shardings[operator.name], dict(self.given.operators[index].dims)
            contexts[index] = OperatorContext(self.mesh, operator, sharding, dims, copied)
        index_dtype = torch.int32 if self.dtype.itemsize == 4 else torch.int64
        ends = NetworkEnds(outputs=frozenset(outputs), known=frozenset(self.known), index_dtype=index_dtype)
        stages = []
        for index, run in runs.items():
            interpreter = Interpreter(
                self.worker,
                self.derivation,
                self.plan,
                self.mesh,
                run,
                functions=functions,
                contexts=contexts,
                parameter=self.parameters.read,
                given=lambda name, layout, microbatch: self.inputs[name, layout, microbatch],
                ends=ends,
            )
            module = self.parameters.module(interpreter, index, sections_of(self.network, run))
            stages.append(NetworkStage(index, run, interpreter, module))
        return stages

    # ------------------------------------------------------------------------------------------------ parameters and data

    def _whole(self, name: str, dtype: torch.dtype, microbatch: int = 0) -> torch.Tensor:
        """Return a tensor at full size, padded with zeros."""
        if self.module is not None:
            return self.padded(name, self.module.draw(name, self.seed, dtype, microbatch))
        return self.padded(name, make_tensor(self.given, name, self.seed, dtype, microbatch))

    def padded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return an unpadded tensor of the network, padded with zeros."""
        padding = [extra for old, new in zip(tensor.shape, self.network.tensors[name].shape, strict=True) for extra in (new - old, 0)]
        return torch.nn.functional.pad(tensor, padding[::-1]) if any(padding) else tensor

    def _left(self, name: str) -> Layout:
        """Return the layout in which an output leaves the network."""
        held = self.plan.cuts.held.get(name) if name in self.readers else None
        return held.layout if held is not None else self.derivation.left[name]

    def _fill(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the parameters of this stage in `dtype`; store its data in `inputs`, and unsharded outputs of operators on data alone
        in `known`, by micro-batch."""
        if self.module is not None:
            given = self.module.known_inputs()
            for microbatch in range(self.plan.num_microbatches):
                values = {name: self.module.draw(name, self.seed, self.dtype, microbatch) for name in given}
                for name, value in self.module.known(values, self.mesh).items():
                    self.known.setdefault(name, []).append(self.padded(name, value))
        parameters = {}
        layouts = {parameter.name: self.derivation.layout_of(parameter) for parameter in self.derivation.parameters}
        for name, tensor in self.network.tensors.items():
            reading = [(index, position) for index, position in self.readers.get(name, ()) if index in self.local_operators]
            if (name in self.producers and name not in self.known) or not reading:
                continue
            self.worker.beat(f"making {name}")
            if tensor.role is TensorRole.PARAMETER:
                self.layouts[name] = layouts[name].resolved()
                local = local_part(self._whole(name, dtype), self.layouts[name], self.mesh).clone().to(self.worker.device)
                parameters[name] = local.requires_grad_(tensor.has_gradient)
                continue
            for microbatch in range(self.plan.num_microbatches):
                value = self.known[name][microbatch] if name in self.known else self._whole(name, self.dtype, microbatch)
                for index, position in reading:
                    layout = self.derivation.needed[self.network.operators[index].name, position]
                    if (name, layout, microbatch) not in self.inputs:
                        self.inputs[name, layout, microbatch] = local_part(value, layout, self.mesh).clone().to(self.worker.device)
        return parameters

    # ------------------------------------------------------------------------------------------------------------- steps

    def forward(self, values: Values, microbatch: int = 0, *, stage: NetworkStage | None = None, keep: Values | None = None) -> Values:
        """Return the outputs of a stage (default: this rank's first) that other stages read or no operator reads. `values`: inputs from the
        previous stage; `keep`: receives every operator's output."""
        stage = stage or self.stages[0]
        interpreter = stage.interpreter
        entered = {tensor: interpreter.enter(tensor, value) for tensor, value in values.items()}
        interpreter.kept = keep
        if stage.module is not None:
            return stage.module(entered, microbatch)  # type: ignore[no-any-return]
        interpreter.run(*stage.run, entered, microbatch)
        return entered

    def loss(self, outputs: Values) -> torch.Tensor:
        """Return the loss of one micro-batch that this rank differentiates; replicated values count on each rank."""
        values = {name: self.leaving[name](outputs[name]) if name in self.leaving else outputs[name] for name in self.outputs}
        return torch.stack([self._weighted(name, values[name]).sum() / self._count(name) for name in self.outputs]).sum()

    def _weighted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return wide(value) * self.loss_weights[name] if name in self.loss_weights else wide(value)

    def _count(self, output: str) -> int:
        """Return the number of entries of an output in a step, over which the loss is a mean."""
        return self.given.tensors[output].num_elements * self.plan.num_microbatches

    @torch.no_grad()
    def share(self, outputs: Values) -> torch.Tensor:
        """Return this rank's share of the loss of one micro-batch; the sum over ranks is the loss."""
        total = torch.zeros((), device=self.worker.device)
        for name in self.outputs:
            left = self._left(name)
            ways = self.mesh.num_ranks / self.mesh.size(left.cut_axes | left.partial)
            total = total + self._weighted(name, outputs[name].detach()).sum() / (self._count(name) * ways)
        return total

    def forward_backward(self) -> torch.Tensor:
        """Run forward and backward of a step. Return the local share of the loss; the parameters' gradients are complete."""
        self.parameters.begin_step()
        if self.pipeline is not None:
            share = self.pipeline.run()
        else:
            shares = []
            for number in range(self.plan.num_microbatches):
                outputs = self.forward({}, number)
                self.worker.beat("backward")
                self.parameters.begin_backward(number, self.stages[0].index)
                loss = self.loss(outputs)
                shares.append(self.share(outputs))
                del outputs
                loss.backward()
                del loss
            share = torch.stack(shares).sum()
        self.worker.beat("gradients")
        self.parameters.finish_gradients()
        return share

    @torch.no_grad()
    def update(self) -> None:
        """Run the optimizer's step, which frees the gradients."""
        self.parameters.update()

    def step(self) -> torch.Tensor:
        """Run one training step and return the local share of its loss; the sum over ranks is the loss."""
        share = self.forward_backward()
        self.update()
        return share

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients before the update, in the layouts of their parameters. Collective: call it on every rank."""
        return dict(self.parameters.gradients())

    @property
    def sent_elements(self) -> int:
        """Elements sent to neighbouring stages in a step."""
        return 0 if self.pipeline is None else self.pipeline.sent_elements

    def release(self) -> None:
        """Free all memory that persists between steps, except parameters and data."""
        self.parameters.release()
