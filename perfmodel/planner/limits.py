"""Limits of a job: the largest micro-batch and global batch, the longest sequence, the fewest chips that fit.

Each question fixes the given knobs and varies one quantity; the other knobs are searched. Memory rises with the quantity, so a bisection
over its legal values finds the last one with a plan that fits. Each probe is one pass over the space (`sweep`), on a mixed cluster one
search (`MixedPlans`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.cost.estimate import Estimator
from perfmodel.cost.memory.plan import scalar
from perfmodel.cost.mixed import MixedEstimator, memories_of_pools, pools_of
from perfmodel.foundation.bisection import first_index
from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.memory_headroom import memory_rule
from perfmodel.foundation.units import format_bytes
from perfmodel.frameworks.profile import uncertainty_of_memory
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import chips_text, in_proportion
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.layout import divisors
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.planner.mixed import MixedPlans
from perfmodel.planner.search import search
from perfmodel.planner.uniform.search import UniformPlans
from perfmodel.planner.uniform.space import Space
from perfmodel.planner.uniform.sweep import sweep
from perfmodel.planner.uniform.tables import KeptTables
from perfmodel.workload.training import frozen_parameter_bytes, num_trained_parameters

_LARGEST_BATCH = 2**20
_LONGEST_SEQUENCE = 2**30
_SEQUENCE_UNIT = 128
"""Tokens: a longest sequence is a multiple of this, so that degrees of context and sequence parallelism divide it."""
_PRECISION = 64
"""Relative precision of a longest sequence: one part in this number."""
_CHORDS = 12
"""Number of values tried along chords for one plan, before bisection."""
_MOST_PROBES = 24
"""Numbers of chips that are tried one by one before they are doubled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest value (of chips: the smallest) with which some plan fits.

    name            micro_batch, global_batch, seq_len or chips
    value           0: nothing fits at all
    limited_by      memory, positions (the model has no more), batch (the global batch has no larger divisor), cluster, or nothing
    reason          the same as a sentence with numbers
    memory_class    largest memory class at the next value, where memory is the limit
    memory_moment   moment of the step with peak memory at the next value
    prediction      the fastest plan with this value; empty where nothing fits
    """

    name: str
    value: int
    limited_by: str
    reason: str
    memory_class: str = ""
    memory_moment: str = ""
    prediction: tuple[Prediction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One probed value: sequence length and chips (0: those of the job), sequences of a step, and the fixed knobs."""

    global_batch: int
    seq_len: int = 0
    chips: int = 0
    knobs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """Result of one probe.

    fastest   the fastest plan that fits; empty if none does
    least     the plan with the least memory, on a mixed cluster the most probable to fit; empty if there is no plan
    """

    estimator: Estimator
    fastest: tuple[Plan, ...]
    least: tuple[Plan, ...]


@dataclass(slots=True, kw_only=True)
class Prober:
    """Passes over the space of a job on some chips, with a cache of estimators, passes and tables.

    make           makes the estimator for a sequence length and a number of chips
    space          space left by the given knobs, with one order of the axes: memory does not depend on the order
    global_batch   0: not given
    """

    make: Callable[[int, int], Estimator]
    seq_len: int
    chips: int
    global_batch: int
    space: Space
    attention: AttentionKernel
    headroom: float | None
    risk: float | None
    estimators: dict[tuple[int, int], Estimator] = field(default_factory=dict)
    passes: dict[tuple[object, ...], Probe] = field(default_factory=dict)
    tables: dict[int, KeptTables] = field(default_factory=dict)

    @property
    def fixed(self) -> Mapping[str, int | str | bool]:
        """Knobs that are fixed."""
        return self.space.fixed

    def estimator(self, seq_len: int, chips: int, global_batch: int) -> Estimator:
        key = (seq_len, chips)
        if key not in self.estimators:
            self.estimators[key] = self.make(seq_len, chips)
        kept = self.estimators[key]
        return kept.for_job(replace(kept.job, global_batch=global_batch))

    def probe(self, question: Question, guide: Plan | None = None) -> Probe:
        """Sweep the plans with these knobs and the given ones: all that fit, and the one that needs the least memory. Passes are cached.

        guide   one of these plans, known to need little memory: plans that do not fit and surely need more are skipped
        """
        fixed = {**self.fixed, **question.knobs}
        key = (question.seq_len or self.seq_len, question.chips or self.chips, question.global_batch, *sorted(fixed.items()))
        if key not in self.passes:
            space, estimator = replace(self.space, fixed=fixed), self._estimator_of(question)
            if isinstance(estimator, MixedEstimator):
                self.passes[key] = self._searched(estimator, space, question, guide)
            else:
                self.passes[key] = self._swept(estimator, space, question, guide)
        return self.passes[key]

    def _searched(self, estimator: MixedEstimator, space: Space, question: Question, guide: Plan | None) -> Probe:
        plans = UniformPlans(estimator=estimator, space=space, memory_headroom=self.headroom, risk=self.risk, attention=self.attention)
        result = search(MixedPlans(uniform=plans), top=1)
        fastest = [prediction.plan for prediction in result.plans[:1]]
        nearest = sorted((*result.pareto, *result.least_memory), key=lambda plan: (-plan.fits_probability, plan.memory["total"]))
        least = [prediction.plan for prediction in nearest[:1]]
        # a search may miss the layers of the guide, which were distributed for another value
        if guide is not None and (stretched := self._stretched(guide, question)) is not None and self.spare(guide, question) >= 0.0:
            fastest, least = fastest or [stretched], least or [stretched]
        return Probe(estimator=estimator, fastest=tuple(fastest), least=tuple(least))

    def _swept(self, estimator: Estimator, space: Space, question: Question, guide: Plan | None) -> Probe:
        need = math.inf if guide is None else self.need(guide, question)
        for needless in (math.inf,) if math.isnan(need) else (need, math.inf):
            state = sweep(
                estimator,
                space,
                top=1,
                memory_headroom=self.headroom,
                risk=self.risk,
                attention=self.attention,
                needless=needless,
                kept_tables=self.tables.setdefault(question.chips or self.chips, KeptTables()),
                also=(),
            )
            if len(state.best.least.ids) and state.best.least.values[0] <= needless:
                break  # otherwise the guide was not among these plans
        fastest = state.best.time.ids[: min(1, state.counts.num_feasible)]
        fastest_plans, least_plans = (tuple(state.plan(int(i)) for i in ids) for ids in (fastest, state.best.least.ids[:1]))
        return Probe(estimator=estimator, fastest=fastest_plans, least=least_plans)

    def _estimator_of(self, question: Question) -> Estimator:
        return self.estimator(question.seq_len or self.seq_len, question.chips or self.chips, question.global_batch)

    def need(self, plan: Plan, question: Question) -> float:
        """Return the memory of the plan stretched to the question; nan where that is no plan. [byte]"""
        stretched = self._stretched(plan, question)
        if stretched is None:
            return math.nan
        return max(max(row.total) for _, row in memories_of_pools(self._estimator_of(question), stretched))

    def spare(self, plan: Plan, question: Question) -> float:
        """Return the free memory of the plan stretched to the question, least of all chips; nan where that is no plan. [byte]"""
        stretched = self._stretched(plan, question)
        if stretched is None:
            return math.nan
        rule, free = memory_rule(self.headroom, self.risk), []
        for estimator, row in memories_of_pools(self._estimator_of(question), stretched):
            uncertainty, usable = uncertainty_of_memory(estimator.profile), estimator.machine.memory.usable
            ratio, ranks = rule.ratio(uncertainty), row.needs(stretched, uncertainty)
            left = rule.allowed(usable) - max(rank.total for rank in ranks)
            free.append(scalar(left if ratio is None else min(left, usable - max(rank.at_most(ratio) for rank in ranks))))
        return min(free)

    def _stretched(self, plan: Plan, question: Question) -> Plan | None:
        """Return the plan stretched to the question; None where that is no plan."""
        job = self._estimator_of(question).job
        try:
            return replace(plan, job=job, micro_batch=question.knobs.get("micro_batch", plan.micro_batch))
        except InputError:
            return None

    def fastest(self, state: Probe | None) -> tuple[Prediction, ...]:
        """Return the prediction of the fastest plan of a pass; empty without a pass or a plan that fits."""
        if state is None:
            return ()
        return tuple(state.estimator.predict(plan, memory_headroom=self.headroom, risk=self.risk) for plan in state.fastest)

    def limit(self, name: str, what: str, state: Probe) -> Limit:
        """Return a limit without its value: why nothing fits beyond it, from a pass over the next value."""
        if not state.least:
            reason = f"no plan has {what}: no degrees that were left divide it"
            return Limit(name=name, value=0, limited_by="divisibility", reason=reason)
        least = state.estimator.predict(state.least[0], memory_headroom=self.headroom, risk=self.risk)
        allowed, largest = memory_rule(self.headroom, self.risk).allowed(least.memory_usable), least.largest_memory_class
        lacking = least.memory["total"] - allowed
        much = f"would need {format_bytes(lacking)} more than the {format_bytes(allowed)} that may be used"
        if lacking <= 0:
            much = f"would fit with a probability of only {least.fits_probability:.0%}"
        sentence = f"{what} {much} (mostly {largest.replace('_', ' ')}, {format_bytes(least.memory[largest])})"
        moment = least.memory_moment
        return Limit(name=name, value=0, limited_by="memory", reason=sentence, memory_class=largest, memory_moment=moment)


def largest_micro_batch(prober: Prober) -> Limit:
    """Return the largest micro-batch. Without a global batch, each rank has one microbatch per chip of its replica."""
    batch = prober.global_batch
    values: Sequence[int] = divisors(batch) if batch else range(1, _LARGEST_BATCH + 1)

    def ask(micro: int) -> Question:
        return Question(global_batch=batch or prober.chips * micro, knobs={"micro_batch": micro})

    last, following, state = _last(values, prober, ask)
    value = values[last] if last >= 0 else 0
    if following == len(values):
        reason = f"the global batch of {batch:,} has no larger divisor" if batch else "nothing up to the largest that was tried"
        return Limit(name="micro_batch", value=value, limited_by="batch" if batch else "", reason=reason, prediction=prober.fastest(state))
    limit = prober.limit("micro_batch", f"micro-batch {values[following]:,}", prober.probe(ask(values[following])))
    return replace(limit, value=value, prediction=prober.fastest(state))


def largest_global_batch(prober: Prober) -> Limit:
    """Return the largest batch that a step holds at once: one microbatch per rank, in a pipeline one per stage.

    Larger batches are accumulated and have no limit.
    """
    fixed = prober.fixed
    chips, given = prober.chips, int(fixed.get("micro_batch", 0))
    best, best_state = 0, None
    limit = Limit(name="global_batch", value=0, limited_by="divisibility", reason="no degrees that were left divide the chips")
    pairs = [(pp, dp) for pp in divisors(chips) for dp in divisors(chips // pp) if fixed.get("pp", pp) == pp and fixed.get("dp", dp) == dp]
    for pp, dp in sorted(pairs, key=lambda pair: (pair[0], -pair[1])):

        def ask(micro: int, pp: int = pp, dp: int = dp) -> Question:
            return Question(global_batch=pp * dp * micro, knobs={"micro_batch": micro, "pp": pp, "dp": dp})

        least = given or best // (pp * dp) + 1  # a smaller one does not exceed the best so far
        if least * pp * dp <= best:
            continue
        first = prober.probe(ask(least))
        if not first.fastest:
            if not best and first.least:
                limit = prober.limit(limit.name, f"a step of {pp * dp * least:,} sequences at once", first)
            continue
        values = [given] if given else range(least, _LARGEST_BATCH + 1)
        last, _, state = _last(values, prober, ask, first=first)
        best, best_state = values[last] * pp * dp, state
        following = values[last] + 1
        limit = prober.limit(limit.name, f"a step of {following * pp * dp:,} sequences at once", prober.probe(ask(following)))
    more = "; more than these are accumulated, without a limit" if best else ""
    return replace(limit, value=best, reason=limit.reason + more, prediction=prober.fastest(best_state))


def longest_sequence(prober: Prober) -> Limit:
    """Return the longest sequence in tokens, to one part in 64; one sequence per pass unless a micro-batch is given."""
    micro = int(prober.fixed.get("micro_batch", 1))
    batch = prober.global_batch or prober.chips * micro
    unit = math.lcm(_SEQUENCE_UNIT, prober.chips)
    unit = unit if unit <= _SEQUENCE_UNIT**2 else _SEQUENCE_UNIT

    def ask(units: int) -> Question:
        return Question(seq_len=units * unit, global_batch=batch, knobs={"micro_batch": micro})

    model = prober.estimator(prober.seq_len, prober.chips, batch).job.transformer
    positions = model.positions.max_position_embeddings
    at_positions = prober.probe(Question(seq_len=positions, global_batch=batch, knobs={"micro_batch": micro}))
    if at_positions.fastest and model.positions.position == "learned":
        reason = f"the model has learned {positions:,}"
        return Limit(name="seq_len", value=positions, limited_by="positions", reason=reason, prediction=prober.fastest(at_positions))
    end = _LONGEST_SEQUENCE if at_positions.fastest else positions
    values = range(1, max(end // unit, 1) + 1)
    start = (positions if at_positions.fastest else min(prober.seq_len, positions)) // unit - 1
    last, following, state = _last(values, prober, ask, start=min(max(start, 0), len(values) - 1), precision=_PRECISION)
    value = values[last] * unit if last >= 0 else 0
    if at_positions.fastest:
        more = f"; memory alone would allow {value:,}" if value > positions else ""
        reason = f"the model has {positions:,}{more}"
        return Limit(name="seq_len", value=positions, limited_by="positions", reason=reason, prediction=prober.fastest(at_positions))
    beyond, too_much = (
        (values[following] * unit, prober.probe(ask(values[following]))) if following < len(values) else (positions, at_positions)
    )
    return replace(prober.limit("seq_len", f"a sequence of {beyond:,}", too_much), value=value, prediction=prober.fastest(state))


def fewest_chips(prober: Prober, candidates: Sequence[int]) -> Limit:
    """Return the smallest number of chips, among those possible on the cluster, with a plan that fits.

    Some numbers have no plan because degrees must divide the model. So numbers are tried one by one, from the fewest chips that could hold
    weights and optimizer state. If that takes too long, they are doubled and bisected.
    """
    micro = int(prober.fixed.get("micro_batch", 1))
    given = math.prod(int(prober.fixed.get(axis, 1)) for axis in ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp"))
    states: dict[int, Probe] = {}

    def probe(chips: int) -> Probe:
        if chips not in states:
            question = Question(chips=chips, global_batch=prober.global_batch or chips * micro, knobs={"micro_batch": micro})
            states[chips] = prober.probe(question)
        return states[chips]

    estimator = prober.estimator(prober.seq_len, candidates[0], prober.global_batch or micro)
    pools = pools_of(estimator)
    usable = sum(pool.machine.memory.usable * pool.cluster.num_chips for pool in pools) / estimator.cluster.num_chips
    job, sizes = estimator.job, estimator.programs.sizes
    frozen = frozen_parameter_bytes(job.transformer, job.train, itemsize(job.policy.parameter))
    trained = num_trained_parameters(job.transformer, job.train) * (sizes.stored + sizes.optimizer.state)
    least = (frozen + trained) / memory_rule(prober.headroom, prober.risk).allowed(usable)
    possible = [count for count in candidates if count >= least and count % given == 0]
    fewest = next((count for count in possible[:_MOST_PROBES] if probe(count).fastest), 0)
    rest = possible[_MOST_PROBES:]
    if not fewest and rest:
        index = first_index(len(rest), lambda index: bool(probe(rest[index]).fastest))
        fewest = 0 if index is None else rest[index]
    if not fewest:
        tried = [states[count] for count in sorted(states) if states[count].least]
        if not tried:
            return Limit(name="chips", value=0, limited_by="divisibility", reason="no such plan")
        return prober.limit("chips", _chips_text(states[max(states)]), tried[-1])
    fewer = [count for count in candidates if count < fewest]
    if not fewer:
        fastest = prober.fastest(probe(fewest))
        reason = "one chip is enough" if fewest == 1 else f"{_chips_text(probe(fewest))} are enough, and fewer cannot keep the proportions"
        return Limit(name="chips", value=fewest, limited_by="cluster", reason=reason, prediction=fastest)
    less = next((probe(count) for count in reversed(fewer) if count % given == 0 and probe(count).least), probe(fewer[-1]))
    limit, state = prober.limit("chips", _chips_text(less), less), probe(fewest)
    kept = f"; {_chips_text(state)} are the fewest in the same proportions" if state.estimator.cluster.pools else ""
    return replace(limit, value=fewest, reason=limit.reason + kept, prediction=prober.fastest(state))


def _chips_text(state: Probe) -> str:
    cluster = state.estimator.cluster
    return chips_text(cluster.num_chips) + (f" ({cluster.name})" if cluster.pools else "")


def chip_counts(estimator: Estimator) -> list[int]:
    """Return the numbers of chips that are possible on the cluster, in order: parts of a node, then whole nodes; of pools in proportion."""
    cluster = estimator.cluster
    counts = []
    candidates: Sequence[int] = (*range(1, node := cluster.chips_per_node), *range(node, cluster.max_chips + 1, node))
    if cluster.pools:
        part = cluster.num_chips // math.gcd(*(pool.num_chips for pool in cluster.pools))
        most = max(cluster.num_chips, min(pool.max_chips for pool in cluster.pools))
        candidates = [count for count in range(part, most + 1, part) if _has_whole_nodes(cluster, count)]
    for count in candidates:
        try:
            in_proportion(cluster, count)
        except InputError:
            continue
        counts.append(count)
    return counts


def _has_whole_nodes(cluster: Cluster, num_chips: int) -> bool:
    """Return whether the pools of this number of chips, in proportion, are parts of one node or whole nodes."""
    counts = ((pool.num_chips * num_chips // cluster.num_chips, pool.chips_per_node) for pool in cluster.pools)
    return all(count <= node or count % node == 0 for count, node in counts)


def _last(
    values: Sequence[int],
    prober: Prober,
    ask: Callable[[int], Question],
    *,
    first: Probe | None = None,
    start: int = 0,
    precision: int = 0,
) -> tuple[int, int, Probe | None]:
    """Return the last index whose value has a plan that fits, the first index known to be too large, and the pass of the former.

    The indices are -1 and len(values) where there is none. Passes over the space are expensive, single plans are not. So the plan with the
    least memory is stretched alone as far as it fits, and a pass then checks whether any other plan goes further.

    first       pass of the first value, which fits
    precision   0: the two indices are adjacent; else they may be one part in this number apart
    """
    low, high, index = -1, len(values), 0 if first is not None else start
    probed = first if first is not None else prober.probe(ask(values[index]))
    state, held = first, None
    while True:
        guide = probed.least[0] if probed.least else None
        if probed.fastest:
            low, state = index, probed
        else:
            high = index
        if guide is not None:
            furthest = _stretched(guide, values, prober, ask, low=low, high=high)
            low, state, held = (furthest, None, guide) if furthest > low else (low, state, held)
        step = max((low + 1) // precision, 1) if precision else 1
        if high - low <= step:
            break
        index = low + step if guide is not None else (low + high) // 2
        probed = prober.probe(ask(values[index]), guide)
    if state is None and low >= 0:
        state = prober.probe(ask(values[low]), held)
    return low, high, state


def _stretched(plan: Plan, values: Sequence[int], prober: Prober, ask: Callable[[int], Question], *, low: int, high: int) -> int:
    """Return the last index between `low` (known to fit) and `high` with which this plan alone fits.

    Its free memory is nearly linear over a range of values, so chords find the index in a few steps.
    """
    known: dict[int, float] = {}

    def spare(index: int) -> float:
        if index not in known:
            known[index] = prober.spare(plan, ask(values[index]))
        return known[index]

    if low + 1 >= high or not spare(low + 1) >= 0.0:
        return low
    start, end = low, high
    if isinstance(values, range):
        low, index = start + 1, 2 * start + 3
        while high - low > 1 and not math.isnan(spare(index := min(max(index, low + 1), high - 1))):
            low, high = (index, high) if spare(index) >= 0.0 else (low, index)
            index = _chord(known, low, high) if len(known) < _CHORDS else (low + high) // 2
        if high - low <= 1:
            return low
    low, high, step = start, end, 1
    while low + step < high and spare(low + step) >= 0.0:
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spare(middle) >= 0.0 else (low, middle)
    return low


def _chord(known: Mapping[int, float], low: int, high: int) -> int:
    """Return the index where the line through the known values at `low` and at the nearest other known index is zero."""
    other = high if high in known else max((index for index in known if index < low), default=low)
    fall = (known[low] - known[other]) / (other - low) if other != low else 0.0
    return low + int(min(known[low] / fall, 2.0**40)) if fall > 0.0 else (low + high) // 2
