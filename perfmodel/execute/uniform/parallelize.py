"""Construction of the training program of a plan: the sharded model, and one step of it.

The order is torch's: build on the meta device, shard over tp (DTensor), wrap for activation checkpointing, lay out over the
data axes (`fully_shard`, or flat buffers for ZeRO stages 0 and 1), and fill in the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
)

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.layers.vocabulary import cross_entropy
from perfmodel.execute.uniform.collective_ops import reduced_over
from perfmodel.execute.uniform.data_parallel import FlatData, ShardedData, joins_ends
from perfmodel.execute.uniform.mesh import RunMesh, run_mesh
from perfmodel.execute.uniform.model import Transformer
from perfmodel.execute.uniform.sharding import ExpertSharding, Sharding
from perfmodel.execute.uniform.tensor_parallel import apply_tensor_parallel
from perfmodel.execute.uniform.weights import make_tokens, shifted_tokens
from perfmodel.execute.zero import dtypes_of
from perfmodel.parallel.choices import AttentionKernel, Dispatcher, PipelineSchedule, Recompute, ZeroStage
from perfmodel.parallel.compression import NO_COMPRESSION
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.schedule_table import ScheduleTable
from perfmodel.workload.routing import RoutingCounts

#: Phases of a step, in order. In a pipelined step, forward and backward are not separable: both are `pipeline`.
PHASES = ("forward", "backward", "pipeline", "gradient_sync", "optimizer")

_SCHEDULES = {
    PipelineSchedule.GPIPE: ScheduleGPipe,
    PipelineSchedule.ONE_F_ONE_B: Schedule1F1B,
    PipelineSchedule.INTERLEAVED: ScheduleInterleaved1F1B,
    PipelineSchedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    PipelineSchedule.ZBV: ScheduleZBVZeroBubble,
    PipelineSchedule.DUALPIPEV: ScheduleDualPipeV,
}


def _runtime_of(table: ScheduleTable, stages: list[Any], options: dict[str, Any]) -> Any:
    """Return torch's runtime with the orders of a file."""
    runtime = _PipelineScheduleRuntime(stages, **options)
    for rank, line in enumerate(table.lines):
        runtime.pipeline_order[rank] = list(map(_Action.from_str, line.split(",")))
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


class _Stage(PipelineStage):
    """A stage that calls `after_weights` after each separate backward pass of its weights."""

    after_weights: Callable[[], None]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.after_weights()


class Clock:
    """Timer of phases: CUDA events on a GPU, wall clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            import time

            self._marks.append((phase, time.perf_counter()))

    def durations(self) -> dict[str, float]:
        """Return the seconds by phase, and clear the marks."""
        if self.on_gpu:
            torch.cuda.synchronize()
        parts: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            duration = before.elapsed_time(after) / 1e3 if self.on_gpu else after - before
            parts[phase] = parts.get(phase, 0.0) + duration
        self._marks.clear()
        return parts


class TrainingProgram:
    """The program of one rank: `step()` trains on the rank's share of the job's tokens.

    routing   number of tokens that each rank sends to each expert; None: by the router
    """

    def __init__(self, worker: Worker, plan: Plan, routing: RoutingCounts | None = None) -> None:
        self.worker, self.plan = worker, plan
        layout = plan.layout
        self.mesh: RunMesh = run_mesh(worker, plan)
        coordinates = self.mesh.coordinates
        experts = ExpertSharding()
        if plan.has_experts:
            experts = ExpertSharding(
                ep=self.mesh.size("ep"),
                ep_rank=self.mesh.index("ep"),
                ep_group=self.mesh.groups["ep"],
                etp=self.mesh.size("etp"),
                etp_rank=self.mesh.index("etp"),
                etp_group=self.mesh.groups["etp"],
                gathers=plan.dispatcher is Dispatcher.ALL_GATHER,
                once=plan.dispatcher is Dispatcher.FLEX,
            )
        self.sharding = Sharding(
            tp=layout.tp,
            tp_rank=coordinates["tp"],
            tp_group=self.mesh.groups["tp"],
            cp=layout.cp,
            cp_rank=coordinates["cp"],
            cp_group=self.mesh.groups["cp"],
            sequence_parallel=plan.sequence_parallel,
            exchanges_heads=plan.rules.exchanges_heads,
            experts=experts,
            routing=routing,
        )
        self.dtypes = dtypes_of(plan.job.precision)
        num_stages = layout.pp * plan.virtual_stages
        self.stage_indices = plan.stages_of_rank(coordinates["pp"])
        self.stages = [self._build_stage(index, num_stages) for index in self.stage_indices]
        self.has_head = self.stages[-1].has_head
        if plan.job.transformer.tie_word_embeddings and joins_ends(self.stages):
            self.stages[-1].lm_head.weight = self.stages[0].embedding.weight
        self.data = self._lay_out_data()
        self._materialise()
        self._lay_out_step()
        self.clock = Clock(worker.device)
        self.losses: list[torch.Tensor] = []

    # ------------------------------------------------------------------------------------------------ construction

    def _build_stage(self, index: int, num_stages: int) -> Transformer:
        plan = self.plan
        model = Transformer(
            plan.job.transformer,
            sharding=self.sharding,
            first_layer=sum(plan.stage_layers[:index]),
            num_layers=plan.stage_layers[index],
            has_embedding=index == 0,
            has_head=index == num_stages - 1,
            fused_attention=plan.attention is AttentionKernel.FLASH,
            recompute_core=plan.recompute is Recompute.SELECTIVE,
            device="meta",
        )
        model.beat, model.loss = self.worker.beat, self.loss
        if plan.layout.tp > 1:
            apply_tensor_parallel(model, self.mesh.parameter_mesh["tp"], sequence_parallel=plan.sequence_parallel)
        if plan.recompute is Recompute.FULL:
            for name, layer in model.layers.items():
                model.layers[name] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)
        return model

    def _lay_out_data(self) -> FlatData | ShardedData:
        plan, job = self.plan, self.plan.job
        if plan.zero >= ZeroStage.GRADIENTS:
            for model in self.stages:
                model.to(self.dtypes.master)
            return ShardedData(
                self.stages,
                self.mesh,
                keeps_weights=plan.zero is ZeroStage.GRADIENTS or plan.layout.pp > 1,
                dtypes=self.dtypes,
                optimizer=job.optimizer,
            )
        shards = plan.zero is ZeroStage.OPTIMIZER
        return FlatData(self.stages, self.mesh, shards=shards, dtypes=self.dtypes, optimizer=job.optimizer, compression=plan.compression)

    def _materialise(self) -> None:
        """Allocate and fill the parameters, which are on the meta device until here. An audit overrides this with fake tensors."""
        self.data.materialise(self.worker.device)
        self.data.fill(self.plan.job.transformer, self.worker.beat)

    def _lay_out_step(self) -> None:
        """Prepare everything that depends on the number of micro-batches per step."""
        plan, layout = self.plan, self.plan.layout
        self.tokens, self.targets, self.mtp_tokens = self._local_tokens()
        if isinstance(self.data, FlatData):
            self.data.num_microbatches = plan.num_microbatches
        # Each rank's loss is its share of the mean over tokens; fully_shard and hooks average over the data ranks, flat buffers sum.
        averages = isinstance(self.data, ShardedData) or plan.compression != NO_COMPRESSION
        self.loss_scale = (layout.data_parallel * layout.cp if averages else 1) / plan.job.tokens_per_step
        self.sharding.loss_scale = self.loss_scale
        self.schedule = self._build_schedule(layout.pp * plan.virtual_stages) if layout.pp > 1 else None

    def _local_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return inputs and targets [microbatches * micro_batch, s / cp] of this rank in micro-batch order, and the inputs of MTP modules
        (`Transformer.forward`)."""
        plan, coordinates = self.plan, self.mesh.coordinates
        tokens = make_tokens(plan.job)
        data_rank = coordinates["dp_replicate"] * plan.layout.dp_shard + coordinates["dp_shard"]
        mine = tokens.chunk(plan.layout.data_parallel)[data_rank]
        length = plan.job.seq_len // plan.layout.cp
        chunk = slice(coordinates["cp"] * length, (coordinates["cp"] + 1) * length)
        device, number = self.worker.device, plan.job.transformer.num_mtp_layers
        mtp_tokens = shifted_tokens(mine, chunk, number).to(device) if number and self.has_head else None
        return mine[:, chunk].contiguous().to(device), mine[:, 1:][:, chunk].contiguous().to(device), mtp_tokens

    def _build_schedule(self, num_stages: int) -> Any:
        plan, job = self.plan, self.plan.job
        length = job.seq_len // plan.layout.cp
        local_length = length // (plan.layout.tp if plan.sequence_parallel else 1)
        # Static shapes; tensors with a gradient must set requires_grad, or the schedules send no gradient back.
        options: dict[str, Any] = {"dtype": self.dtypes.weight, "device": "meta", "requires_grad": True}
        activation = torch.empty(plan.micro_batch, local_length, job.transformer.hidden_size, **options)
        # columns of the logits on a rank: global rows of the (padded) output matrix over tp
        columns = int(self.stages[-1].lm_head.weight.shape[0]) // self.sharding.tp if self.has_head else 0
        logits = torch.empty(plan.micro_batch, length, columns, **options)
        ids = torch.empty(plan.micro_batch, length, dtype=torch.int64, device="meta")
        stages = [
            _Stage(
                model,
                index,
                num_stages,
                torch.device(self.worker.device),
                input_args=(ids if model.has_embedding else activation,),
                output_args=(logits if model.has_head else activation,),
                group=self.mesh.groups["pp"],
            )
            for index, model in zip(self.stage_indices, self.stages, strict=True)
        ]
        for stage in stages:
            stage.after_weights = self.data.accumulate_assigned
        options = {"n_microbatches": plan.num_microbatches, "loss_fn": self.loss, "scale_grads": False}
        if isinstance(plan.schedule, ScheduleTable):
            return _runtime_of(plan.schedule, stages, options)
        schedule: Any = _SCHEDULES[plan.schedule]
        return schedule(stages if issubclass(schedule, PipelineScheduleMulti) else stages[0], **options)

    # -------------------------------------------------------------------------------------------------------- step

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the mean cross-entropy over the step's tokens."""
        first, vocab_size = self.sharding.tp_rank * logits.shape[-1], self.plan.job.transformer.vocab_size
        losses = cross_entropy(logits, targets, first=first, size=vocab_size, reduce=reduced_over(self.mesh.groups["tp"]))
        return losses.sum() * self.loss_scale

    def forward_backward(self) -> None:
        """Compute the reduced gradients of a step."""
        plan, model = self.plan, self.stages[0]
        self.data.begin_step()
        if self.schedule is not None:
            self.losses = self._run_pipeline(self.schedule)
        else:
            losses = []
            for index in range(plan.num_microbatches):
                self.data.begin_microbatch(is_last=index == plan.num_microbatches - 1)
                rows = slice(index * plan.micro_batch, (index + 1) * plan.micro_batch)
                mtp_tokens = None if self.mtp_tokens is None else self.mtp_tokens[rows]
                loss = self.loss(model(self.tokens[rows], mtp_tokens), self.targets[rows])
                self.clock.mark("forward")
                self.worker.beat(f"backward of microbatch {index}")
                loss.backward()
                losses.append(loss.detach())
                del loss
                self.clock.mark("backward")
            self.losses = losses
        self.worker.beat("gradient sync")
        self.data.finish_gradients()
        self.clock.mark("gradient_sync")

    def _run_pipeline(self, schedule: Any) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        arguments = (self.tokens,) if self.stages[0].has_embedding else ()
        keywords: dict[str, Any] = {"target": self.targets, "losses": losses} if self.has_head else {}
        if self.mtp_tokens is not None:
            keywords["mtp_tokens"] = self.mtp_tokens
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            keywords["return_outputs"] = False
        schedule.step(*arguments, **keywords)
        self.clock.mark("pipeline")
        return [loss.detach() for loss in losses]

    def loss_share(self) -> float:
        """Return this rank's share of the last step's mean loss; only tp rank 0 counts. Waits for the device."""
        if self.sharding.tp_rank:
            return 0.0
        return sum(float(loss) for loss in self.losses) / (self.loss_scale * self.plan.job.tokens_per_step)

    def step(self) -> None:
        self.clock.mark("start")
        self.forward_backward()
        self.worker.beat("optimizer")
        self.data.optimizer_step()
        self.clock.mark("optimizer")
