"""A stage of a pipeline around a per-operator plan, under torch's schedules.

A rank sends what it has of the tensor that crosses, as its producer left it, to the rank at its place in the next stage; that one
redistributes it. Its gradient comes back resolved. 1F1B; with fewer microbatches than stages, where the two are one, torch's GPipe.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from perfmodel.execute.per_operator.redistribute import holding
from perfmodel.parallel.per_operator.stages import stage_send

if TYPE_CHECKING:
    from perfmodel.execute.per_operator.model import NetworkProgram


class _StageModule(nn.Module):
    """One microbatch of the stage; the last one returns its loss."""

    def __init__(self, pipeline: StagePipeline) -> None:
        super().__init__()
        self.pipeline = pipeline
        if pipeline.program.module is not None:
            self.inner = pipeline.program.module

    def forward(self, received: torch.Tensor, *, microbatch: torch.Tensor) -> torch.Tensor:
        return self.pipeline.forward(received, int(microbatch))


class StagePipeline:
    """This rank's part of a step in stages. `sent_elements`: what it sends to its neighbours in a step."""

    def __init__(self, program: NetworkProgram) -> None:
        self.program = program
        mesh, plan = program.mesh, program.plan
        self.times, self.stage = plan.num_microbatches, mesh.stage
        self.is_last = self.stage == mesh.num_stages - 1
        begin, end = program.run
        self.entering, first = self._crossing(begin) if self.stage else ("", torch.empty(1, dtype=torch.int64, device="meta"))
        self.leaving, last = self._crossing(end) if not self.is_last else ("", torch.empty((), dtype=self._loss_dtype(), device="meta"))
        self.sent_elements = self.times * sum(prod(each.shape) for each in (first, last) if each.requires_grad)
        stage = PipelineStage(
            _StageModule(self),
            self.stage,
            mesh.num_stages,
            torch.device(program.worker.device),
            input_args=(first,),
            output_args=(last.requires_grad_(),),
            group=mesh.stages_group(),
        )
        kind = Schedule1F1B if self.times >= mesh.num_stages else ScheduleGPipe
        self.schedule = kind(stage, n_microbatches=self.times, loss_fn=lambda output, target: output, scale_grads=False)
        self.shares: list[torch.Tensor] = []

    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.program.dtype, torch.float32)

    def _crossing(self, start: int) -> tuple[str, torch.Tensor]:
        """The tensor that enters the stage which begins there, by name and as one rank has it."""
        program = self.program
        tensor, layout = stage_send(program.network, program.plan, start)
        shape = [len(part) for part in holding(layout, program.network.tensors[tensor].shape, program.mesh)]
        return tensor, torch.empty(shape, dtype=program.dtype, device="meta", requires_grad=True)

    def forward(self, received: torch.Tensor, microbatch: int) -> torch.Tensor:
        program = self.program
        outputs = program.forward({self.entering: received} if self.entering else {}, microbatch)
        if self.is_last:
            self.shares.append(program.share(outputs))
            result = program.loss(outputs)
        else:
            result = outputs[self.leaving].contiguous()
        if not result.requires_grad:  # nothing before it is trained: torch's schedules send a gradient back all the same
            result = result.detach().requires_grad_()
        result.register_hook(lambda gradient: program.parameters.begin_backward(microbatch))
        return result

    def run(self) -> torch.Tensor:
        """All microbatches, forward and backward; the local share of the loss."""
        self.shares = []
        numbers = torch.arange(self.times)
        arguments = () if self.stage else (numbers.to(self.program.worker.device),)
        keywords: dict[str, Any] = {"target": numbers, "losses": []} if self.is_last else {}
        self.schedule.step(*arguments, microbatch=numbers, return_outputs=False, **keywords)
        zero = torch.zeros((), dtype=self._loss_dtype(), device=self.program.worker.device)
        return torch.stack(self.shares).sum() if self.shares else zero
