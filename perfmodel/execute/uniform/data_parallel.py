"""ZeRO stages 0 to 3: weights, gradients and optimizer state on the data axes.

Stages 2 and 3 use torch's `fully_shard`. Stages 0 and 1 use flat buffers, one per unit (a layer, or the
embedding, final norm and head together). Gradients accumulate there and are reduced once a step, in one collective per unit.
It starts as soon as the last micro-batch has filled the buffer and overlaps with the rest of backward. Stage 0 all-reduces.
Stage 1 reduce-scatters, updates the shard, and all-gathers the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as PartialPlacement

from perfmodel.execute.compression import GradientHook
from perfmodel.execute.local import local_tensor, placed_like
from perfmodel.execute.uniform.experts import GroupedExperts, gathered_matrix, is_expert_parameter
from perfmodel.execute.uniform.mesh import RunMesh
from perfmodel.execute.uniform.model import Transformer
from perfmodel.execute.uniform.tensor_parallel import has_partial_gradient
from perfmodel.execute.uniform.weights import canonical_name, fill, initial_piece
from perfmodel.execute.zero import Dtypes, FlatUnit, ShardOptimizer, build_optimizer, update
from perfmodel.parallel.compression import NO_COMPRESSION, Compression
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer

_DATA_AXES = "dp_replicate+dp_shard+cp"


def units_of(model: Transformer, *, experts_apart: bool) -> list[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Return (name, module, parameters) of the embedding, each layer, experts that are sharded separately, and the head. A tied matrix
    belongs to the embedding."""
    units: list[tuple[str, nn.Module, dict[str, nn.Parameter]]] = []
    for index, layer in model.layers.items():
        parameters = {canonical_name(f"layers.{index}.{name}"): p for name, p in layer.named_parameters()}
        experts = {name: p for name, p in parameters.items() if experts_apart and is_expert_parameter(name)}
        units.append((f"layer {index}", layer, {name: p for name, p in parameters.items() if name not in experts}))
        if experts:
            units.append((f"experts of layer {index}", layer, experts))
    taken = {id(p) for _, _, parameters in units for p in parameters.values()}
    for end, modules in (("embedding", embedding_modules(model)), ("head", head_modules(model))):
        parameters, experts = {}, {}
        for name, p in model.named_parameters():
            if id(p) not in taken and any(p is q for module in modules for q in module.parameters()):
                clean = canonical_name(name)
                (experts if experts_apart and is_expert_parameter(clean) else parameters)[clean] = p
        taken.update(id(p) for p in (*parameters.values(), *experts.values()))
        units += [(name, model, group) for name, group in ((end, parameters), (f"experts of {end}", experts)) if group]
    return units


def embedding_modules(model: Transformer) -> list[nn.Module]:
    names = ("embedding", "position_embedding", "embedding_norm")
    return [getattr(model, name) for name in names if hasattr(model, name)]


def head_modules(model: Transformer) -> list[nn.Module]:
    return [model.final_norm, model.lm_head, *model.mtp_modules] if model.has_head else []


def joins_ends(stages: Sequence[Transformer]) -> bool:
    """Return whether the first and the last of several pipeline stages are on this rank (in a V)."""
    return len(stages) > 1 and stages[0].has_embedding and stages[-1].has_head


def tied_name(model: Transformer) -> str:
    """Return the parameter of this stage that another pipeline stage holds too; empty if there is none."""
    if not model.shares_table or model.has_embedding == model.has_head:
        return ""
    return "embedding.weight" if hasattr(model, "embedding") else "lm_head.weight"


# ---------------------------------------------------------------------------------------------------- stages 0 and 1


@dataclass(frozen=True, slots=True)
class _Unit:
    """A flat unit.

    partial        part of the buffers with gradients partial over tp
    num_gradients  gradients of a micro-batch: a matrix that two stages of this rank read has one of each
    is_tied        whether a stage of another rank holds it too
    """

    flat: FlatUnit
    parameters: dict[str, nn.Parameter]
    partial: slice
    num_gradients: int
    is_tied: bool


class FlatData:
    """ZeRO stages 0 and 1 with flat buffers. compression: of gradients, at stage 0"""

    def __init__(
        self,
        stages: Sequence[Transformer],
        mesh: RunMesh,
        *,
        shards: bool,
        dtypes: Dtypes,
        optimizer: Optimizer,
        compression: Compression = NO_COMPRESSION,
    ) -> None:
        self.compression = compression
        self.mesh, self.shards, self.dtypes, self.num_microbatches = mesh, shards, dtypes, 1
        self.tp_group = mesh.groups["tp"]
        self.stages, self._optimizer_kind = stages, optimizer
        self.units: list[_Unit] = []

    def materialise(self, device: str) -> None:
        for model in self.stages:
            tied = "" if joins_ends(self.stages) else tied_name(model)
            for _, module, parameters in units_of(model, experts_apart=self.mesh.has_experts_apart):
                # A tied matrix is a separate unit, so that both stages shard it in the same way, unless they are on one rank.
                held = [p for unit in self.units for p in unit.parameters.values()]
                plain = {name: p for name, p in parameters.items() if name != tied and not any(p is other for other in held)}
                if plain:
                    self.units.append(self._build(module, plain, device, is_tied=False))
                if tied in parameters:
                    self.units.append(self._build(module, {tied: parameters[tied]}, device, is_tied=True))
        self.optimizer = build_optimizer(self._optimizer_kind, [unit.flat.master for unit in self.units])

    def _build(self, module: nn.Module, parameters: dict[str, nn.Parameter], device: str, *, is_tied: bool) -> _Unit:
        ordered = dict(sorted(parameters.items(), key=lambda item: has_partial_gradient(*item)))  # partial gradients last, contiguous
        sizes, groups = {name: local_tensor(parameter).numel() for name, parameter in ordered.items()}, self.mesh.groups
        # experts process the tokens of other ranks too, so their groups are smaller
        of_experts = all(is_expert_parameter(name) for name in parameters)
        shards, replicas, every = ("edp_shard", "edp_replicate", "edp") if of_experts else ("dp_shard+cp", "dp_replicate", _DATA_AXES)
        shard_group, replica_group = (groups[shards], groups[replicas]) if self.shards else (None, groups[every])
        flat = FlatUnit(
            sizes,
            shard_group=shard_group,
            replica_group=replica_group,
            dtypes=self.dtypes,
            device=device,
            hook=self._hook(ordered, replica_group),
            # a hook returns the mean over its group, and each rank's loss is its share of the mean over all data ranks
            scale=1.0 if self.compression == NO_COMPRESSION else self.mesh.size(every) / self.mesh.size(_DATA_AXES),
        )
        held, end, num_gradients = {}, sum(sizes.values()), 0
        holders: Sequence[nn.Module] = self.stages if joins_ends(self.stages) and module in self.stages else [module]
        starts = [flat.places[name].start for name, parameter in ordered.items() if has_partial_gradient(name, parameter)]
        for name, old in ordered.items():
            # the parameter becomes a view of the flat buffer, in every module that holds it
            new = held[name] = nn.Parameter(placed_like(flat.weights[flat.places[name]].view(local_tensor(old).shape), old))
            for holder in holders:
                num_gradients += any(parameter is old for parameter in holder.parameters())
                for child in holder.modules():
                    for attribute, parameter in list(child.named_parameters(recurse=False)):
                        if parameter is old:
                            child.register_parameter(attribute, new)
            new.register_post_accumulate_grad_hook(partial(flat.accumulate, name, self._local(name, new)))
        return _Unit(flat, held, slice(min(starts, default=end), end), num_gradients, is_tied)

    def _hook(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None) -> GradientHook | None:
        """Return the hook of a unit; None if its gradients are not compressed."""
        if self.compression == NO_COMPRESSION or group is None:
            return None
        # a gradient that is partial over tp is sent as a vector: it is summed afterwards
        shapes = [
            (local_tensor(parameter).numel(),) if has_partial_gradient(name, parameter) else tuple(local_tensor(parameter).shape)
            for name, parameter in parameters.items()
        ]
        return GradientHook(self.compression, group, shapes)

    @staticmethod
    def _local(name: str, parameter: nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from a gradient to its local part, which is partial over tp where it is reduced over it."""
        wants_partial = has_partial_gradient(name, parameter)

        def local(gradient: torch.Tensor) -> torch.Tensor:
            if not isinstance(gradient, DTensor):
                return gradient
            part = gradient.to_local()
            if gradient.placements[0].is_partial():
                assert wants_partial, f"{name}: its gradient is partial over tp"
                return part
            return part / gradient.device_mesh.size() if wants_partial else part

        return local

    def accumulate_assigned(self) -> None:
        """Add the gradients that were assigned to parameters without hooks, as by torch's separate backward pass of weights."""
        for unit in self.units:
            for name, parameter in unit.parameters.items():
                if parameter.grad is not None:
                    unit.flat.accumulate(name, self._local(name, parameter), parameter)

    def begin_step(self) -> None:
        for unit in self.units:
            unit.flat.begin_step(unit.num_gradients * self.num_microbatches)

    def begin_microbatch(self, *, is_last: bool) -> None: ...

    def finish_gradients(self) -> None:
        for unit in self.units:
            unit.flat.complete()
            unit.flat.finish()
        self._reduce_partial()
        for unit in self.units:
            if unit.is_tied:
                dist.all_reduce(unit.flat.gradients[unit.flat.shard], group=self.mesh.groups["tied"])

    def _reduce_partial(self) -> None:
        """All-reduce the gradients of norm weights under sequence parallelism over tp, in one collective."""
        if self.tp_group is None:
            return
        pieces = []
        for unit in self.units:
            first, last = max(unit.partial.start, unit.flat.shard.start), min(unit.partial.stop, unit.flat.shard.stop)
            if first < last:
                pieces.append(unit.flat.gradients[first:last])
        if not pieces:
            return
        together = torch.cat(pieces)
        dist.all_reduce(together, group=self.tp_group)
        for piece, reduced in zip(pieces, together.split([piece.numel() for piece in pieces]), strict=True):
            piece.copy_(reduced)

    def optimizer_step(self) -> None:
        update(self.optimizer, [unit.flat for unit in self.units])

    def fill(self, config: TransformerConfig, beat: Callable[[str], None]) -> None:
        """Fill with random weights."""

        def pieces(unit: _Unit) -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in unit.parameters.items():
                beat(f"filling {name}")
                yield name, initial_piece(config, name, parameter, self.stages[0].sharding, unit.flat.weights.device)

        for unit in self.units:
            unit.flat.fill(pieces(unit))

    def projection_errors(self) -> dict[str, float]:
        """Return the error of the low-rank factors of each unit (`GradientHook.projection_error`). Collective."""
        errors = {}
        for unit in self.units:
            # the gradients of a tied unit are a sum over two stages by now
            if unit.flat.hook is not None and not unit.is_tied and (lost := unit.flat.hook.lost()) is not None:
                errors[f"compression of {next(iter(unit.parameters))}"] = unit.flat.hook.projection_error(lost)
        return errors

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for unit in self.units:
            full = unit.flat.full_gradients()
            if unit.flat.hook is not None and (lost := unit.flat.hook.lost()) is not None:
                if unit.is_tied:
                    dist.all_reduce(lost, group=self.mesh.groups["tied"])
                full = full + lost  # what is sent and what is kept for the next step
            for name, parameter in unit.parameters.items():
                tensor = placed_like(full[unit.flat.places[name]].view(local_tensor(parameter).shape), parameter)
                tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                yield name, _all_experts(name, tensor, self.stages[0])


def _all_experts(name: str, tensor: torch.Tensor, model: Transformer) -> torch.Tensor:
    """Return the tensor of all experts, given this rank's experts."""
    experts = model.config.parts.experts
    return gathered_matrix(tensor, name, experts, model.sharding.experts) if experts is not None and is_expert_parameter(name) else tensor


# ---------------------------------------------------------------------------------------------------- stages 2 and 3


def _placement_function(
    modules: Iterable[nn.Module], mesh: FSDPMeshInfo | None
) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """Return the `shard_placement_fn` of a unit with these modules; None if no experts have a mesh of their own."""
    experts = {p for module in modules if isinstance(module, GroupedExperts) for p in module.parameters()}
    if not experts or mesh is None:
        return None
    return lambda parameter: ShardPlacementResult(Shard(0), mesh) if parameter in experts else None


def _divide_by_all_tokens(layer: nn.Module, experts: FSDPMeshInfo, data_ranks: int) -> None:
    """Divide expert gradients by the number of all data ranks, as for dense parameters. A gradient is a mean over all tokens, and an
    expert has already received those of all its ranks."""
    assert isinstance(layer, FSDPModule)
    for group in layer._get_fsdp_state()._fsdp_param_groups:
        if group.mesh_info is experts:
            group.gradient_divide_factor = float(data_ranks)
            # gloo does not support scaled reductions, and a single rank does not reduce
            group.force_sum_reduction_for_comms = experts.shard_mesh_size > 1


class ShardedData:
    """ZeRO stages 2 and 3: torch's fully_shard on every layer and on the remaining modules.

    Stage 3 reshards weights after forward and all-gathers them again for backward; stage 2 keeps them gathered.
    Gradients are reduce-scattered after every micro-batch, but all-reduced over dp_replicate once a step. Under pipeline
    parallelism weights stay gathered for all micro-batches and gradients are reduced once a step, as torchtitan does by default.
    """

    def __init__(self, stages: Sequence[Transformer], mesh: RunMesh, *, keeps_weights: bool, dtypes: Dtypes, optimizer: Optimizer) -> None:
        self.stages, self.mesh = stages, mesh
        names = ("dp_replicate", "dp_shard_cp") if mesh.layout.dp_replicate > 1 else ("dp_shard_cp",)
        data_mesh = mesh.parameter_mesh[names]
        expert_mesh: FSDPMeshInfo | None = None  # of the data axes that shard experts, if they differ from those of other parameters
        if mesh.expert_mesh is not None and mesh.has_experts_apart:
            if mesh.size("edp_replicate") == 1:
                expert_mesh = FSDPMeshInfo(mesh.expert_mesh["edp_shard"], shard_mesh_dim=0)
            else:
                expert_mesh = HSDPMeshInfo(mesh.expert_mesh["edp_replicate", "edp_shard"], shard_mesh_dim=1, replicate_mesh_dim=0)
        policy = MixedPrecisionPolicy()
        if dtypes.weight != dtypes.master:
            policy = MixedPrecisionPolicy(param_dtype=dtypes.weight, reduce_dtype=dtypes.reduce)
        self.names: list[list[str]] = []
        for model in stages:
            self.names.append([canonical_name(name) for name, _ in model.named_parameters()])
            for layer in model.layers.values():
                where = _placement_function(layer.modules(), expert_mesh)
                fully_shard(layer, mesh=data_mesh, reshard_after_forward=not keeps_weights, mp_policy=policy, shard_placement_fn=where)
                if expert_mesh is not None:
                    _divide_by_all_tokens(layer, expert_mesh, mesh.layout.data_parallel * mesh.layout.cp)
            ends = [embedding_modules(model), head_modules(model)]
            if model.shares_table and all(ends):
                ends = []  # one unit, the model's own: a tied matrix can belong to one unit only
            for modules in ends:
                if modules:
                    # the head's weights are needed by backward immediately
                    frees = not keeps_weights and modules is not ends[-1]
                    fully_shard(modules, mesh=data_mesh, reshard_after_forward=frees, mp_policy=policy)
            where = _placement_function((child for module in model.mtp_modules for child in module.modules()), expert_mesh)
            fully_shard(model, mesh=data_mesh, reshard_after_forward=False, mp_policy=policy, shard_placement_fn=where)
            if where is not None and expert_mesh is not None:
                _divide_by_all_tokens(model, expert_mesh, mesh.layout.data_parallel * mesh.layout.cp)
        self._updates = ShardOptimizer(optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._updates.optimizer

    def materialise(self, device: str) -> None:
        for model in self.stages:
            model.to_empty(device=device)
            model.tie_weights()

    def accumulate_assigned(self) -> None: ...

    def fill(self, config: TransformerConfig, beat: Callable[[str], None]) -> None:
        for name, parameter in self.parameters():
            beat(f"filling {name}")
            fill(config, name, parameter, self.stages[0].sharding)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model, names in zip(self.stages, self.names, strict=True):
            yield from zip(names, (parameter for _, parameter in model.named_parameters()), strict=True)

    def begin_step(self) -> None: ...

    def begin_microbatch(self, *, is_last: bool) -> None:
        for model in self.stages:
            assert isinstance(model, FSDPModule)
            model.set_requires_all_reduce(is_last)

    def finish_gradients(self) -> None:
        for model in self.stages:
            tied = tied_name(model)
            if tied:
                weight = model.get_parameter(tied)
                assert isinstance(weight.grad, DTensor)
                dist.all_reduce(weight.grad.to_local(), group=self.mesh.groups["tied"])

    def optimizer_step(self) -> None:
        self._updates.step(parameter for _, parameter in self.parameters())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            if any(isinstance(placement, PartialPlacement) for placement in gradient.placements):
                gradient = gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
            yield name, _all_experts(name, gradient.full_tensor(), self.stages[0])
