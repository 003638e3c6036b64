"""Tiny training programs whose steps consist almost entirely of host overhead: dispatch and bookkeeping costs are fitted to them.

The time of a step is the processor time of its main thread. It excludes waiting for peers and the transport's own threads, which belong
to the collectives, and the time of other processes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

from perfmodel.execute.launch.launch import Worker
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Precision, TrainingJob


def tiny_model(*, layers: int, hidden: int, vocabulary: int, length: int) -> TransformerConfig:
    """Return a GPT-2 of that size."""
    return TransformerConfig.of(
        name=f"overhead-{layers}x{hidden}", architecture="gpt2", num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=8,
        num_key_value_heads=8, head_dim=hidden // 8, intermediate_size=4 * hidden, vocab_size=vocabulary, max_position_embeddings=length,
        gated_mlp=False, activation="gelu_tanh", norm="layernorm", position="learned", qkv_bias=True, attention_output_bias=True,
        mlp_bias=True, norm_bias=True, tie_word_embeddings=True,
    )  # fmt: skip


def overhead_plans(num_ranks: int, *, cluster: str, profile: str, brief: bool) -> tuple[Plan, ...]:
    """Return tiny programs of every parallelism that `num_ranks` ranks allow, in a small and, for the bytes, a somewhat larger size."""
    n = num_ranks
    fp32 = Precision.FP32
    short = {"vocabulary": 512, "length": 16}
    small = TrainingJob(model=tiny_model(layers=8, hidden=64, **short), global_batch=2 * n, seq_len=16, precision=fp32)
    shallow = TrainingJob(model=tiny_model(layers=2, hidden=64, **short), global_batch=2 * n, seq_len=16, precision=fp32)
    wide = tiny_model(layers=max(2, n), hidden=256, vocabulary=1024, length=64)
    large = TrainingJob(model=wide, global_batch=4 * n, seq_len=64, precision=fp32)
    data: dict[str, Any] = {"dp_replicate": n, "micro_batch": 2}
    wanted: list[tuple[TrainingJob, dict[str, Any]]] = [(small, data), (shallow, data), (large, data), (small, data | {"micro_batch": 1})]
    for job in (small, large) if n > 1 else ():
        batch = job.global_batch
        wanted += [
            (job, {"dp_shard": n, "zero": 2, "micro_batch": batch // n}),
            (job, {"dp_shard": n, "zero": 3, "micro_batch": batch // n}),
            (job, {"tp": n, "sequence_parallel": False, "micro_batch": batch}),
            (job, {"tp": n, "sequence_parallel": True, "micro_batch": batch}),
            (job, {"pp": n, "schedule": "1f1b", "micro_batch": batch // n}),
        ]
        if not brief:
            wanted += [
                (job, {"dp_shard": n, "zero": 1, "micro_batch": batch // n}),
                (job, {"cp": n, "micro_batch": batch}),
                (job, {"pp": n, "schedule": "gpipe", "micro_batch": 1}),
            ]
    if n > 1:
        wanted.append((small, {"pp": n, "schedule": "1f1b", "micro_batch": 1}))
    plans = []
    for job, knobs in wanted:
        with contextlib.suppress(InputError):  # heads, layers or tokens are not divisible by the number of ranks
            plans.append(make_plan(job, cluster=cluster, num_chips=n, profile=profile, **knobs))
    return tuple(plans)


def processor_time_on_rank(worker: Worker, plan: Plan, steps: int, warmup: int) -> float:
    """Return the median processor time of this rank's main thread in a step of the plan. [s]"""
    import torch.distributed as dist

    from perfmodel.execute.uniform.parallelize import TrainingProgram

    program = TrainingProgram(worker, plan)
    times = []
    for _ in range(warmup + steps):
        dist.barrier()
        start = time.thread_time()
        program.step()
        times.append(time.thread_time() - start)
        program.clock.durations()
    return statistics.median(times[warmup:])
