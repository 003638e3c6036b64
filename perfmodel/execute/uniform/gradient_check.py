"""Gradient check of every run: gradients of the parallel program compared with those of one process.

A correct loss proves nothing: torch has combinations with a correct loss and wrong gradients. The check runs in fp32 from
the same weights and tokens. The error of a parameter is its largest deviation over its largest gradient, with a floor of
a hundredth of the model's largest gradient. Smaller gradients are round-off (a key bias's is exactly zero in theory).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfmodel.execute.launch.launch import Worker
from perfmodel.execute.tolerance import ROUND_OFF_FLOOR
from perfmodel.execute.uniform.data_parallel import canonical_name
from perfmodel.execute.uniform.model import Transformer
from perfmodel.execute.uniform.parallelize import TrainingProgram
from perfmodel.execute.uniform.sharding import Sharding
from perfmodel.execute.uniform.weights import fill, make_tokens, shifted_tokens
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.plan import Plan
from perfmodel.workload.job import Precision


def reference_gradients(worker: Worker, plan: Plan) -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients of the plan's step in this process alone, cached for the next plan of the same job."""
    job = plan.job
    key = ("reference", job, plan.attention)
    if worker.cache.get("reference key") == key:
        return worker.cache["reference"]  # type: ignore[no-any-return]
    sharding = Sharding(loss_scale=1.0 / job.tokens_per_step)
    model = Transformer(job.transformer, sharding=sharding, fused_attention=plan.attention is AttentionKernel.FLASH, device=worker.device)
    model.beat = worker.beat
    for name, parameter in model.named_parameters():
        worker.beat(f"filling {name}")
        fill(job.transformer, canonical_name(name), parameter)

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
    result = total, {canonical_name(name): p.grad.cpu().numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    worker.cache["reference key"], worker.cache["reference"] = key, result
    return result


def check_gradients_on_rank(worker: Worker, plan: Plan) -> dict[str, float]:
    """Return the relative error of the loss ("loss") and of every parameter gradient held on this rank."""
    plan = replace(plan, job=replace(plan.job, precision=Precision.FP32))
    program = TrainingProgram(worker, plan)
    program.clock.mark("start")
    program.forward_backward()
    share = torch.tensor([program.loss_share()], dtype=torch.float64)
    dist.all_reduce(share)
    local_gradients = dict(program.data.gradients())
    program.close()
    del program

    loss, reference = reference_gradients(worker, plan) if worker.rank == 0 else (0.0, {})
    header: list[Any] = [loss, {name: tuple(gradient.shape) for name, gradient in reference.items()}]
    dist.broadcast_object_list(header)
    loss, shapes = header
    largest, errors, sizes = 0.0, {"loss": abs(float(share) - loss) / abs(loss)}, {}
    for name, shape in shapes.items():
        gradient = torch.from_numpy(reference[name]).to(worker.device) if worker.rank == 0 else torch.empty(shape, device=worker.device)
        worker.beat(f"comparing {name}")
        dist.broadcast(gradient, 0)
        largest = max(largest, float(gradient.abs().max()))
        for alias in (name, "lm_head.weight") if plan.job.transformer.tie_word_embeddings and name == "embedding.weight" else (name,):
            if alias in local_gradients:
                local_gradient = local_gradients[alias].to(gradient.dtype)
                padding = local_gradient[shape[0] :]
                difference = float((local_gradient[: shape[0]] - gradient).abs().max())
                if padding.numel():
                    difference = max(difference, float(padding.abs().max()))
                errors[alias], sizes[alias] = difference, float(gradient.abs().max())
    missing = set(local_gradients) - set(sizes)
    assert not missing, f"no reference for {sorted(missing)}"
    for name, size in sizes.items():
        # nan stays nan, and the comparison with the tolerance fails
        errors[name] = errors[name] / max(size, ROUND_OFF_FLOOR * largest)
    return errors
