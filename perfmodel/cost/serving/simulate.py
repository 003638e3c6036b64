"""Step-by-step simulation of an engine: continuous batching of requests with different lengths and arrivals, beyond the closed forms.

One pass of the loop is one step of the engine; its time comes from a table. Deterministic: the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.times import Array, ServingTimes, StepTable, tabulate
from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.serving.prediction import Spread

#: TTFT, TPOT, latency [s] and tokens of a completed request.
Answer: TypeAlias = tuple[float, float, float, int]
#: Random numbers drawn at a time.
_DRAWS = 1024
#: Least number of requests in a stratified block of a run with a stopping rule.
LEAST_BLOCK = 1024
#: Token budget of a step if the engine has none: the end of the table.
MOST_TOKENS = 131_072.0
#: Requests of each client in a closed loop from an idle engine, as in benchmarks (InferenceMAX: --num-prompts=$((CONC * 10))).
ROUNDS = 10
#: Share by which answers of one length end earlier or later with chunked prompts. Published runs of vLLM and TensorRT-LLM with one length
#: show no waves: with this spread their TTFT is predicted without bias, without it twice too long. Engines that run prompts first have
#: waves (SGLang's runs), and no spread.
SPREAD_OF_ENDS = 0.05
#: Batches of a run whose means are compared.
_BATCHES = 20
#: Least growth of a run whose mean is too uncertain.
_LEAST_GROWTH = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Metrics of the requests that completed after the warm-up.

    ttft, tpot, inter_token, request_latency   over requests (inter_token: over all gaps between a sequence's steps) [s]
    running, queue         sequences with a slot and requests without, time average [-]
    requests_per_second, tokens_per_second     completed requests, and output tokens [1/s]
    goodput                requests a second that met all limits [1/s]
    kept_fraction          of the requests that met all limits [-]
    preemptions, steps     in the complete run
    ttft_error             relative standard error of the mean TTFT at a rate; 0 for clients, whose runs match benchmarks [-]
    """

    ttft: Spread
    tpot: Spread
    inter_token: Spread
    request_latency: Spread
    running: float
    queue: float
    requests_per_second: float
    tokens_per_second: float
    goodput: float
    kept_fraction: float
    preemptions: int
    steps: int
    ttft_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """End of a run at a rate: when the relative standard errors of mean TTFT and TPOT are at most `error`, or after `most` requests."""

    error: float
    most: int

    def missing(self, answers: Sequence[Answer]) -> int:
        """Return the number of requests that must still complete. [-]"""
        error, number = max(mean_error([answer[at] for answer in answers]) for at in (0, 1)), len(answers)
        if error <= self.error or number >= self.most:
            return 0
        return int(min(max(number * (error / self.error) ** 2, _LEAST_GROWTH * number), self.most)) - number


def mean_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the mean of a stationary series, by batch means, as neighbours are correlated. [-]

    Source: Law, Simulation Modeling and Analysis, section 9.5.3 (batch means).
    """
    size = max(len(values) // _BATCHES, 1)
    batches = [sum(values[at : at + size]) / size for at in range(0, size * (len(values) // size), size)]
    mean = sum(batches) / max(len(batches), 1)
    if mean <= 0 or len(batches) < 2:
        return 0.0
    variance = sum((batch - mean) ** 2 for batch in batches) / (len(batches) - 1)
    return float((variance / len(batches)) ** 0.5 / mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputLimits:
    """Limits that a request must meet to count as goodput. [s]"""

    ttft: float = float("inf")
    tpot: float = float("inf")
    request_latency: float = float("inf")

    @property
    def are_given(self) -> bool:
        return min(self.ttft, self.tpot, self.request_latency) < float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of the sequences that run at once.

    max_sequences    by the engine's own limit
    cache_tokens     of the cache, counted in blocks of `block_tokens`
    reserves_output  a request is admitted if the cache has space for its whole answer. Otherwise if it has space for its prompt; when the
                     cache is full, the request admitted last is preempted and its prompt and answer are recomputed
    """

    max_sequences: int
    cache_tokens: float = float("inf")
    block_tokens: int = 16
    reserves_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunRecord:
    """A run of one engine after its warm-up.

    answers                    TTFT, TPOT, latency [s] and tokens of each request
    gaps, weights              times between steps [s], and the number of sequences with that gap
    elapsed                    [s]
    area_running, area_queue   sequences times seconds
    preemptions, steps         in the complete run
    clients                    of a closed loop; 0: of an open one
    """

    answers: Sequence[Answer]
    gaps: Sequence[float]
    weights: Sequence[float]
    elapsed: float
    area_running: float
    area_queue: float
    preemptions: int
    steps: int
    clients: int = 0

    @property
    def pace(self) -> float:
        """Requests completed a second: c / E2E of clients that are never idle, as the end of a run leaves partial answers. [1/s]"""
        if not self.clients:
            return len(self.answers) / self.elapsed
        return self.clients * len(self.answers) / sum(latency for _, _, latency, _ in self.answers)

    @property
    def ttft_error(self) -> float:
        """Relative standard error of the mean TTFT of an open load. [-]"""
        return 0.0 if self.clients else mean_error([answer[0] for answer in self.answers])


class DrawnRequest:
    """State of one request: lengths in tokens, times in seconds."""

    __slots__ = (
        "cached", "due", "emitted", "first", "growth", "held", "joined", "last", "left", "rounding", "number", "output", "reserved",
        "sent", "steps",
    )  # fmt: skip

    def __init__(self, number: int, sent: float, due: float, cached: float, new: float, output: int, rounding: float) -> None:
        self.number, self.sent, self.due = number, sent, due
        self.cached, self.left, self.output, self.rounding = cached, new, output, rounding
        self.steps = self.joined = self.emitted = 0
        self.first = self.last = -1.0
        self.held = self.growth = self.reserved = 0.0


def run_engine(
    table: StepTable,
    requests: Requests,
    scheduling: Scheduling,
    batch_limits: BatchLimits,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    answered: int | None = None,
    warm_up: int | None = None,
    stopping: StoppingRule | None = None,
    seed: int = 0,
) -> RunRecord:
    """Run an engine until `answered` requests complete after the first `warm_up` (clients: `ROUNDS` per client and 0; rate: 1000 and 200).

    table           of `table_of`
    concurrency     clients, each of which sends its next request when the previous one is answered; all start at once
    rate            requests a second with Poisson arrivals instead
    stopping        at a rate: the run continues after `answered` requests until the rule holds

    The queue is first come, first served. Chunked: a step contains all decoding sequences and is filled with prompts. Prefill first:
    prompts run before any decode step, up to the token budget. The share of requests in lockstep is a result, not an input.
    Raises InputError.
    """
    if (concurrency is None) == (rate is None):
        raise bad_field("concurrency", concurrency, "one of concurrency and rate must be given", "give one of them")
    if batch_limits.max_sequences < 1:
        raise bad_field("max_sequences", batch_limits.max_sequences, "must be at least 1")
    longest = requests.prompt.most + requests.output.most
    if batch_limits.cache_tokens < np.ceil(longest / batch_limits.block_tokens) * batch_limits.block_tokens:
        raise bad_field(
            "cache_tokens", batch_limits.cache_tokens, f"must hold one request of {longest} tokens", "use a plan with more room"
        )
    most = batch_limits.max_sequences if concurrency is None else min(batch_limits.max_sequences, concurrency)
    wanted = answered if answered is not None else (ROUNDS * concurrency if concurrency is not None else 1000)
    before = warm_up if warm_up is not None else (0 if concurrency is not None else 200)
    block = 0 if stopping is None else max(before + wanted, LEAST_BLOCK)
    engine = _Engine(table, requests, scheduling, replace(batch_limits, max_sequences=most), concurrency, rate, seed, block)
    return engine.run(before, wanted, stopping)


def table_of(
    times: ServingTimes, requests: Requests, scheduling: Scheduling, batch_limits: BatchLimits, concurrency: int | None
) -> StepTable:
    """Return the step times that a run looks up."""
    most = batch_limits.max_sequences if concurrency is None else min(batch_limits.max_sequences, concurrency)
    longest = float(requests.prompt.most + requests.output.most)
    return tabulate(
        times,
        sequences=most,
        cached=(float(requests.prompt.least), longest),
        tokens=min(float(scheduling.step_tokens), MOST_TOKENS, most * longest),
        keys=longest,
        rows_per_step=float(scheduling.rows_per_step),
    )


class _Engine:
    """State of a run; one call of `_step` is one step of the engine."""

    def __init__(
        self,
        table: StepTable,
        requests: Requests,
        scheduling: Scheduling,
        batch_limits: BatchLimits,
        concurrency: int | None,
        rate: float | None,
        seed: int,
        block: int,
    ) -> None:
        self.table, self.slots, self.cache_tokens = table, batch_limits.max_sequences, batch_limits.cache_tokens
        self.block, self.reserves = batch_limits.block_tokens, batch_limits.reserves_output
        self.chunked = bool(scheduling.chunked)
        self.step_tokens = min(float(scheduling.step_tokens), MOST_TOKENS)
        self.rows, self.per_step = float(scheduling.rows_per_step), float(scheduling.tokens_per_step)
        self.front, self.border = float(scheduling.first_token_time), float(scheduling.border_steps)
        self.is_closed, self.clients = concurrency is not None, concurrency or 0
        spread = SPREAD_OF_ENDS if self.chunked and (concurrency or 0) > 1 else 0.0
        self.draws = draws(requests, rate, seed, speculates=self.per_step > 1, spread=spread, varies_front=self.is_closed, block=block)
        self.now, self.decoded, self.preemptions, self.steps = 0.0, 0, 0, 0
        self.sent = 0
        self.arrivals: list[tuple[float, int, DrawnRequest]] = []
        self.waiting: deque[DrawnRequest] = deque()
        self.prefilling: deque[DrawnRequest] = deque()
        self.running: dict[int, DrawnRequest] = {}
        self.ending: dict[int, list[DrawnRequest]] = {}
        self.ends: list[int] = []
        self.cached = self.used = self.growth = 0.0
        self.fresh: list[float] = []
        self.last_decode = 0.0
        self.answers: list[Answer] = []
        self.gaps: list[float] = []
        self.weights: list[float] = []
        self.area_running = self.area_queue = 0.0
        self.lengths = requests.output
        for _ in range(concurrency if concurrency is not None else 1):
            self._send(0.0)

    def run(self, before: int, wanted: int, stopping: StoppingRule | None) -> RunRecord:
        self._until(before)
        start, first = self.now, len(self.answers)
        self.gaps, self.weights = [], []
        self.area_running = self.area_queue = 0.0
        self._until(before + wanted)
        while stopping is not None and (more := stopping.missing(self.answers[first:])):
            self._until(len(self.answers) + more)
        return RunRecord(
            answers=self.answers[first:],
            gaps=self.gaps,
            weights=self.weights,
            elapsed=self.now - start,
            area_running=self.area_running,
            area_queue=self.area_queue,
            preemptions=self.preemptions,
            steps=self.steps,
            clients=self.clients,
        )

    def _until(self, answered: int) -> None:
        while len(self.answers) < answered:
            self._step()

    def _send(self, at: float) -> None:
        """Send a client's next request; it reaches the queue after the engine's API server has processed it.

        In a closed loop that takes a random time with the given mean. Clients observe the mean, which avoids noise in short runs.
        """
        cached, new, output, rounding, delay, share = next(self.draws)
        sent = at if self.is_closed else at + delay
        due = sent + share * self.front
        heappush(self.arrivals, (due, self.sent, DrawnRequest(self.sent, due - self.front, due, cached, new, output, rounding)))
        self.sent += 1

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            request = heappop(self.arrivals)[2]
            self.waiting.append(request)
            if not self.is_closed:
                self._send(request.sent)

    def _step(self) -> None:
        self._arrive()
        if not (self.waiting or self.prefilling or self.running):
            passed = max(self.arrivals[0][0] - self.now, 0.0)
            self.now = self.last_decode = self.now + passed
            self._arrive()
        pieces, tokens, reads = self._prompts()
        decodes = bool(self.running) and (self.chunked or not pieces)
        if decodes and not self.reserves and self.used + self.growth > self.cache_tokens:
            self._evict()
        sequences = len(self.running) if decodes else 0
        num_steps, taken = 1, 0.0
        if decodes and not pieces:
            num_steps, taken = self._steps_to_next_event(sequences)
        if decodes:
            self.cached += num_steps * self.growth
            self.used += 0.0 if self.reserves else num_steps * self.growth
        if num_steps == 1:
            taken = self.table.step(sequences, self.cached / sequences if sequences else 0.0, tokens, reads / tokens if tokens else 0.0)
        self.now += taken
        self.steps += num_steps
        self.area_running += taken * (len(self.running) + len(self.prefilling))
        self.area_queue += taken * len(self.waiting)
        if decodes:
            self._decoded(sequences, taken, num_steps)
        for request in pieces:
            if request.left <= 0:
                self.prefilling.popleft()
                self._prefilled(request)

    def _steps_to_next_event(self, sequences: int) -> tuple[int, float]:
        """Return the decode steps until the next event (an answer ends, a request arrives, the cache is full), and their total time. [s]

        Their times are linear in the table: t, t + d, t + 2 d ...
        """
        if not self.chunked and (self.fresh or self.last_decode < self.now):
            return 1, 0.0
        while self.ends[0] <= self.decoded:
            heappop(self.ends)
        growth = self.growth / sequences
        first = (self.cached + self.growth) / sequences
        most = min(self.ends[0] - self.decoded, self.table.linear_steps(first, growth))
        if not self.reserves and self.growth > 0:
            most = int(min(most, (self.cache_tokens - self.used) / self.growth))
        if most < 2:
            return 1, 0.0
        t = self.table.decode(sequences, first)
        d = self.table.decode(sequences, first + growth) - t
        left = self.arrivals[0][0] - self.now if self.arrivals else float("inf")
        if most * t + d * most * (most - 1) / 2 > left:
            half = t - d / 2
            root = 2 * left / (half + (half * half + 2 * d * left) ** 0.5) if half > 0 else 1.0
            most = min(most, max(int(-(-root // 1)), 1))
        return most, most * t + d * most * (most - 1) / 2

    def _prompts(self) -> tuple[list[DrawnRequest], float, float]:
        """Return the prompts of a step: those in prefill, then those of the queue, up to the limits of tokens, slots and cache."""
        budget = self.step_tokens - (self.rows * len(self.running) if self.chunked else 0.0)
        pieces: list[DrawnRequest] = []
        tokens = reads = 0.0
        index = 0
        while budget > 0:
            if index == len(self.prefilling) and not self._admit():
                break
            request = self.prefilling[index]
            index += 1
            piece = min(request.left, budget)
            request.left -= piece
            reads += piece * (request.cached + piece / 2)
            request.cached += piece
            tokens += piece
            budget -= piece
            pieces.append(request)
        return pieces, tokens, reads

    def _admit(self) -> bool:
        """Admit the head of the queue if there is a slot and cache for it; return whether it was admitted."""
        if not self.waiting or len(self.running) + len(self.prefilling) >= self.slots:
            return False
        request = self.waiting[0]
        length = request.cached + request.left
        if self.reserves:
            need = -(-(length + request.output) // self.block) * self.block
        else:
            need = length + 1 + (self.block - 1) / 2
        if self.used + need > self.cache_tokens and (self.running or self.prefilling):
            return False
        request.reserved = need
        self.used += need
        self.prefilling.append(self.waiting.popleft())
        return True

    def _decoded(self, sequences: int, taken: float, num_steps: int) -> None:
        """Add the tokens of `num_steps` steps to all running sequences; some complete in the last step."""
        self.decoded += num_steps
        if self.chunked or num_steps > 1:
            self.gaps.append(taken / num_steps)
            self.weights.append(sequences * num_steps)
        else:
            old = sequences - len(self.fresh)
            if old > 0:
                self.gaps.append(self.now - self.last_decode)
                self.weights.append(old)
            for last in self.fresh:
                self.gaps.append(self.now - last)
                self.weights.append(1)
            self.fresh.clear()
        self.last_decode = self.now
        for request in self.ending.pop(self.decoded, ()):
            if self.running.get(request.number) is request and request.joined + request.steps == self.decoded:
                self._release(request)
                self._answered(request)

    def _release(self, request: DrawnRequest) -> None:
        """Remove a running request, with its cache."""
        del self.running[request.number]
        grown = (self.decoded - request.joined) * request.growth
        self.cached -= request.held + grown
        self.growth -= request.growth
        self.used -= request.reserved + (0.0 if self.reserves else grown)
        if not self.running:
            self.cached = self.growth = 0.0

    def _prefilled(self, request: DrawnRequest) -> None:
        """End the prefill of a request: it has its first token, and decodes if more are to come."""
        if request.first < 0:
            request.first = self.now
        else:
            self.gaps.append(self.now - request.last)
            self.weights.append(1)
        request.emitted += 1
        left = request.output - request.emitted
        if left <= 0:
            self.used -= request.reserved
            self._answered(request)
            return
        steps = left / self.per_step
        request.steps = max(int(steps + request.rounding), 1)
        request.growth = left / request.steps
        request.held, request.joined = request.cached, self.decoded
        self.running[request.number] = request
        self.cached += request.held
        self.growth += request.growth
        if self.decoded + request.steps not in self.ending:
            heappush(self.ends, self.decoded + request.steps)
        self.ending.setdefault(self.decoded + request.steps, []).append(request)
        if not self.chunked:
            self.fresh.append(self.now)

    def _answered(self, request: DrawnRequest) -> None:
        """Record a completed request, and send the client's next one."""
        late = self.border * self.table.decode(max(len(self.running), 1), self.table.cached[0]) if self.border else 0.0
        ttft = request.first - request.sent + late
        tpot = (self.now - request.first) / max(request.output - 1, 1)
        wanted = min(max(request.output, self.lengths.least), self.lengths.most)  # the spread of ends does not change the answer's length
        self.answers.append((ttft, tpot, ttft + (wanted - 1) * tpot, wanted))
        if self.is_closed:
            self._send(self.now + late)

    def _evict(self) -> None:
        """Preempt the requests admitted last while the cache is full.

        They return to the head of the queue and are recomputed with their answers.
        """
        while len(self.running) > 1 and self.used + self.growth > self.cache_tokens:
            request = next(reversed(self.running.values()))
            generated = (self.decoded - request.joined) * request.growth
            self._release(request)
            request.emitted += round(generated)
            request.left, request.cached = request.held + generated, 0.0
            request.last = self.now
            self.waiting.appendleft(request)
            self.preemptions += 1


def draws(
    requests: Requests,
    rate: float | None,
    seed: int,
    *,
    speculates: bool,
    spread: float = 0.0,
    varies_front: bool = False,
    block: int = 0,
) -> Iterator[tuple[float, float, int, float, float, float]]:
    """Yield random requests without end.

    Each is (cached prompt tokens, new prompt tokens, output tokens, a number in 0..1 that rounds its decode steps, the delay after the
    previous request, the ratio of the API server's time to its mean).

    spread        answers are shorter and longer than their mean by at least this share
    varies_front  that ratio is exponentially distributed; otherwise 1
    block         requests at a rate that are stratified together, so that the load is the requested one; 0: independent draws   [-]
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
        fronts = random.exponential(1.0, number) if varies_front else np.ones(number)
        new = np.maximum(prompts * (1 - found_fraction), 1.0)
        columns = (prompts - new, new, outputs, rounding, gaps, fronts)
        yield from zip(*(column.tolist() for column in columns), strict=True)


def summarize_runs(records: Sequence[tuple[RunRecord, float]], limits: GoodputLimits) -> SimulatedLoad:
    """Return the metrics of the requests of engines, averaged over engines: records, each with its number of engines."""
    copies = np.array([count for _, count in records], dtype=float)
    paces = np.array([record.pace for record, _ in records])
    weights = np.concatenate([np.full(len(record.answers), count * record.pace / len(record.answers)) for record, count in records])
    ttft, tpot, latency, outputs = np.array([answer for record, _ in records for answer in record.answers]).T
    gaps = np.concatenate([np.array(record.gaps) for record, _ in records])
    seen = np.concatenate([np.array(record.weights) * count / record.elapsed for record, count in records])
    kept = (ttft <= limits.ttft) & (tpot <= limits.tpot) & (latency <= limits.request_latency)
    kept_fraction = float(np.average(kept, weights=weights))
    pace = float(np.average(paces, weights=copies))

    def mean(name: str) -> float:
        return float(np.average([getattr(record, name) / record.elapsed for record, _ in records], weights=copies))

    return SimulatedLoad(
        ttft=_spread(ttft, weights),
        tpot=_spread(tpot[outputs > 1], weights[outputs > 1]),
        inter_token=_spread(gaps, seen),
        request_latency=_spread(latency, weights),
        running=mean("area_running"),
        queue=mean("area_queue"),
        requests_per_second=pace,
        tokens_per_second=pace * float(np.average(outputs, weights=weights)),
        goodput=pace * kept_fraction,
        kept_fraction=kept_fraction,
        preemptions=sum(record.preemptions for record, _ in records),
        steps=sum(record.steps for record, _ in records),
        ttft_error=max(record.ttft_error for record, _ in records),
    )


def _spread(values: Array, weights: Array) -> Spread:
    """Return the weighted mean and percentiles of values."""
    if not len(values):
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    order = np.argsort(values)
    ordered, below = values[order], np.cumsum(weights[order])
    at = [float(ordered[min(np.searchsorted(below, share * below[-1] * (1 - 1e-12)), len(ordered) - 1)]) for share in (0.5, 0.9, 0.99)]
    return Spread(mean=float(np.average(values, weights=weights)), p50=at[0], p90=at[1], p99=at[2])
