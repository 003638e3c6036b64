"""Why layouts are not in the space, counted over all degrees whose product is the number of chips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perfmodel.parallel.layout import STAGES_WITHOUT_LAYERS
from perfmodel.parallel.plan import divisors
from perfmodel.planner.space import Space
from perfmodel.workload.job import TrainingJob

NOT_RUN = "not what the framework runs"


def layouts_left_out(job: TrainingJob, num_chips: int, space: Space) -> dict[str, int]:
    """First rule that each layout (pp, dp_replicate, dp_shard, cp, tp) breaks -> number of layouts."""
    counts: Counter[str] = Counter()
    for tp in divisors(num_chips):
        for pp in divisors(num_chips // tp):
            for cp in divisors(num_chips // (tp * pp)):
                data = num_chips // (tp * pp * cp)
                splits: Sequence[int] = divisors(data)
                if not space.runs.zero_of_replicas:
                    whole = [s for s in splits if s in (1, data)]
                    counts[NOT_RUN] += len(splits) - len(whole)
                    splits = whole
                allowed = [s for s in splits if space.admits("dp_shard", s) and space.admits("dp_replicate", data // s)]
                reason = _first_broken_rule(job, tp, pp, cp, data, space)
                if reason:
                    counts[reason] += len(splits)
                elif len(allowed) < len(splits):
                    counts["excluded by a given flag"] += len(splits) - len(allowed)
    return dict((+counts).most_common())


def _first_broken_rule(job: TrainingJob, tp: int, pp: int, cp: int, data: int, space: Space) -> str:
    model = job.model
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    if not all(space.admits(knob, value) for knob, value in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", data))):
        return "excluded by a given flag"
    if not space.runs_degrees(job.seq_len, pp=pp, cp=cp, tp=tp):
        return NOT_RUN
    if heads % tp:
        return f"tp does not divide num_attention_heads={heads}"
    if max(tp, kv) % min(tp, kv):
        return f"tp neither divides num_key_value_heads={kv} nor is a multiple of it"
    if model.intermediate_size % tp:
        return f"tp does not divide intermediate_size={model.intermediate_size}"
    if pp > model.num_hidden_layers + STAGES_WITHOUT_LAYERS:
        return f"pp is more than num_hidden_layers={model.num_hidden_layers} and stages for embedding and head"
    if job.seq_len % cp:
        return f"cp does not divide seq_len={job.seq_len}"
    if job.global_batch % data:
        return f"dp_replicate*dp_shard does not divide global_batch={job.global_batch}"
    return ""
