"""The executor's program of one rank under fake tensors: the real torch program at any world size, in one process.

The parts that need real tensors or a real device mesh are built first, on the meta device. The parts that would fill memory are
built afterwards in `FakeTensorMode`, where a tensor has a shape, a dtype and a storage size but no data. The process group is
torch's fake one: every collective returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage

from perfmodel.execute.audit.repeat import with_microbatches
from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.uniform.parallelize import TrainingProgram
from perfmodel.foundation.errors import RunError
from perfmodel.parallel.choices import PipelineSchedule
from perfmodel.parallel.plan import Plan
from perfmodel.workload.routing import RoutingCounts


class _Vote:
    """Message between neighbouring pipeline stages in the first step: shapes are static."""

    @staticmethod
    def item() -> int:
        return 1


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[Worker]:
    """Run this process as one rank of `world_size`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RunError("audit: this process is already a rank of a process group; audit from another process")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield Worker(rank=rank, world_size=world_size, device="cpu")
    finally:
        dist.destroy_process_group()


class FakeProgram(TrainingProgram):
    """A training program on fake tensors: its weights have no values."""

    def __init__(self, worker: Worker, plan: Plan, mode: FakeTensorMode, *, dropout: bool, routing: RoutingCounts | None) -> None:
        self.mode, self.dropout = mode, dropout
        super().__init__(worker, plan, routing)

    def _materialise(self) -> None:
        self.sharding.is_abstract = True
        self.sharding.dropout = self.plan.job.transformer.dropout if self.dropout else 0.0
        with self.mode:
            self.data.materialise(self.worker.device)

    def _local_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        number = self.plan.job.transformer.num_mtp_layers
        shape = (self.plan.num_microbatches * self.plan.micro_batch, self.plan.job.seq_len // self.plan.layout.cp)
        with self.mode:
            tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
            mtp_tokens = torch.zeros(shape[0], number + 1, shape[1], dtype=torch.int64) if number and self.has_head else None
        return tokens, targets, mtp_tokens

    def take(self, num_microbatches: int) -> None:
        """Set the number of micro-batches of the following steps, and allocate the pipeline's receive buffers before the next step."""
        self.plan, self.losses = with_microbatches(self.plan, num_microbatches), []
        self._lay_out_step()
        if self.schedule is not None:
            prepare = getattr(self.schedule, "_initialize_stages", None) or self.schedule._initialize_stage
            with self.mode:
                prepare((), None)

    def _build_schedule(self, num_stages: int) -> Any:
        """Allow 1F1B with fewer micro-batches than stages, which torch refuses as inefficient; late stages are counted with so few."""
        plan = self.plan
        if plan.schedule is not PipelineSchedule.ONE_F_ONE_B or plan.num_microbatches >= num_stages:
            return super()._build_schedule(num_stages)
        self.plan = with_microbatches(plan, num_stages)
        schedule = super()._build_schedule(num_stages)
        self.plan, schedule._n_microbatches = plan, plan.num_microbatches
        return schedule


@contextmanager
def fake_program(plan: Plan, rank: int, *, dropout: bool = False, routing: RoutingCounts | None = None) -> Iterator[FakeProgram]:
    """Yield the rank's program at the plan's full size after one step of few micro-batches, ready to step under its fake mode.

    The first step does one-time work: shape propagation in DTensor (on global tensors) and initialization of the optimizer state.
    In a pipeline it accumulates full gradients over a second micro-batch.
    """
    torch.set_num_threads(1)
    with ExitStack() as stack:
        worker = stack.enter_context(fake_group(rank, plan.num_chips))
        for name in ("_warmup_forward_vote", "_warmup_backward_result"):  # exchange of shapes with stages that do not run in this process
            stack.callback(setattr, PipelineStage, name, getattr(PipelineStage, name))
            setattr(PipelineStage, name, lambda *_, **__: _Vote())
        pp, most = plan.layout.pp, 2 * max(plan.layout.pp, plan.num_microbatches)
        few = 1 if pp == 1 else next(m for m in range(2, most + 1) if plan.schedule.admits(m, pp, plan.virtual_stages))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        program = FakeProgram(worker, with_microbatches(plan, few), mode, dropout=dropout, routing=routing)
        with program.mode:
            program.step()
        yield program
