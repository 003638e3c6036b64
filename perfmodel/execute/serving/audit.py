"""`audit_serving`: torch's own counts of steps of a served model, at full size, on any machine.

Nothing here imports torch: a process of its own does.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.execute.audit.audit import CountingProcess
from perfmodel.execute.serving.refuse import not_served_reason
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.serving.measurement import StepCounts, StepShape
from perfmodel.workload.config import TransformerConfig

_COUNTS = ("perfmodel.execute.serving.audit_counts", "serving_counts")


def audit_serving(
    config: TransformerConfig,
    shapes: Sequence[StepShape],
    *,
    tp: int = 1,
    ep: int = 1,
    dtype: Dtype = Dtype.BF16,
    process: CountingProcess | None = None,
) -> list[StepCounts]:
    """Torch's counts of one of `tp` ranks in a step of each shape; experts are chosen in turn.

    ep        ranks of tp over which experts are dealt; the others cut each of them
    process   one that counts; None: one of its own
    """
    reason = not_served_reason(config, tp, ep=ep) or _uneven_reason(config, shapes, ep)
    if reason:
        raise InputError(reason)
    if process is None:
        with CountingProcess() as own:
            return audit_serving(config, shapes, tp=tp, ep=ep, dtype=dtype, process=own)
    counts, _, _ = process.ask(_COUNTS, config, tuple(shapes), tp, ep, dtype, about=config.name, program="a serving step of this model")
    return list(counts)


def _uneven_reason(config: TransformerConfig, shapes: Sequence[StepShape], ep: int) -> str:
    """Why experts chosen in turn would not get equally many rows; "" where they do."""
    if config.experts is None:
        return ""
    number, chosen = config.experts.num_experts, config.experts.top_k
    for shape in shapes:
        rows = shape.rows * chosen
        if rows % ep or (rows % number and (rows > number or number % ep)):
            return f"sequences={shape.sequences}: {rows} rows are not evenly many for {number} experts on {ep} ranks; use another number"
    return ""
