"""A user's module executed under a plan, in the user's own process group and training loop."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.modules.module import UserModule
from perfmodel.execute.modules.refuse import check_module_plan
from perfmodel.execute.modules.views import viewed
from perfmodel.execute.per_operator.context import OperatorContext
from perfmodel.execute.per_operator.interpret import Interpreter, NetworkEnds
from perfmodel.execute.per_operator.mesh import NetworkMesh, Purpose
from perfmodel.execute.per_operator.parameters import ShardedParameters, summed
from perfmodel.execute.per_operator.redistribute import Redistribution, local_part
from perfmodel.execute.zero import Dtypes
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.algebra.sharding import Layout
from perfmodel.parallel.choices import ZeroStage
from perfmodel.parallel.per_operator.parameters import parameter_units
from perfmodel.parallel.per_operator.stages import sections_of
from perfmodel.parallel.per_operator.traffic import derive_assigned
from perfmodel.parallel.plan import Plan
from perfmodel.workload.imported.input_spec import parse_inputs
from perfmodel.workload.job import Optimizer
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.work import Pass


class ParallelModule(nn.Module):
    """A module whose operators run in parallel as planned. Every rank calls it with the global micro-batch and gets unsharded outputs.

    `parameters()` are this rank's shards; their gradients are complete after `backward`. ZeRO 1 to 3 use the shards of `fully_shard`
    (with 1 and 2, weights stay gathered until the end of their backward).
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__()
        model = plan.job.model
        if not isinstance(model, NetworkModel) or not model.inputs:
            raise bad_field("plan", model.name, "is for no imported module", "use a plan of `perfmodel shard module:factory`")
        if not dist.is_initialized():
            raise InputError("process group: is not initialised; call torch.distributed.init_process_group first, as torchrun expects")
        if dist.get_world_size() != plan.num_chips:
            rule = f"the process group has {dist.get_world_size()} ranks"
            raise bad_field("plan", f"{plan.num_chips} chips", rule, f"start {plan.num_chips} processes, or use another plan")
        plan = replace(plan, zero=ZeroStage(2)) if plan.zero == 1 else plan
        user = UserModule.of(module, parse_inputs(model.inputs), name=model.name, drops=True)
        check_module_plan(user, plan)
        self._user, self._signature = [user], inspect.signature(module.forward)  # in a list: nn.Module must not register it
        device = next((str(parameter.device.type) for parameter in module.parameters()), "cpu")
        worker = Worker(dist.get_rank(), dist.get_world_size(), device)
        network = user.network
        self._mesh = NetworkMesh(worker, plan.cuts.axes)
        self._derivation = derive_assigned(network, plan.cuts)
        self._values: dict[str, torch.Tensor] = {}
        self._read_now: dict[str, torch.Tensor] = {}
        readers = network.readers()
        self._layouts = {parameter.name: self._derivation.layout_of(parameter).resolved() for parameter in self._derivation.parameters}
        self._axes = {parameter.name: parameter.gradient_axes for parameter in self._derivation.parameters}
        self._operator = {name: network.operators[readers[name][0][0]].name for name in self._layouts if name in readers}
        tensors = {
            name: local_part(tensor, self._layouts[name], self._mesh).clone().requires_grad_(user.is_trained(name))
            for name, tensor in user.parameters.items()
        }
        dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
        interpreter = self._interpreter(user, plan, worker, dtype)
        self._leaving = {
            name: interpreter.leave(name, Layout(cuts=((),) * len(network.tensors[name].shape)))
            for name in interpreter.outputs
        }  # fmt: skip
        self._held: ShardedParameters | None = None
        if plan.zero:
            units = parameter_units(network, plan)
            dtypes = Dtypes(weight=dtype, reduce=dtype, master=dtype)
            rest: dict[str, Any] = {"readers": self._operator, "optimizer": Optimizer.SGD, "learning_rate": 0.0}
            self._held = ShardedParameters(tensors, units, plan, self._mesh, dtypes=dtypes, **rest)
            interpreter.parameter = self._read
            self.program: nn.Module | None = self._held.module(interpreter, 0, sections_of(network, interpreter.run_of))
            tensors = dict(self._held.tensors) | self._held.frozen
        else:
            self.program = None
        self._places = {name: name.replace(".", "__") for name in tensors}
        for name, tensor in tensors.items():
            self.register_parameter(self._places[name], nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad))
        self._run = interpreter
        for parameter in module.parameters():  # as with fully_shard, the module's own weights are released
            parameter.data = parameter.data.new_empty(0)

    def _interpreter(self, user: UserModule, plan: Plan, worker: Worker, dtype: torch.dtype) -> Interpreter:
        network = user.network
        contexts = {
            index: OperatorContext(self._mesh, operator, plan.cuts.shardings[operator.name], dict(operator.dims))
            for index, operator in enumerate(network.operators)
        }
        known = {operator.output.tensor for operator in user.known_operators()}
        names = [user.imported.tensor(out.vertex, out.output) for out in user.exported.outputs if out and out.vertex is not None]
        outputs = frozenset(name for name in names if name in network.producers() and name not in known)
        return Interpreter(
            worker,
            self._derivation,
            plan,
            self._mesh,
            (0, len(network.operators)),
            functions=user.functions(network),
            contexts=contexts,
            parameter=self._read,
            given=lambda name, layout, _: local_part(self._values[name], layout, self._mesh),
            ends=NetworkEnds(
                outputs=outputs, known=frozenset(known), index_dtype=torch.int32 if dtype.itemsize == 4 else torch.int64
            ),
        )  # fmt: skip

    def _read(self, name: str) -> torch.Tensor:
        """Return a parameter for the operators. Its gradient is all-reduced once per backward over the ranks with partial gradients."""
        if name not in self._places:
            assert self._held is not None
            return self._held.read(name)
        if name not in self._read_now:
            purpose = Purpose(Pass.BACKWARD, name, self._operator[name], "gradient")
            parameter = self.get_parameter(self._places[name])
            self._read_now[name] = summed(parameter, self._mesh, self._axes[name], purpose)
        return self._read_now[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (user,) = self._user
        given = self._signature.bind(*args, **kwargs).arguments
        self._values = {name: value.to(self._mesh.device) for name, value in user.constants.items()}
        positional = iter(given.values())
        by_spec = [given[spec.name] if spec.name else next(positional) for spec in user.specs]
        for name, position in user.inputs.items():
            value, spec = by_spec[position], user.specs[position]
            if tuple(value.shape) != spec.shape:
                raise bad_field(
                    "inputs", f"{name} of shape {tuple(value.shape)}", f"the plan is for {spec.shape}", "give whole batches of it"
                )
            self._values[name] = value.reshape(user.network.tensors[name].shape)
        self._values |= user.known(self._values, self._mesh)
        self._read_now = {}
        values: dict[str, torch.Tensor] = {}
        if self.program is None:
            self._run.run(*self._run.run_of, values, 0)
        else:
            values = self.program(values, 0)
        self._read_now = {}
        nodes = next(node for node in user.exported.program.graph.nodes if node.op == "output").args[0]
        results: list[Any] = []
        for node, value in zip(nodes, user.exported.outputs, strict=True):
            if value is None:
                results.append(node)
            elif value.vertex is None:
                results.append(user.stored(value))
            else:
                name = user.imported.tensor(value.vertex, value.output)
                result = self._leaving[name](values[name]) if name in self._leaving else self._values[name]
                results.append(viewed(result, value, user.grouping(value.vertex, value.output)))
        spec = user.exported.program.call_spec.out_spec
        assert spec is not None
        return torch.utils._pytree.tree_unflatten(results, spec)

    @torch.no_grad()
    def whole_parameters(self, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """Return the module's parameters at full size, or their gradients, by name. Collective: call it on every rank.

        A parameter whose parts are read by operators is returned part by part.
        """
        (user,) = self._user
        local: dict[str, torch.Tensor] = {}
        for name, attribute in self._places.items():
            parameter = self.get_parameter(attribute)
            if not gradients:
                local[name] = parameter
            elif parameter.requires_grad:
                local[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if self._held is not None:
            local |= self._held.full_tensors(gradients=gradients)
        tensors = {}
        for name, tensor in local.items():
            shape, layout = user.network.tensors[name].shape, self._layouts[name]
            purpose = Purpose(Pass.FORWARD, name, self._operator[name], "check")
            full = Redistribution(layout, Layout(cuts=((),) * len(shape)), shape, self._mesh, purpose)(tensor.detach())
            tensors[name] = full.reshape(user.imported.pieces.parameters[name])
        return tensors
