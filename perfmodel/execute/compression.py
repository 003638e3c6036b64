"""Compression of gradients by torch's DDP communication hooks (`torch.distributed.algorithms.ddp_comm_hooks`).

The executor's data parallelism is not `DistributedDataParallel`: its buckets are flat units (`execute/zero.py`). A unit calls torch's hook
when its last gradient is complete, as DDP does, with a state and an error feedback of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from perfmodel.parallel.compression import Compression, Compressor

_HOOKS: Mapping[Compressor, Any] = {
    Compressor.FP16: fp16_compress_hook,
    Compressor.BF16: bf16_compress_hook,
    Compressor.POWERSGD: powerSGD_hook,
}
_FIRST = 2
"""First iteration that torch allows PowerSGD to compress; a run starts there, and not at the default 1,000."""


class _Finished:
    """Work of an all-reduce that has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


@contextmanager
def _finished_reductions() -> Iterator[None]:
    """Let all-reduces end before they return, so that the hook's callbacks run in the calling thread.

    gloo runs callbacks in its own threads, where the order of their all-reduces differs from rank to rank, and no counter sees them. The
    futures of a fake process group have no value.
    """
    original: Any = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> _Finished:
        original(tensor, group=group, async_op=async_op).wait()
        return _Finished(tensor)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce = original


class GradientHook:
    """torch's hook for one flat unit, which is also the bucket that the hook reads.

    shapes   of the gradients in the buffer, in order; vectors are not compressed
    """

    def __init__(self, compression: Compression, group: dist.ProcessGroup, shapes: list[tuple[int, ...]]) -> None:
        self.compression, self.group = compression, group
        self._shapes, self._buffer = shapes, torch.empty(0)
        self._state: Any = group
        if compression.is_low_rank:
            self._state = PowerSGDState(group, matrix_approximation_rank=compression.rank, start_powerSGD_iter=_FIRST)
            self._state.iter = _FIRST

    def reduce(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of a buffer to its mean over the group, in place."""
        self._buffer = buffer
        with nullcontext() if buffer.device.type == "cuda" else _finished_reductions():
            future: torch.futures.Future[torch.Tensor] = _HOOKS[self.compression.method](self._state, self)
        return future

    def lost(self) -> torch.Tensor | None:
        """Return the mean over the group of the error that the last reduction keeps for the next; None if it keeps none. Collective."""
        if not self.compression.is_low_rank:
            return None
        error: torch.Tensor = self._state.error_dict[0].clone()
        dist.all_reduce(error, group=self.group)
        return error / dist.get_world_size(self.group)

    def projection_error(self, lost: torch.Tensor) -> float:
        """Return the largest |S^T (M - S)| / |M|^2 of the matrices M that were sent as S; it is 0 for S = P P^T M with orthonormal P."""
        worst = 0.0
        for sent, rest in zip(self._of(self._buffer), self._of(lost), strict=True):
            if sent.ndim > 1:
                sent, rest = sent.flatten(1), rest.flatten(1)
                worst = max(worst, float((sent.t() @ rest).abs().max() / (sent + rest).square().sum().clamp_min(1e-30)))
        return worst

    def _of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        pieces = buffer.split([torch.Size(shape).numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    # --- torch.distributed.GradBucket, which Python cannot construct ------------------------------------------------------

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._of(self._buffer)
