"""Counts of a serving step under fake tensors: the decoder's own program at any size, on any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from perfmodel.execute.audit.program import fake_group
from perfmodel.execute.serving.counter import count_step
from perfmodel.execute.serving.decoder import build_decoder
from perfmodel.execute.serving.worker import cache_for, prepared_step, reserve_sequences
from perfmodel.execute.uniform.sharding import ExpertSharding
from perfmodel.execute.zero.flat import TORCH_DTYPES
from perfmodel.foundation.dtypes import Dtype
from perfmodel.parallel.serving.measurement import StepCounts, StepShape
from perfmodel.workload.config import TransformerConfig


def serving_counts(config: TransformerConfig, shapes: Sequence[StepShape], tp: int, ep: int, dtype: Dtype) -> list[StepCounts]:
    """Count one step of each shape on the first of `tp` ranks. Experts are distributed over `ep` ranks, and sharded over the rest."""
    torch.set_num_threads(1)
    torch_dtype = TORCH_DTYPES[dtype]
    with fake_group(0, tp) as worker:
        mesh = init_device_mesh(worker.device, (tp,), mesh_dim_names=("tp",)) if tp > 1 else None
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        experts = ExpertSharding(ep=ep, etp=tp // ep)
        decoder = build_decoder(config, num_blocks=1, dtype=torch_dtype, mesh=mesh, experts=experts, fake=mode)
        counts = []
        for shape in shapes:
            with mode:
                decoder.sharding.cache = cache_for(config, [shape], tp=tp, dtype=torch_dtype)
                reserve_sequences(decoder.cache, shape)
                step = prepared_step(decoder, shape)
                if tp > 1:
                    decoder.run(step)  # DTensor propagates each shape once on extra tensors
                counts.append(count_step(decoder, step))
        return counts
