"""Reasons why layouts are not in the space, counted over all degrees whose product is the number of chips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perfmodel.parallel.algebra.degrees import admits, broken, unused_axis
from perfmodel.parallel.layout import STAGES_WITHOUT_LAYERS
from perfmodel.parallel.plan import divisors
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.job import TrainingJob

NOT_RUN = "not what the framework runs"


def layouts_left_out(job: TrainingJob, num_chips: int, space: Space) -> dict[str, int]:
    """Return the first rule that each layout (pp, dp_replicate, dp_shard, cp, tp) breaks -> number of layouts."""
    counts: Counter[str] = Counter()
    for tp in divisors(num_chips):
        for pp in divisors(num_chips // tp):
            for cp in divisors(num_chips // (tp * pp)):
                data = num_chips // (tp * pp * cp)
                splits: Sequence[int] = divisors(data)
                if not space.runs.sharding.zero_of_replicas:
                    unmixed = [s for s in splits if s in (1, data)]
                    counts[NOT_RUN] += len(splits) - len(unmixed)
                    splits = unmixed
                allowed = [s for s in splits if space.admits("dp_shard", s) and space.admits("dp_replicate", data // s)]
                reason = _first_broken_rule(job, tp, pp, cp, data, space)
                if reason:
                    counts[reason] += len(splits)
                elif len(allowed) < len(splits):
                    counts["excluded by a given flag"] += len(splits) - len(allowed)
    return dict((+counts).most_common())


def _first_broken_rule(job: TrainingJob, tp: int, pp: int, cp: int, data: int, space: Space) -> str:
    model = job.transformer
    if not all(space.admits(knob, value) for knob, value in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", data))):
        return "excluded by a given flag"
    if not space.runs_degrees(job.seq_len, pp=pp, cp=cp, tp=tp):
        return NOT_RUN
    if any(admits(rules, model, job.seq_len, cp=cp, tp=tp) for rules in space.rule_sets):
        return _broken_otherwise(job, pp, data)
    # by the first rule set; conditions on the sequence come after those on the pipeline
    first = space.rule_sets[0]
    axis = unused_axis(first, model, cp=cp, tp=tp)
    if axis:
        return f"{axis} is more than 1, and rules={first.name} cut nothing by it"
    condition = broken(first, model, job.seq_len, cp=cp, tp=tp)
    if condition is None:
        return ""
    if condition.is_sequence and pp > model.num_hidden_layers + STAGES_WITHOUT_LAYERS:
        return _broken_otherwise(job, pp, data)
    return condition.reason


def _broken_otherwise(job: TrainingJob, pp: int, data: int) -> str:
    model = job.transformer
    if pp > model.num_hidden_layers + STAGES_WITHOUT_LAYERS:
        return f"pp is more than num_hidden_layers={model.num_hidden_layers} and stages for embedding and head"
    if job.global_batch % data:
        return f"dp_replicate*dp_shard does not divide global_batch={job.global_batch}"
    return ""
