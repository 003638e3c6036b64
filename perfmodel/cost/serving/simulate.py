"""Simulation of a served load, event by event: an engine, or prefill and decode workers, beyond the closed forms.

Deterministic: the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.disaggregated import Handover, TwoPools
from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.simulated_engine import MOST_TOKENS, BatchLimits, DrawnRequest, SimulatedEngine
from perfmodel.cost.serving.simulated_metrics import Answer, RunRecord, StoppingRule
from perfmodel.cost.serving.times import ServingTimes, StepTable, tabulate
from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import bad_field

#: Random numbers drawn at a time.
_DRAWS = 1024
#: Least number of requests in a stratified block of a run with a stopping rule.
_LEAST_BLOCK = 1024
#: Requests of each client in a closed loop from an idle engine, as in benchmarks (InferenceMAX: --num-prompts=$((CONC * 10))).
ROUNDS = 10
#: Share by which answers of one length end earlier or later with chunked prompts. Published runs of vLLM and TensorRT-LLM with one length
#: show no waves: with this spread their TTFT is predicted without bias, without it twice too long. Engines that run prompts first have
#: waves (SGLang's runs), and no spread.
SPREAD_OF_ENDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Load of a run, and its length. Raises InputError.

    concurrency   clients, each of which sends its next request when the previous one is answered; all start at once
    rate          requests a second with Poisson arrivals instead
    answered      requests that complete after the warm-up; 0: `ROUNDS` a client, 1000 at a rate
    warm_up       requests that complete before; none of clients and 200 at a rate if not given
    stopping      at a rate: the run continues after `answered` requests until the rule holds
    seed          of the drawn requests
    """

    concurrency: int | None = None
    rate: float | None = None
    answered: int = 0
    warm_up: int | None = None
    stopping: StoppingRule | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise bad_field("concurrency", self.concurrency, "one of concurrency and rate must be given", "give one of them")

    @property
    def num_before(self) -> int:
        """Requests of the warm-up."""
        return self.warm_up if self.warm_up is not None else 200 if self.concurrency is None else 0

    @property
    def num_answered(self) -> int:
        """Requests after the warm-up."""
        return self.answered or (1000 if self.concurrency is None else ROUNDS * self.concurrency)

    def most_running(self, slots: int) -> int:
        """Return the largest number of sequences that run at once in this number of slots."""
        return slots if self.concurrency is None else min(slots, self.concurrency)


def run_engine(table: StepTable, requests: Requests, scheduling: Scheduling, batch_limits: BatchLimits, benchmark: Benchmark) -> RunRecord:
    """Run an engine.

    table           of `table_of`

    The queue is first come, first served. The share of requests in lockstep is a result, not an input. Raises InputError.
    """
    if batch_limits.max_sequences < 1:
        raise bad_field("max_sequences", batch_limits.max_sequences, "must be at least 1")
    longest = requests.prompt.most + requests.output.most
    if batch_limits.cache_tokens < np.ceil(longest / batch_limits.block_tokens) * batch_limits.block_tokens:
        raise bad_field(
            "cache_tokens", batch_limits.cache_tokens, f"must hold one request of {longest} tokens", "use a plan with more room"
        )
    run = _Run(requests, scheduling, benchmark)
    limits = replace(batch_limits, max_sequences=benchmark.most_running(batch_limits.max_sequences))
    engine = SimulatedEngine(table, scheduling, limits, run.queue, run.gaps, chunked=bool(scheduling.chunked))
    return run.record([engine], [engine])


def table_of(times: ServingTimes, requests: Requests, scheduling: Scheduling, batch_limits: BatchLimits, benchmark: Benchmark) -> StepTable:
    """Return the step times that a run looks up."""
    most = benchmark.most_running(batch_limits.max_sequences)
    longest = float(requests.prompt.most + requests.output.most)
    return tabulate(
        times,
        sequences=most,
        cached=(float(requests.prompt.least), longest),
        tokens=min(float(scheduling.step_tokens), MOST_TOKENS, most * longest),
        keys=longest,
        rows_per_step=float(scheduling.rows_per_step),
    )


def run_pools(pools: TwoPools, requests: Requests, benchmark: Benchmark) -> RunRecord:
    """Run prefill and decode workers under a load of all of them. Raises InputError.

    One queue for all prefill workers, first come, first served: a worker takes the prompts that fit into the tokens of a step, and at
    least `prompts_together` if they wait. Caches are sent one after another over a worker's links, V / B each. A request joins the
    decode worker with the fewest sequences, at the border of a step. Its first token is observed when it has a slot, as in `disaggregated`.
    """
    if _one(pools.capacity) < 1:
        raise bad_field("capacity", pools.capacity, "must be at least 1", "use a decode worker with more room")
    longest, together = float(requests.prompt.most + requests.output.most), int(_one(pools.prefill_scheduling.prompts_together))
    cached, rows = (float(requests.prompt.least), longest), float(pools.scheduling.rows_per_step)
    of_prompts = replace(
        pools.prefill_scheduling, step_tokens=_one(pools.prefill_scheduling.step_tokens), rows_per_step=1.0, tokens_per_step=1.0
    )
    tokens = max(min(float(of_prompts.step_tokens), MOST_TOKENS), float(together * requests.prompt.most))
    prompts = tabulate(pools.prefill, sequences=1, cached=cached, tokens=tokens, keys=longest)
    most = benchmark.most_running(int(_one(pools.capacity)))
    answers = tabulate(pools.decode, sequences=most, cached=cached, tokens=2.0, keys=longest, rows_per_step=rows)
    run = _Run(requests, pools.scheduling, benchmark, pools.handover)
    everything, slots = BatchLimits(max_sequences=2**62), BatchLimits(max_sequences=int(_one(pools.capacity)))
    alone = replace(pools.scheduling, step_tokens=1.0)
    return run.record(
        [
            SimulatedEngine(prompts, of_prompts, everything, run.queue, run.gaps, chunked=False, whole_prompts=together)
            for _ in range(int(_one(pools.prefill_workers)))
        ],
        [SimulatedEngine(answers, alone, slots, deque(), run.gaps, chunked=False) for _ in range(int(_one(pools.decode_workers)))],
    )


def _one(value: Column) -> float:
    """Return the value of the simulated plan."""
    return float(np.ravel(value)[0])


class _Run:
    """State of a run; events happen in the order of their times.

    handover   of the cache from prefill to decode workers; None: an engine does both
    """

    def __init__(self, requests: Requests, scheduling: Scheduling, benchmark: Benchmark, handover: Handover | None = None) -> None:
        self.lengths, self.benchmark, self.handover = requests.output, benchmark, handover
        self.front, self.border = float(scheduling.first_token_time), float(scheduling.border_steps)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_scheduled = self.num_sent = 0
        self.now = self.area_running = self.area_queue = 0.0
        self.queue: deque[DrawnRequest] = deque()
        self.transferred: deque[DrawnRequest] = deque()
        self.engines: list[SimulatedEngine] = []
        self.decoding: Sequence[SimulatedEngine] = ()
        self.answers: list[Answer] = []
        self.gaps: list[tuple[float, float]] = []
        has_spread = handover is None and bool(scheduling.chunked) and (benchmark.concurrency or 0) > 1
        self.draws = draws(
            requests,
            benchmark.rate,
            benchmark.seed,
            speculates=float(scheduling.tokens_per_step) > 1,
            spread=SPREAD_OF_ENDS if has_spread else 0.0,
            block=0 if benchmark.stopping is None else max(benchmark.num_before + benchmark.num_answered, _LEAST_BLOCK),
        )

    def record(self, prefilling: Sequence[SimulatedEngine], decoding: Sequence[SimulatedEngine]) -> RunRecord:
        """Run the engines, and return the record."""
        benchmark = self.benchmark
        self.decoding, self.engines = decoding, list(dict.fromkeys((*prefilling, *decoding)))
        for _ in range(benchmark.concurrency or 1):
            self._send(0.0)
        self._until(benchmark.num_before)
        start, first = self.now, len(self.answers)
        self.gaps.clear()
        self.area_running = self.area_queue = 0.0
        self._until(benchmark.num_before + benchmark.num_answered)
        while benchmark.stopping is not None and (more := benchmark.stopping.missing(self.answers[first:])):
            self._until(len(self.answers) + more)
        return RunRecord(
            answers=self.answers[first:],
            gaps=self.gaps,
            elapsed=self.now - start,
            area_running=self.area_running,
            area_queue=self.area_queue,
            preemptions=sum(engine.preemptions for engine in self.engines),
            steps=sum(engine.steps for engine in decoding),
            clients=benchmark.concurrency or 0,
        )

    def _until(self, answered: int) -> None:
        while len(self.answers) < answered:
            at = self.events[0][0]
            self.area_running += (at - self.now) * sum(engine.num_requests for engine in self.decoding)
            self.area_queue += (at - self.now) * (len(self.queue) + len(self.transferred))
            self.now = at
            while self.events and self.events[0][0] <= self.now:
                _, _, action, arguments = heappop(self.events)
                action(*arguments)
            while self.transferred:  # to the decode worker with the fewest requests
                engine = min(self.decoding, key=lambda candidate: candidate.num_requests)
                if engine.num_requests >= engine.slots:
                    break
                request = self.transferred.popleft()
                engine.join(request, self.now)
                if request.output <= 1:
                    engine.joining.pop()
                    self._answered(request, engine)
            until = self.events[0][0] if self.events else float("inf")
            if len(self.engines) > 1:  # steps of others may end earlier
                until = self.now
            for engine in self.engines:
                if not engine.is_stepping and (taken := engine.begin(self.now, until)):
                    self._at(self.now + taken, self._end, engine)

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        self.num_scheduled += 1
        heappush(self.events, (time, self.num_scheduled, action, arguments))

    def _send(self, at: float) -> None:
        """Send a client's next request; it reaches the queue after the engine's API server has processed it.

        In a closed loop that takes a random time with the given mean. Clients observe the mean, which avoids noise in short runs.
        """
        cached, new, output, rounding, delay, share = next(self.draws)
        sent = at if self.benchmark.rate is None else at + delay
        due = sent + share * self.front
        self._at(due, self._arrive, DrawnRequest(self.num_sent, due - self.front, cached, new, output, rounding))
        self.num_sent += 1

    def _arrive(self, request: DrawnRequest) -> None:
        self.queue.append(request)
        if self.benchmark.rate is not None:
            self._send(request.sent)

    def _end(self, engine: SimulatedEngine) -> None:
        """End a step of an engine: answers are complete, prompts are prefilled."""
        answered, prefilled = engine.end(self.now)
        for request in answered:
            engine.release(request)
            self._answered(request, engine)
        for request in prefilled:
            if (handover := self.handover) is not None:
                # caches are sent one after another; all layers but the last may be sent during the prefill
                layers, sending = _one(handover.layers), _one(handover.token_bytes) * request.cached / _one(handover.bandwidth)
                begun = max(engine.link_free, self.now - (1 - 1 / layers) * (self.now - request.begun))
                engine.link_free = max(begun + sending, self.now + sending / layers)
                self.engines.sort(key=lambda other: other.link_free)  # the next prompt goes to the free worker whose links are free first
                self._at(engine.link_free + _one(handover.latency), self.transferred.append, request)
                continue
            if request.first < 0:
                request.first = self.now
            else:  # recomputed after a preemption
                self.gaps.append((self.now - request.last, 1))
            if not engine.start(request, self.now):
                self._answered(request, engine)

    def _answered(self, request: DrawnRequest, engine: SimulatedEngine) -> None:
        """Record a completed request, and send the client's next one."""
        late = self.border * engine.table.decode(max(len(engine.running), 1), engine.table.cached[0]) if self.border else 0.0
        ttft = request.first - request.sent + late
        tpot = (self.now - request.first) / max(request.output - 1, 1)
        wanted = min(max(request.output, self.lengths.least), self.lengths.most)  # the spread of ends does not change the answer's length
        self.answers.append((ttft, tpot, ttft + (wanted - 1) * tpot, wanted))
        if self.benchmark.rate is None:
            self._send(self.now + late)


def draws(
    requests: Requests,
    rate: float | None,
    seed: int,
    *,
    speculates: bool,
    spread: float = 0.0,
    block: int = 0,
) -> Iterator[tuple[float, float, int, float, float, float]]:
    """Yield random requests without end.

    Each is (cached prompt tokens, new prompt tokens, output tokens, a number in 0..1 that rounds its decode steps, the delay after the
    previous request, the ratio of the API server's time to its mean: exponentially distributed for clients, 1 at a rate).

    spread  answers are shorter and longer than their mean by at least this share
    block   requests at a rate that are stratified together, so that the load is the requested one; 0: independent draws   [-]
            The last one arrives on time, as vLLM's benchmark rescales its delays. Lengths are a Latin hypercube
    """
    random = np.random.default_rng(seed)
    found_fraction = float(requests.found_fraction)
    wide = round(spread * requests.output.mean)
    least = max(min(requests.output.least, int(np.ceil(requests.output.mean)) - wide), 1)
    most = max(requests.output.most, int(requests.output.mean) + wide)
    number = block or _DRAWS

    def draw(least: int, most: int) -> NDArray[np.int64]:
        """Draw whole numbers from `least` to `most`: each equally likely, or one from each of equal parts of the range in random order."""
        if not block:
            return random.integers(least, most + 1, number)
        return np.asarray(least + (random.permutation(number) + random.random(number)) * ((most - least + 1) / number), dtype=np.int64)

    while True:
        prompts = draw(requests.prompt.least, requests.prompt.most)
        outputs = draw(least, most)
        gaps = random.exponential(1 / rate, number) if rate is not None else np.zeros(number)
        if block and rate is not None:
            gaps *= number / rate / gaps.sum()
        rounding = random.random(number) if speculates else np.zeros(number)
        fronts = random.exponential(1.0, number) if rate is None else np.ones(number)
        new = np.maximum(prompts * (1 - found_fraction), 1.0)
        columns = (prompts - new, new, outputs, rounding, gaps, fronts)
        yield from zip(*(column.tolist() for column in columns), strict=True)
