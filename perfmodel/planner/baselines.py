"""Plans that people would use without a search. They are always shown, even where they lose or do not fit."""

from __future__ import annotations

from perfmodel.cost.estimate import Estimator
from perfmodel.parallel.layout import DEFAULT_ORDER, AttentionKernel
from perfmodel.planner.result import Baseline
from perfmodel.planner.space import Space
from perfmodel.planner.sweep import sweep


def baselines(estimator: Estimator, *, memory_headroom: float, attention: AttentionKernel) -> tuple[Baseline, ...]:
    """Plain data parallelism, FSDP over all chips, and the Megatron rule of thumb; micro-batch and recomputation are chosen best."""
    job, chips = estimator.job, estimator.cluster.num_chips
    flat = {"pp": 1, "tp": 1, "cp": 1}
    too_many = f"global_batch={job.global_batch} has fewer sequences than there are chips, or does not divide among {chips}"
    found = [
        _best(estimator, "data parallel", {**flat, "dp_replicate": chips, "dp_shard": 1, "zero": 0}, too_many, memory_headroom, attention),
        _best(estimator, "FSDP", {**flat, "dp_replicate": 1, "dp_shard": chips, "zero": 3}, too_many, memory_headroom, attention)
        if chips > 1
        else Baseline(name="FSDP", prediction=(), reason="there is one chip only"),
        megatron_rule_of_thumb(estimator, memory_headroom=memory_headroom, attention=attention),
    ]
    return tuple(found)


def _best(
    estimator: Estimator, name: str, fixed: dict[str, int | str | bool], reason: str, headroom: float, attention: AttentionKernel
) -> Baseline:
    """The fastest plan with these knobs that fits, or else the one that needs the least memory."""
    space = Space(fixed=fixed, orders=(DEFAULT_ORDER,))
    state = sweep(estimator, space, top=1, memory_headroom=headroom, attention=attention)
    ids = state.best_time.ids if len(state.best_time.ids) else state.least.ids
    if not len(ids):
        return Baseline(name=name, prediction=(), reason=reason)
    return Baseline(name=name, prediction=(estimator.predict(state.plan(int(ids[0])), memory_headroom=headroom),), reason="")


def megatron_rule_of_thumb(estimator: Estimator, *, memory_headroom: float, attention: AttentionKernel) -> Baseline:
    """Tensor parallelism up to the node, then pipeline until the model fits, data parallelism with the rest.

    Sequence parallelism with tp, selective recomputation, 1f1b, distributed optimizer (ZeRO-1) where there are data ranks.
    Source: Narayanan et al., SC21, takeaways 1 and 2; Korthikanti et al. 2022.
    """
    job, chips = estimator.job, estimator.cluster.num_chips
    node = min(estimator.cluster.chips_per_node, chips)
    name = "Megatron rule of thumb"
    last = Baseline(name=name, prediction=(), reason="no tensor and pipeline degree divides the model and the chips")
    steps = [(t, 1) for t in _powers(node)] + [(node, p) for p in _powers(chips // node)[1:]]
    for tp, pp in steps:
        if chips % (tp * pp):
            continue
        data = chips // (tp * pp)
        fixed: dict[str, int | str | bool] = {
            "tp": tp,
            "pp": pp,
            "cp": 1,
            "sequence_parallel": tp > 1,
            "recompute": "selective",
            "schedule": "1f1b",
            "dp_replicate": 1,
            "dp_shard": data,
            "zero": 1 if data > 1 else 0,
        }
        found = _best(estimator, name, fixed, last.reason, memory_headroom, attention)
        if found.prediction:
            last = found
            if found.fits:
                return found
    if not last.prediction:
        return Baseline(name=name, prediction=(), reason=f"no degree of it divides global_batch={job.global_batch} and the model")
    return last


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]
