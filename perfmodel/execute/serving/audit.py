"""`audit_serving`: torch's own counts of the steps of a served model, at full size, on any machine.

This module does not import torch: a separate process does.
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
    """Return torch's counts of one of `tp` ranks in a step of each shape; experts are chosen round-robin.

    ep        number of expert-parallel ranks within tp; the remaining factor of tp shards each expert
    process   a running counting process; None: start one
    """
    reason = not_served_reason(config, tp, ep=ep) or _uneven_reason(config, shapes, ep)
    if reason:
        raise InputError(reason)
    if process is None:
        with CountingProcess() as counting:
            return audit_serving(config, shapes, tp=tp, ep=ep, dtype=dtype, process=counting)
    counts, _, _ = process.ask(_COUNTS, config, tuple(shapes), tp, ep, dtype, about=config.name, program="a serving step of this model")
    return list(counts)


def _uneven_reason(config: TransformerConfig, shapes: Sequence[StepShape], ep: int) -> str:
    """Return why round-robin routing would give experts unequal numbers of rows; "" if they are equal."""
    if config.experts is None:
        return ""
    number, chosen = config.experts.num_experts, config.experts.top_k
    for shape in shapes:
        rows = shape.rows * chosen
        if rows % ep or (rows % number and (rows > number or number % ep)):
            return f"sequences={shape.sequences}: {rows} rows are not evenly many for {number} experts on {ep} ranks; use another number"
    return ""
