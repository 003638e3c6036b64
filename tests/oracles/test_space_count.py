"""The number of plans, counted by a naive loop over docs/space.md and by validating every combination of knobs one by one."""

import itertools
from math import gcd

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.rules import load_rule_set
from perfmodel.parallel.choices import USUAL_DISPATCHERS, AttentionKernel, Dispatcher
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import make_plan
from perfmodel.planner.uniform.space import SEARCHED_ORDERS, Space
from perfmodel.workload.layer_specs import Experts
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all
from tests.marks import NIGHTLY, mostly_nightly
from tests.planner.searches import search_plans

#: docs/space.md, "Orders", written down again.
ORDERS = [
    "tp cp dp_shard dp_replicate pp",
    "tp cp pp dp_shard dp_replicate",
    "tp cp dp_shard pp dp_replicate",
    "tp cp dp_replicate dp_shard pp",
    "cp tp dp_shard dp_replicate pp",
    "tp dp_shard dp_replicate cp pp",
]


def divides(number, of):
    return of % number == 0


def layouts(chips):
    """All (pp, dp_replicate, dp_shard, cp, tp) whose product is the number of chips."""
    numbers = [n for n in range(1, chips + 1) if divides(n, chips)]
    for pp, tp, cp, shard in itertools.product(numbers, repeat=4):
        if divides(pp * tp * cp * shard, chips):
            yield pp, chips // (pp * tp * cp * shard), shard, cp, tp


def evenly_split(count, stages):
    """Return layers assigned one by one: to all stages while that is even, then to the inner ones, the first and the last."""
    layers = [count // stages] * stages
    for stage in ([*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0])[: count % stages]:
        layers[stage] += 1
    return layers


def splits(model, pp, virtual):
    """docs/space.md, "Pipelines": the ways in which the layers lie on pp * virtual stages."""
    layers, stages = model.num_hidden_layers, pp * virtual
    if stages > layers + 2:
        return []
    even = evenly_split(layers, stages)
    if stages < 2 or stages > layers:
        return [even]
    shorter = evenly_split(layers + 2, stages)
    shorter[0] -= 1
    shorter[-1] -= 1
    a, b = ([sum(split[rank::pp]) for rank in range(pp)] for split in (even, shorter))
    fewer_at_an_end = b[0] < a[0] or b[-1] < a[-1]
    heavy_head = model.vocab_size * model.hidden_size > model.num_layer_parameters
    return [even, shorter] if fewer_at_an_end and (max(b) <= max(a) or heavy_head) else [even]


def count_plans(job, chips, orders=ORDERS, unfused=False, rules=("megatron", "megatron-sp")):
    """docs/space.md as nested loops."""
    model, batch, seq_len = job.model, job.global_batch, job.seq_len
    layers = model.num_hidden_layers
    total = 0
    for pp, replicate, shard, cp, tp in layouts(chips):
        num_rules = len(rule_sets_of(rules, model, seq_len, cp, tp))
        if pp > layers + 2 or not num_rules or not divides(replicate * shard, batch):
            continue
        degree = {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
        num_orders = len({tuple(axis for axis in order.split() if degree[axis] > 1) for order in orders})
        num_zero = 1 if shard * cp == 1 else 4 if shard == 1 else 3
        num_recompute = 3 if unfused else 2
        num_splits = {virtual: len(splits(model, pp, virtual)) for virtual in range(1, (layers + 2) // pp + 1)}
        num_pipelines = 0
        per_rank = batch // (replicate * shard)
        for micro in range(1, per_rank + 1):
            if not divides(micro, per_rank):
                continue
            microbatches = per_rank // micro
            num_pipelines += num_splits[1]  # 1f1b
            if pp > 1 and microbatches > 1:
                num_pipelines += num_splits[1]  # gpipe
            if pp > 1 and divides(pp, microbatches):
                num_pipelines += sum(num_splits[virtual] for virtual in num_splits if virtual > 1)
        total += num_orders * num_rules * num_zero * num_recompute * num_pipelines
    return total


def rule_sets_of(names, model, seq_len, cp, tp):
    """docs/space.md, "Rules": those of the named ones that admit these degrees, less those that cut as an earlier one does."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    by_tp = divides(tp, heads) and divides(tp, model.intermediate_size) and (divides(tp, kv) or divides(kv, tp)) and divides(cp, seq_len)
    admits = {
        "ddp": tp == cp == 1,
        "megatron": by_tp,
        "megatron-sp": by_tp and divides(cp * tp, seq_len),
        "ulysses": tp == 1 and divides(cp, kv) and divides(cp, seq_len),
        "megatron-ulysses": by_tp and divides(cp * tp, seq_len) and divides(gcd(tp, kv) * cp, kv),
    }
    # with one rank of tp nothing is left of sequence parallelism; with one of both axes nothing but the batch is cut
    alike = {"megatron-sp": "megatron-sp" if tp > 1 else "megatron", "megatron-ulysses": "megatron-ulysses" if tp > 1 else "ulysses"}
    alike |= {} if cp > 1 else {"megatron-ulysses": alike["megatron-sp"], "ulysses": "megatron"}
    return {"megatron" if cp == tp == 1 else alike.get(name, name) for name in names if admits[name]}


SMALL = {
    "gpt2, 16 chips": (make_job(batch=16), 16),
    "one chip": (make_job(batch=6), 1),
    "24 chips, 12 layers": (make_job(make_model(num_hidden_layers=12, intermediate_size=1536), batch=36), 24),
    "grouped heads, tied": (make_job(make_model(**LLAMA_LIKE | {"tie_word_embeddings": True}), batch=8), 32),
    "multi-query": (make_job(make_model(**LLAMA_LIKE | {"num_key_value_heads": 1}), batch=12), 12),
    "odd sequence": (make_job(batch=4, seq_len=250), 8),
    "prime layers": (make_job(make_model(num_hidden_layers=7), batch=8), 16),
    "six heads": (make_job(make_model(num_attention_heads=6, num_key_value_heads=6, hidden_size=384), batch=8, seq_len=96), 24),
    "layers that no power of two divides": (make_job(make_model(num_hidden_layers=21), batch=8), 16),
    "a light head": (make_job(make_model(num_hidden_layers=14, hidden_size=512, vocab_size=100), batch=8), 32),
    "a heavy head": (make_job(make_model(num_hidden_layers=14, vocab_size=40000), batch=8), 32),
    "batch of one": (make_job(batch=1), 16),
}


@pytest.mark.parametrize("job, chips", SMALL.values(), ids=SMALL)
@pytest.mark.slow
def test_number_of_plans(job, chips):
    assert [" ".join(order) for order in SEARCHED_ORDERS] == ORDERS
    result = search_plans(estimator_of(job, chips=chips), top=1, also=("front",))
    assert result.num_evaluated == count_plans(job, chips)
    assert sum(result.rejected.values()) + result.num_feasible == result.num_evaluated


#: Each set of rules, with each of these jobs once.
RULES = [("ulysses",), ("ddp",), ("megatron-sp", "ulysses"), ("ulysses", "megatron-ulysses", "megatron"),
         ("ddp", "megatron", "megatron-sp", "ulysses", "megatron-ulysses")]  # fmt: skip
JOBS = ["gpt2, 16 chips", "grouped heads, tied", "odd sequence", "six heads"]
KEPT = [*zip(RULES, itertools.cycle(JOBS), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("names, name", mostly_nightly(itertools.product(RULES, JOBS), KEPT))
def test_number_of_plans_with_rules_as_a_knob(names, name):
    job, chips = SMALL[name]
    space = Space(rules=tuple(load_rule_set(name) for name in names))
    result = search_plans(estimator_of(job, chips=chips), space, top=1, also=("front",))
    assert result.num_evaluated == count_plans(job, chips, rules=names)


def test_unfused_attention_may_be_recomputed_alone():
    job, chips = SMALL["gpt2, 16 chips"]
    unfused = search_plans(estimator_of(job, chips=chips), top=1, also=("front",), attention=AttentionKernel.UNFUSED)
    assert unfused.num_evaluated == count_plans(job, chips, unfused=True) == count_plans(job, chips) * 3 // 2


@pytest.mark.slow
@pytest.mark.parametrize("chips, batch, plans", [(512, 512, 2_737_166), pytest.param(4096, 1536, 8_711_898, marks=NIGHTLY)])
def test_number_of_plans_of_gpt3(chips, batch, plans):
    from perfmodel.workload.models import load_model

    job = make_job(load_model("gpt3-175b"), batch=batch, seq_len=2048)
    result = search_plans(estimator_of(job, chips=chips, node=8), top=1, also=("front",))
    assert result.num_evaluated == count_plans(job, chips) == plans


def test_number_of_layouts_left_out():
    job, chips = SMALL["24 chips, 12 layers"]
    result = search_plans(estimator_of(job, chips=chips), top=1, also=("front",))
    model = job.model

    def admitted(pp, replicate, shard, cp, tp):
        return (
            pp <= model.num_hidden_layers + 2
            and divides(tp, model.num_attention_heads)
            and divides(tp, model.intermediate_size)
            and divides(cp, job.seq_len)
            and divides(replicate * shard, job.global_batch)
        )

    assert sum(result.left_out.values()) == sum(1 for layout in layouts(chips) if not admitted(*layout))


# --- every combination of knobs, one by one -----------------------------------------------------------------------


def canonical(plan):
    """Return the identity of a plan: its knobs, and its present axes in their sequence."""
    layout = plan.layout
    present = tuple(axis for axis in plan.order if layout.degree(axis) > 1)
    schedule = "1f1b" if plan.num_microbatches == 1 and plan.virtual_stages == 1 else plan.schedule
    schedule = schedule if layout.pp > 1 else "1f1b"
    return (
        layout, present, plan.sequence_parallel, plan.zero, plan.micro_batch, plan.recompute, schedule, plan.virtual_stages,
        plan.stage_layers,
    )  # fmt: skip


def every_valid_plan(job, chips, orders):
    """All knobs over all small values; what make_plan refuses is no plan. Of splits of the layers those of docs/space.md."""
    plans = set()
    knobs = itertools.product(
        layouts(chips), orders, (False, True), (0, 1, 2, 3), range(1, job.global_batch + 1), ("none", "full"),
        (("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("1f1b", 2), *(("interleaved", v) for v in range(2, 9))),
    )  # fmt: skip
    for (pp, replicate, shard, cp, tp), order, sequence_parallel, zero, micro, recompute, (schedule, virtual) in knobs:
        if job.global_batch % (replicate * shard * micro):
            continue  # refused for the same reason, only faster
        for stage_layers in splits(job.model, pp, virtual):
            try:
                plan = make_plan(
                    job, cluster="test", num_chips=chips, pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, order=order,
                    sequence_parallel=sequence_parallel, zero=zero, micro_batch=micro, recompute=recompute, schedule=schedule,
                    virtual_stages=virtual, stage_layers=tuple(stage_layers),
                )  # fmt: skip
            except InputError:
                continue
            plans.add(canonical(plan))
    return plans


@pytest.mark.parametrize("chips, batch, seq_len", [(4, 4, 256), pytest.param(6, 6, 96, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_space_is_exactly_the_valid_plans(chips, batch, seq_len):
    """Nothing valid is left out, nothing occurs twice, and each row is already in canonical form."""
    orders = (SEARCHED_ORDERS[0], SEARCHED_ORDERS[1], SEARCHED_ORDERS[4])
    model = make_model(
        num_hidden_layers=4 if chips == 4 else 7, num_attention_heads=6, num_key_value_heads=6, hidden_size=384, intermediate_size=768,
        vocab_size=100,
    )  # fmt: skip
    job = make_job(model, batch=batch, seq_len=seq_len)
    state = sweep_all(estimator_of(job, chips=chips, node=2), Space(orders=orders))
    rows = [canonical(state.plan(int(i))) for i in state.best.time.ids]
    assert len(rows) == len(set(rows)) == state.counts.num_evaluated
    assert set(rows) == every_valid_plan(job, chips, orders)


@pytest.mark.parametrize("chips, library", [(4, False), (4, True), pytest.param(8, False, marks=pytest.mark.slow)])
def test_the_space_of_experts_is_exactly_the_valid_plans(chips, library):
    """Every way to fold experts over every layout under every ZeRO stage; how tokens reach experts is a choice where some are elsewhere.
    Where there is a library that sends a row once to each place, it takes the place of plain all-to-alls."""
    model = make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=Experts(num_experts=8, top_k=2, width=256))
    job = make_job(model, batch=chips)
    fixed = {"micro_batch": 1, "recompute": "none", "pp": 1, "sequence_parallel": False}
    tried = tuple(Dispatcher) if library else USUAL_DISPATCHERS
    state = sweep_all(estimator_of(job, chips=chips, node=4), Space(orders=(DEFAULT_ORDER,), fixed=fixed, dispatchers=tried))
    rows = [state.plan(int(i)) for i in state.best.time.ids]
    assert len(rows) == len(set(rows)) == state.counts.num_evaluated
    valid = set()
    numbers = [n for n in range(1, chips + 1) if divides(n, chips)]
    for (pp, replicate, shard, cp, tp), zero, ep in itertools.product(layouts(chips), range(4), numbers):
        ways = ("flex" if library else "alltoall", "allgather") if ep > 1 else ("alltoall",)
        for etp, dispatcher in itertools.product({1, tp}, ways):
            knobs = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, "zero": zero, "ep": ep, "etp": etp}
            try:
                if pp == 1:
                    valid.add(
                        make_plan(
                            job, cluster="test", num_chips=chips, dispatcher=dispatcher, sequence_parallel=False, profile="ideal", **knobs
                        )
                    )
            except InputError:
                continue
    assert {_placement(plan) for plan in rows} == {_placement(plan) for plan in valid}
    assert len(rows) == len(valid)


def _placement(plan):
    return plan.layout, plan.zero, plan.ep, plan.etp, plan.dispatcher


# --- fixed and bounded knobs --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "space",
    [
        Space(fixed={"tp": 4}),
        Space(fixed={"pp": 2, "schedule": "1f1b"}),
        Space(fixed={"zero": 3, "sequence_parallel": True}),
        Space(fixed={"micro_batch": 2, "recompute": "full"}),
        Space(fixed={"virtual_stages": 2}),
        Space(maximum={"tp": 2, "pp": 4, "cp": 1}),
        Space(maximum={"micro_batch": 2, "virtual_stages": 1, "dp_shard": 4, "zero": 2}),
        Space(fixed={"tp": 3}),
    ],
    ids=lambda space: "-".join(f"{knob}={value}" for knob, value in (*space.fixed.items(), *space.maximum.items())),
)
def test_a_narrower_space_is_the_part_of_the_whole_one(space):
    estimator = estimator_of(make_job(batch=8), chips=8)
    full, part = sweep_all(estimator), sweep_all(estimator, space)

    def admitted(plan):
        layout = plan.layout
        knobs = {
            "pp": layout.pp, "tp": layout.tp, "cp": layout.cp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard,
            "zero": int(plan.zero), "sequence_parallel": plan.sequence_parallel, "micro_batch": plan.micro_batch,
            "recompute": str(plan.recompute), "schedule": str(plan.schedule), "virtual_stages": plan.virtual_stages,
        }  # fmt: skip
        fixed = all(knobs[knob] == value for knob, value in space.fixed.items())
        return fixed and all(knobs[knob] <= value for knob, value in space.maximum.items())

    expected = {plan for plan in map(full.plan, full.best.time.ids.tolist()) if admitted(plan)}
    plans = [part.plan(i) for i in part.best.time.ids.tolist()]
    assert len(plans) == part.counts.num_evaluated == len(expected)
    assert set(plans) == expected


def test_an_unknown_knob_is_refused():
    with pytest.raises(InputError, match="knob=tq: not in the space; did you mean 'tp'"):
        Space(fixed={"tq": 2})
