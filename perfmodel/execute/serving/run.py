"""`run_serving` and `audit_serving`: steps of a served model on this machine, checked, timed and counted, or counted at full size.

This module does not import torch: the workers of a run and the process of an audit do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perfmodel.execute.audit.audit import CountingProcess
from perfmodel.execute.launch.launch import DESCRIBE, WorkerGroup, workers_of
from perfmodel.execute.launch.processor_use import processor_use
from perfmodel.execute.launch.rank_results import worst_error
from perfmodel.execute.runner import CHECKED_PARAMETERS, num_devices, pick_device
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.results import MeasuredStep, ServingMeasurement, StepCounts, StepShape
from perfmodel.workload.config import TransformerConfig

#: Largest error of logits, relative to the largest logit, of a correct fp32 decoder, with a margin: measured errors are below 1e-6.
LOGIT_TOLERANCE = 1e-5
#: Rounds over all shapes, and timed steps of each shape per round.
ROUNDS, REPEATS = 5, 4


_WORKER = "perfmodel.execute.serving.worker"


def run_serving(
    config: TransformerConfig,
    shapes: Sequence[StepShape],
    *,
    tp: int = 1,
    dtype: Dtype = Dtype.FP32,
    device: str = "auto",
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    checks: bool = True,
    hang_timeout: float = 60.0,
    group: WorkerGroup | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ServingMeasurement:
    """Measure steps of these shapes. Raise InputError if they cannot run here, RunError if the run fails or its logits are wrong.

    tp               tensor-parallel ranks
    rounds, repeats  rounds over the shapes, and timed steps of each per round
    checks           first compare logits with the uncached forward pass (models of up to CHECKED_PARAMETERS parameters)
    group            a running WorkerGroup of `tp` ranks to use
    """
    _check(config, shapes, tp=tp, rounds=rounds, repeats=repeats, group=group)
    device = group.device if group is not None else pick_device(device, tp)
    if tp > num_devices(device):
        raise InputError(f"tp={tp}: this machine has room for {num_devices(device)} ranks; use a smaller tp")
    with workers_of(group, tp, device=device, hang_timeout=hang_timeout, on_progress=on_progress) as ranks:
        errors = ranks.call((_WORKER, "check_on_rank"), config) if checks and config.num_parameters <= CHECKED_PARAMETERS else []
        error = worst_error(
            [{"logits": error} for error in errors],
            LOGIT_TOLERANCE,
            lambda name, error, _: (
                f"cache check: {name} differ from the uncached forward pass by {error:.1e} of the largest (allowed {LOGIT_TOLERANCE:.0e}); "
                "the steps' times would mean nothing"
            ),
        )
        use = processor_use(ranks.pids)
        results = ranks.call((_WORKER, "measure_on_rank"), config, tuple(shapes), dtype, rounds, repeats)
        busy = processor_use(ranks.pids).others_since(use)
        chip, software = ranks.call(DESCRIBE)[0]
    steps = [
        MeasuredStep(
            shape=shape,
            times=tuple(max(repeat) for repeat in zip(*(times for times, _, _ in by_rank), strict=True)),
            counts=by_rank[0][2],
            processor_times=tuple(by_rank[0][1]) if tp == 1 and device == "cpu" else (),
        )
        for shape, by_rank in zip(shapes, zip(*(steps for steps, _ in results), strict=True), strict=True)
    ]
    return ServingMeasurement(
        model=config,
        tp=tp,
        dtype=str(dtype),
        chip=chip,
        device=device,
        software=software,
        steps=tuple(steps),
        logit_error=error,
        busy_fraction=busy,
        anchors=results[0][1],
    )


def _check(
    config: TransformerConfig, shapes: Sequence[StepShape], *, tp: int, rounds: int, repeats: int, group: WorkerGroup | None
) -> None:
    """Raise InputError for invalid arguments, on any machine."""
    if not shapes:
        raise InputError("shapes: none are given; say how many sequences, cached and new tokens a step has")
    longest = max(shape.cached + shape.new for shape in shapes)
    if longest > (most := config.positions.max_position_embeddings):
        raise InputError(f"cached+new={longest}: {config.name} has positions for {most} tokens; use shorter sequences")
    for name, number in (("rounds", rounds), ("repeats", repeats)):
        if number < 1:
            raise InputError(f"{name}={number}: must be at least 1; nothing is measured otherwise")
    if reason := not_served_reason(config, tp):
        raise InputError(reason)
    if group is not None and group.num_ranks != tp:
        raise InputError(f"tp={tp}: the worker group has {group.num_ranks} ranks; use one of {tp}")


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
    if reason := not_served_reason(config, tp, ep=ep):
        raise InputError(reason)
    if config.parts.experts is not None:
        number = config.parts.experts.num_experts
        for shape in shapes:
            rows = shape.rows * config.parts.experts.top_k
            if rows % ep or (rows % number and (rows > number or number % ep)):  # round-robin would give experts unequal numbers of rows
                uneven = f"{rows} rows are not evenly many for {number} experts on {ep} ranks"
                raise InputError(f"sequences={shape.sequences}: {uneven}; use another number")
    if process is None:
        with CountingProcess() as counting:
            return audit_serving(config, shapes, tp=tp, ep=ep, dtype=dtype, process=counting)
    counts, _, _ = process.ask(
        (_WORKER, "serving_counts"), config, tuple(shapes), tp, ep, dtype, about=config.name, program="a serving step of this model"
    )
    return list(counts)


def not_served_reason(config: TransformerConfig, tp: int, *, ep: int = 1) -> str:
    """Return why this model cannot be served on `tp` ranks with experts distributed over `ep` of them; "" if it can."""
    parts, experts = config.parts, config.parts.experts
    used = {part for kind in config.layer_kinds for part in (kind.mixer, kind.feed_forward)}
    lacking = ["attention in chunks"] if config.attention.attention_chunk else []
    if config.attention.attention_sinks and config.positions.position == "alibi":
        lacking.append("sinks with ALiBi")
    if lacking:
        return (
            f"model={config.name}: has {' and '.join(lacking)}, which the serving executor does not run; predict it, or use another model"
        )
    if config.norms.qk_norm and config.norms.qk_norm_scope not in ("head", "all"):
        return f"qk_norm_scope={config.norms.qk_norm_scope}: the executor has no such norm; use another model"
    if tp < 1:
        return f"tp={tp}: must be at least 1; use 1"
    if ep < 1 or tp % ep or (ep > 1 and (experts is None or experts.num_experts % ep)):
        return f"ep={ep}: must divide tp={tp} and the number of experts; use a divisor of both"
    if used - {"attention", "dense", "experts"} and config.parallel_block:
        return (
            f"model={config.name}: has a mixer other than attention in a parallel block, which the executor does not run; use another model"
        )
    if tp == 1:
        return ""
    if config.norms.qk_norm and config.norms.qk_norm_scope == "all":
        return f"tp={tp}: a norm over all heads of {config.name} is not cut by the executor; use tp=1"
    cuts: dict[str, int] = {}
    if used & {"attention", "latent"}:
        cuts |= {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if parts.mamba is not None:
        cuts["n_groups"] = parts.mamba.num_groups
    if parts.delta is not None:
        cuts["linear_num_key_heads"] = parts.delta.num_key_heads
    if "dense" in used:
        cuts["intermediate_size"] = config.intermediate_size
    if experts is not None:
        cuts |= {"the width of an expert": experts.width * ep, "the width of shared experts": experts.shared_width}
    for name, size in cuts.items():
        if size % tp:
            return f"tp={tp}: must divide {name}={size}; use a smaller tp"
    return ""
