"""Shrinking of a plan to this machine: fewer ranks, fewer and narrower layers, the same parallelism. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from perfmodel.execute.runner import CHECKED_PARAMETERS
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.parallel.algebra.folding import folding_fault
from perfmodel.parallel.algebra.rules import default_rule_sets
from perfmodel.parallel.executable import executed_precision
from perfmodel.parallel.layout import DEFAULT_ORDER, divisors
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.parallel.schedule_table import ScheduleTable
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.layer_specs import DeltaNet, Experts, Mamba

#: Largest sizes of a shrunk model and job. They keep its step well under a second on one core.
HEAD_DIM, KEY_VALUE_HEADS, HEADS_PER_GROUP = 32, 4, 4
VOCAB, SEQUENCE, MICRO_BATCH = 2048, 128, 2
EXPERTS, CHOSEN = 16, 4
CHOSEN_KEYS = 32
#: Sizes of a served model: its step is dominated by matrix products, not by launches, and takes well under a second.
SERVED_LAYERS, SERVED_HEAD_DIM, SERVED_VOCAB = 8, 64, 8192
#: Axes in the order in which they are reduced when two have the same degree.
SHRINK_ORDER = ("dp_replicate", "dp_shard", "cp", "pp", "tp")


def _smallest_factor(number: int) -> int:
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def shrink_degrees(degrees: dict[str, int], ranks: int) -> dict[str, int]:
    """Divide the largest degree repeatedly until the product fits, so that axes stay in use as long as possible."""
    degrees = dict(degrees)

    def product() -> int:
        total = 1
        for degree in degrees.values():
            total *= degree
        return total

    while product() > ranks:
        axis = max(SHRINK_ORDER, key=lambda name: (degrees[name], -SHRINK_ORDER.index(name)))
        degrees[axis] //= _smallest_factor(degrees[axis])
    return degrees


def smallest_ranks(plan: Plan) -> int:
    """Return the fewest ranks that keep every axis of the plan in use."""
    total = 1
    for axis in DEFAULT_ORDER:
        degree = plan.layout.degree(axis)
        total *= _smallest_factor(degree) if degree > 1 else 1
    return total


def _round_up(number: float, multiple: int) -> int:
    return max(1, -(-int(number) // multiple)) * multiple


def shrink_experts(experts: Experts, *, ep: int, tp: int, hidden: float) -> Experts:
    """Return fewer and narrower experts in a number of groups that divides them; `hidden`: new hidden size over the old one."""
    number = _round_up(min(experts.num_experts, EXPERTS), ep)
    groups = gcd(number, experts.num_groups)
    top_groups = min(experts.top_groups, groups)
    return replace(
        experts,
        num_experts=number,
        top_k=min(experts.top_k, CHOSEN, number // groups * top_groups),
        width=_round_up(hidden * experts.width, 8 * tp),
        shared_width=_round_up(hidden * experts.shared_width, 8 * tp) if experts.shared_width else 0,
        num_groups=groups,
        top_groups=top_groups,
    )


def shrink_states(model: TransformerConfig, *, tp: int, hidden: float) -> tuple[Mamba | None, DeltaNet | None]:
    """Return fewer heads of the same sizes, in the number of groups of attention's key-value heads; `hidden` as in `shrink_experts`."""
    mamba, delta = model.parts.mamba, model.parts.delta
    if mamba is not None:
        groups = _round_up(min(mamba.num_groups, KEY_VALUE_HEADS), tp)
        mamba = replace(mamba, num_groups=groups, num_heads=_round_up(hidden * mamba.num_heads, groups))
    if delta is not None:
        groups = _round_up(min(delta.num_key_heads, KEY_VALUE_HEADS), tp)
        delta = replace(delta, num_key_heads=groups, num_value_heads=groups * (delta.num_value_heads // delta.num_key_heads))
    return mamba, delta


def shrink_folding(plan: Plan, degrees: Mapping[str, int], *, num_key_value_heads: int) -> tuple[int, int]:
    """Return (ep, etp) on fewer ranks: experts stay distributed, over the largest allowed number of ranks, and sharded if they were."""
    tp_kv = gcd(degrees["tp"], num_key_value_heads)
    etp = gcd(plan.etp, degrees["tp"])
    shards = degrees["dp_shard"] > 1 or (plan.zero and degrees["cp"] > 1)  # experts are not replicated under ZeRO
    data = degrees["dp_shard"] if shards else degrees["dp_replicate"]
    ranks = degrees["tp"] * degrees["cp"] * data // etp
    sizes = {"tp_kv": tp_kv, "tp_q": degrees["tp"] // tp_kv, "cp": degrees["cp"], "data": data}
    folds = [ep for ep in divisors(ranks) if not folding_fault(**sizes, ep=ep, etp=etp)]
    wanted = [ep for ep in folds if ep <= plan.ep] or folds
    return max(wanted) if plan.ep > 1 else min(wanted), etp


def shrink_model(model: TransformerConfig, *, tp: int, num_layers: int, ep: int = 1, head_dim: int = HEAD_DIM) -> TransformerConfig:
    """Return the same architecture, narrower: ratios of heads, of the MLP and of experts are kept where divisible."""
    depth = min(model.head_dim, head_dim)
    groups = _round_up(min(model.num_key_value_heads, KEY_VALUE_HEADS), tp)
    heads = groups * min(model.num_attention_heads // model.num_key_value_heads, HEADS_PER_GROUP)
    hidden = heads * depth
    experts, latent = model.parts.experts, model.parts.latent
    if experts is not None:
        experts = shrink_experts(experts, ep=ep, tp=tp, hidden=hidden / model.hidden_size)
    mamba, delta = shrink_states(model, tp=tp, hidden=hidden / model.hidden_size)
    if latent is not None:
        latent = replace(latent, index_top=min(latent.index_top, CHOSEN_KEYS))
    return model.with_layers(num_layers).having(
        name=f"{model.name}-shrunk",
        experts=experts,
        latent=latent,
        mamba=mamba,
        delta=delta,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=depth,
        intermediate_size=_round_up(hidden * model.intermediate_size / model.hidden_size, 8 * tp),
        vocab_size=min(model.vocab_size, VOCAB),
        max_position_embeddings=min(model.positions.max_position_embeddings, 8 * SEQUENCE),
    )


def runnable_model(model: TransformerConfig) -> TransformerConfig:
    """Return the model, or a smaller one of the same family if it is too large to be checked: fewer and narrower layers and experts."""
    if model.num_parameters <= CHECKED_PARAMETERS:
        return model
    layers = min(SERVED_LAYERS, model.num_hidden_layers)
    while True:
        small = shrink_model(model, tp=1, num_layers=layers, head_dim=SERVED_HEAD_DIM)
        positions = model.positions.max_position_embeddings
        small = small.having(vocab_size=min(model.vocab_size, SERVED_VOCAB), max_position_embeddings=positions)
        if small.num_parameters <= CHECKED_PARAMETERS or layers <= 2:
            return small
        layers //= 2


def shrink(plan: Plan, ranks: int) -> Plan:
    """Return a plan for at most `ranks` local processes, with the axes, schedule, ZeRO stage and recomputation of `plan`."""
    if ranks < 1:
        raise InputError(f"ranks={ranks}: must be at least 1; say how many processes may run")
    degrees = shrink_degrees({axis: plan.layout.degree(axis) for axis in DEFAULT_ORDER}, ranks)
    pp, cp, tp = degrees["pp"], degrees["cp"], degrees["tp"]
    virtual = (plan.schedule.num_chunks or min(plan.virtual_stages, 2)) if pp > 1 else 1
    heads_ways = tp * (cp if plan.rules.exchanges_heads else 1)
    layers = min(plan.job.transformer.num_hidden_layers, max(2, pp * virtual))
    data_axes = {"dp_replicate": degrees["dp_replicate"], "dp_shard": degrees["dp_shard"]}
    if not (plan.zero and degrees["dp_shard"] * cp > 1):
        data_axes = {"dp_replicate": degrees["dp_replicate"] * degrees["dp_shard"], "dp_shard": 1}  # as in `make_plan`
    model = shrink_model(plan.job.transformer, tp=heads_ways, num_layers=layers)
    folding = {}
    if plan.has_experts:
        ep, etp = shrink_folding(plan, degrees | data_axes, num_key_value_heads=model.num_key_value_heads)
        model = shrink_model(plan.job.transformer, tp=heads_ways, num_layers=layers, ep=ep)
        folding = {"ep": ep, "etp": etp, "dispatcher": str(plan.dispatcher)}
    ways = cp * tp
    length = min(plan.job.seq_len, SEQUENCE)
    length = max(length // ways, 1) * ways
    micro_batch = min(plan.micro_batch, MICRO_BATCH)
    microbatches = min(plan.num_microbatches, 2 * pp)
    if pp > 1:
        microbatches = max(microbatches // pp, 1) * pp
    if isinstance(plan.schedule, ScheduleTable):
        if pp != plan.schedule.num_ranks:
            rule = (
                f"the orders of schedule={plan.schedule} are of {plan.schedule.num_ranks} ranks, and of {ranks} only {pp} are left for pp"
            )
            raise bad_field("ranks", ranks, rule, "use more, or a schedule by name")
        microbatches = plan.schedule.num_microbatches
    data = degrees["dp_replicate"] * degrees["dp_shard"]
    job = TrainingJob(
        model=model.having(max_position_embeddings=max(model.positions.max_position_embeddings, length)),
        global_batch=data * micro_batch * microbatches,
        seq_len=length,
        precision=executed_precision(plan.job),
        optimizer=plan.job.optimizer,
        train=plan.job.train,
    )
    num_chips = pp * cp * tp * data
    schedule = plan.schedule if pp > 1 and (virtual > 1 or not plan.schedule.needs_chunks) else "1f1b"
    return make_plan(
        job,
        cluster="localhost",
        num_chips=num_chips,
        pp=pp,
        dp_replicate=degrees["dp_replicate"],
        dp_shard=degrees["dp_shard"],
        cp=cp,
        tp=tp,
        zero=int(plan.zero) if degrees["dp_shard"] * cp > 1 else 0,
        order=plan.order,
        rules=default_rule_sets()[plan.sequence_parallel and tp > 1] if plan.rules in default_rule_sets() else plan.rules,
        micro_batch=micro_batch,
        recompute=str(plan.recompute),
        recompute_operators=plan.recompute_operators,
        schedule=schedule,
        virtual_stages=virtual,
        attention=str(plan.attention),
        profile=plan.profile,
        **folding,
    )
