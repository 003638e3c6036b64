"""Pipeline stages of a per-operator plan, under torch's schedules.

A rank sends its shard of the boundary tensor, in the producer's layout, to the rank with the same coordinates in the next stage, which
redistributes it. The gradient returns in the resolved layout. With fewer micro-batches than stages, 1F1B equals GPipe: torch's GPipe runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from perfmodel.execute.per_operator.interpret import Interpreter
from perfmodel.execute.per_operator.redistribute import holding
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.per_operator.stages import stage_send

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.model import NetworkProgram


@dataclass(slots=True)
class NetworkStage:
    """Operators `run` of the network as stage `index`; `module`: the stage as modules, where ZeRO needs them."""

    index: int
    run: tuple[int, int]
    interpreter: Interpreter
    module: nn.Module | None

    @property
    def left(self) -> list[str]:
        """Outputs of the stage that other stages read or no operator reads."""
        return self.interpreter.external_outputs(*self.run)


class _StageModule(nn.Module):
    """One micro-batch of a stage; the last stage returns its loss."""

    def __init__(self, pipeline: StagePipeline, stage: NetworkStage) -> None:
        super().__init__()
        self.pipeline, self.stage, self.next_microbatch = pipeline, stage, 0
        program = pipeline.program
        begin, end = stage.run
        self.entering, self.first = self._crossing(begin) if begin else ("", torch.empty(1, dtype=torch.int64, device="meta"))
        self.is_last = end == len(program.network.operators)
        loss = torch.empty((), dtype=pipeline.loss_dtype, device="meta", requires_grad=True)
        self.leaving, self.last = self._crossing(end) if not self.is_last else ("", loss)
        if stage.module is not None:
            self.inner = stage.module

    def _crossing(self, start: int) -> tuple[str, torch.Tensor]:
        """Return the tensor that enters the stage starting there: its name and a meta tensor of the local shape."""
        program = self.pipeline.program
        tensor, layout = stage_send(program.network, program.plan, start)
        shape = [len(part) for part in holding(layout, program.network.tensors[tensor].shape, program.mesh)]
        return tensor, torch.empty(shape, dtype=program.dtype, device="meta", requires_grad=True)

    @property
    def sent_elements(self) -> int:
        """Elements that the stage sends per micro-batch: outputs, and gradients of its inputs."""
        return (prod(self.first.shape) if self.entering else 0) + (prod(self.last.shape) if self.leaving else 0)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        program, number = self.pipeline.program, self.next_microbatch
        self.next_microbatch += 1  # micro-batches pass each stage in order
        outputs = program.forward({self.entering: received} if self.entering else {}, number, stage=self.stage)
        if self.is_last:
            self.pipeline.shares.append(program.share(outputs))
            result = program.loss(outputs)
        else:
            result = outputs[self.leaving].contiguous()
        if not result.requires_grad:  # no earlier parameter is trained, but torch's schedules send a gradient back anyway
            result = result.detach().requires_grad_()
        result.register_hook(lambda gradient: program.parameters.begin_backward(number, self.stage.index))
        return result


class StagePipeline:
    """This rank's part of a pipelined step. `sent_elements`: elements sent to its neighbours per step."""

    def __init__(self, program: NetworkProgram) -> None:
        self.program = program
        mesh, plan = program.mesh, program.plan
        self.times = plan.num_microbatches
        self.loss_dtype = torch.promote_types(program.dtype, torch.float32)
        self.shares: list[torch.Tensor] = []
        self.modules = modules = [_StageModule(self, stage) for stage in program.stages]
        self.has_first, self.has_last = not modules[0].entering, modules[-1].is_last
        self.sent_elements = self.times * sum(module.sent_elements for module in modules)
        stages = [
            PipelineStage(
                module,
                module.stage.index,
                plan.cuts.num_stages,
                torch.device(program.worker.device),
                input_args=(module.first,),
                output_args=(module.last,),
                group=mesh.holders_group(range(mesh.num_stages)),
            )
            for module in modules
        ]
        options: dict[str, Any] = {"n_microbatches": self.times, "loss_fn": lambda output, target: output, "scale_grads": False}
        self.schedule: Any
        if plan.schedule is PipelineSchedule.INTERLEAVED:
            self.schedule = ScheduleInterleaved1F1B(stages, **options)  # type: ignore[arg-type]
        elif plan.schedule is PipelineSchedule.ONE_F_ONE_B and self.times >= mesh.num_stages:
            self.schedule = Schedule1F1B(stages[0], **options)
        else:
            self.schedule = ScheduleGPipe(stages[0], **options)

    def run(self) -> torch.Tensor:
        """Run forward and backward of all micro-batches. Return the local share of the loss."""
        self.shares = []
        for module in self.modules:
            module.next_microbatch = 0
        numbers = torch.arange(self.times, device=self.program.worker.device)
        arguments = (numbers,) if self.has_first else ()
        keywords: dict[str, Any] = {"target": numbers, "losses": []} if self.has_last else {}
        self.schedule.step(*arguments, return_outputs=False, **keywords)
        zero = torch.zeros((), dtype=self.loss_dtype, device=self.program.worker.device)
        return torch.stack(self.shares).sum() if self.shares else zero
