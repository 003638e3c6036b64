"""Gradient check of every run: gradients of the parallel program compared with those of one process.

A correct loss proves nothing: torch has combinations with a correct loss and wrong gradients. The check runs in fp32 from
the same weights and tokens. The error of a parameter is its largest deviation over its largest gradient, with a floor of
a hundredth of the model's largest gradient. Smaller gradients are round-off (a key bias's is exactly zero in theory).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.launch.rank_results import ROUND_OFF_FLOOR
from perfmodel.execute.measure.compare import errors_on_rank, from_first_rank
from perfmodel.execute.uniform.data_parallel import FlatData
from perfmodel.execute.uniform.parallelize import TrainingProgram
from perfmodel.execute.uniform.weights import canonical_name, make_tokens, one_process_model, shifted_tokens
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.workload.job import Precision


def reference_gradients(worker: Worker, plan: Plan) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of the plan's step in this process alone."""
    job = plan.job
    fused, scale = plan.attention is AttentionKernel.FLASH, 1.0 / job.tokens_per_step
    model = one_process_model(job.transformer, worker.device, fused=fused, loss_scale=scale, beat=worker.beat)

    def share(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / job.tokens_per_step

    model.loss = share
    total, positions, num_mtp = 0.0, slice(0, job.seq_len), job.transformer.num_mtp_layers
    for row in make_tokens(job).to(worker.device).split(plan.micro_batch):
        logits = model(row[:, positions], shifted_tokens(row, positions, num_mtp) if num_mtp else None)
        loss = share(logits, row[:, 1 : 1 + job.seq_len])
        worker.beat("reference backward")
        loss.backward()
        total += float(loss)
    # As numpy arrays, so that the tracker of live tensors does not count them.
    return total, {canonical_name(name): p.grad.cpu().numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def check_gradients_on_rank(worker: Worker, plan: Plan) -> dict[str, float]:
    """Return the relative error of the loss ("loss") and of every parameter gradient held on this rank."""
    plan = replace(plan, job=replace(plan.job, precision=Precision.FP32))
    program = TrainingProgram(worker, plan)
    program.clock.mark("start")
    program.forward_backward()
    share = torch.tensor([program.loss_share()], dtype=torch.float64)
    dist.all_reduce(share)
    gradients = dict(program.data.gradients())
    projections = program.data.projection_errors() if isinstance(program.data, FlatData) else {}
    del program

    loss, reference = 0.0, dict[str, np.ndarray]()
    if worker.rank == 0:
        loss, reference = worker.latest("reference", (plan.job, plan.attention), lambda: reference_gradients(worker, plan))
    loss = from_first_rank(loss)
    tied = ("embedding.weight", "lm_head.weight") if plan.job.transformer.tie_word_embeddings else ()

    def expected(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        aliases = [alias for alias in (tied if name in tied else (name,)) if alias in gradients]
        # the vocabulary may have more rows
        return {alias: F.pad(gradient.t(), (0, len(gradients[alias]) - len(gradient))).t() for alias in aliases}

    references = {name: torch.from_numpy(array) for name, array in reference.items()}
    errors = errors_on_rank(worker, gradients, references, expected, dtype=torch.float32, floor=ROUND_OFF_FLOOR)
    return {"loss": abs(float(share) - loss) / abs(loss)} | errors | projections
