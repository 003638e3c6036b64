"""An engine step by step: continuous batching of requests whose lengths and arrivals differ, for what closed forms cannot say.

One pass of the loop is one step of the engine; its time comes from a table. Deterministic: the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.table import StepTable, tabulate
from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.errors import bad_field
from perfmodel.parallel.serving.prediction import Spread

#: Draws are made this many at a time.
_DRAWS = 1024
#: Tokens of a step where the engine sets no limit: the table has to end somewhere.
MOST_TOKENS = 131_072.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """What the requests saw that were answered after the warm-up.

    ttft, tpot, inter_token, request_latency   over requests (inter_token: over all gaps between a sequence's steps) [s]
    running, queue         sequences with a place and requests without, on average over time [-]
    requests_per_second, tokens_per_second     answered, and tokens of answers [1/s]
    goodput                requests a second that kept all limits [1/s]
    kept_fraction          of the requests, those that did [-]
    preemptions, steps     in the whole run
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputLimits:
    """What a request has to keep to be counted as good. [s]"""

    ttft: float = float("inf")
    tpot: float = float("inf")
    request_latency: float = float("inf")

    @property
    def are_given(self) -> bool:
        return min(self.ttft, self.tpot, self.request_latency) < float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What bounds the sequences that run at once.

    max_sequences    by the engine's own limit
    cache_tokens     of the cache, counted in blocks of `block_tokens`
    reserves_output  a request is admitted when its whole answer fits; else when its prompt does, and the one admitted last is thrown out
                     (and computed again, with what it has answered) when the cache is full
    """

    max_sequences: int
    cache_tokens: float = float("inf")
    block_tokens: int = 16
    reserves_output: bool = False


class DrawnRequest:
    """One request on its way: lengths in tokens, times in seconds."""

    __slots__ = (
        "due", "emitted", "first", "found", "growth", "held", "joined", "last", "left", "luck", "number", "output", "reserved",
        "sent", "steps",
    )  # fmt: skip

    def __init__(self, number: int, sent: float, due: float, found: float, new: float, output: int, luck: float) -> None:
        self.number, self.sent, self.due = number, sent, due
        self.found, self.left, self.output, self.luck = found, new, output, luck
        self.steps = self.joined = self.emitted = 0
        self.first = self.last = -1.0
        self.held = self.growth = self.reserved = 0.0


def simulate(
    times: ServingTimes | StepTable,
    requests: Requests,
    scheduling: Scheduling,
    places: Places,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    answered: int | None = None,
    warm_up: int | None = None,
    limits: GoodputLimits | None = None,
    seed: int = 0,
) -> SimulatedLoad:
    """Run an engine until so many requests are `answered` after the first `warm_up` ones (10 and 2 rounds of the clients, or 1000 and 200).

    concurrency     clients, each of which sends its next request when the last is answered; all start at once
    rate            requests a second at random (Poisson) instead

    The queue is first come, first served. Chunked: a step holds all that decode and fills up with prompts. Prefill first: prompts run
    before any decode, as many in a step as it has room for. How far requests march in step follows, and is not an input.
    """
    if (concurrency is None) == (rate is None):
        raise bad_field("concurrency", concurrency, "one of concurrency and rate must be given", "give one of them")
    if places.max_sequences < 1:
        raise bad_field("max_sequences", places.max_sequences, "must be at least 1")
    longest = requests.prompt.most + requests.output.most
    if places.cache_tokens < np.ceil(longest / places.block_tokens) * places.block_tokens:
        raise bad_field("cache_tokens", places.cache_tokens, f"must hold one request of {longest} tokens", "use a plan with more room")
    most = places.max_sequences if concurrency is None else min(places.max_sequences, concurrency)
    if not isinstance(times, StepTable):
        limit = float(scheduling.step_tokens)
        times = tabulate(
            times,
            sequences=most,
            cached=(float(requests.prompt.least), float(longest)),
            tokens=min(limit, MOST_TOKENS, most * float(longest)),
            keys=float(longest),
            rows_per_step=float(scheduling.rows_per_step),
        )
    engine = _Engine(times, requests, scheduling, replace(places, max_sequences=most), concurrency, rate, seed)
    wanted = answered if answered is not None else (10 * concurrency if concurrency is not None else 1000)
    before = warm_up if warm_up is not None else (2 * concurrency if concurrency is not None else 200)
    return engine.run(before, wanted, limits or GoodputLimits())


class _Engine:
    """State of a run; one call of `_step` is one step of the engine."""

    def __init__(
        self,
        table: StepTable,
        requests: Requests,
        scheduling: Scheduling,
        places: Places,
        concurrency: int | None,
        rate: float | None,
        seed: int,
    ) -> None:
        self.table, self.places, self.cache_tokens = table, places.max_sequences, places.cache_tokens
        self.block, self.reserves = places.block_tokens, places.reserves_output
        self.chunked = bool(scheduling.chunked)
        self.step_tokens = min(float(scheduling.step_tokens), MOST_TOKENS)
        self.rows, self.per_step = float(scheduling.rows_per_step), float(scheduling.tokens_per_step)
        self.front, self.border = float(scheduling.first_token_time), float(scheduling.border_steps)
        self.is_closed = concurrency is not None
        self.draws = draws(requests, rate, seed, speculates=self.per_step > 1)
        self.now, self.decoded, self.preemptions, self.steps = 0.0, 0, 0, 0
        self.sent = 0
        self.coming: deque[DrawnRequest] = deque()
        self.waiting: deque[DrawnRequest] = deque()
        self.prefilling: deque[DrawnRequest] = deque()
        self.running: dict[int, DrawnRequest] = {}
        self.ending: dict[int, list[DrawnRequest]] = {}
        self.cached = self.used = self.growth = 0.0
        self.fresh: list[float] = []
        self.last_decode = 0.0
        self.answers: list[tuple[float, float, float, int]] = []
        self.gaps: list[float] = []
        self.weights: list[int] = []
        self.area_running = self.area_queue = 0.0
        self.tokens = 0
        for _ in range(concurrency if concurrency is not None else 1):
            self._send(0.0)

    def run(self, before: int, wanted: int, limits: GoodputLimits) -> SimulatedLoad:
        while len(self.answers) < before:
            self._step()
        start, first = self.now, len(self.answers)
        self.gaps, self.weights = [], []
        self.area_running = self.area_queue = 0.0
        self.tokens = 0
        while len(self.answers) < before + wanted:
            self._step()
        return what_was_seen(
            self.answers[first:],
            gaps=self.gaps,
            weights=self.weights,
            elapsed=self.now - start,
            area_running=self.area_running,
            area_queue=self.area_queue,
            tokens=self.tokens,
            limits=limits,
            preemptions=self.preemptions,
            steps=self.steps,
        )

    def _send(self, at: float) -> None:
        """The next request leaves its client; it reaches the queue once the engine's front is through with it."""
        found, new, output, luck, later = next(self.draws)
        sent = at if self.is_closed else at + later
        self.coming.append(DrawnRequest(self.sent, sent, sent + self.front, found, new, output, luck))
        self.sent += 1

    def _arrive(self) -> None:
        while self.coming and self.coming[0].due <= self.now:
            request = self.coming.popleft()
            self.waiting.append(request)
            if not self.is_closed:
                self._send(request.sent)

    def _step(self) -> None:
        self._arrive()
        if not (self.waiting or self.prefilling or self.running):
            self.now = self.last_decode = max(self.now, self.coming[0].due)
            self._arrive()
        pieces, tokens, reads = self._prompts()
        decodes = bool(self.running) and (self.chunked or not pieces)
        if decodes and not self.reserves and self.used + self.growth > self.cache_tokens:
            self._make_room()
        sequences = len(self.running) if decodes else 0
        if decodes:
            self.cached += self.growth
            self.used += 0.0 if self.reserves else self.growth
        taken = self.table.step(sequences, self.cached / sequences if sequences else 0.0, tokens, reads / tokens if tokens else 0.0)
        self.now += taken
        self.steps += 1
        self.area_running += taken * (len(self.running) + len(self.prefilling))
        self.area_queue += taken * len(self.waiting)
        if decodes:
            self._decoded(sequences, taken)
        for request in pieces:
            if request.left <= 0:
                self.prefilling.popleft()
                self._prefilled(request)

    def _prompts(self) -> tuple[list[DrawnRequest], float, float]:
        """The prompts of a step: those under way, then as many of the queue as tokens, places and the cache allow."""
        room = self.step_tokens - (self.rows * len(self.running) if self.chunked else 0.0)
        pieces: list[DrawnRequest] = []
        tokens = reads = 0.0
        index = 0
        while room > 0:
            if index == len(self.prefilling) and not self._admit():
                break
            request = self.prefilling[index]
            index += 1
            piece = min(request.left, room)
            request.left -= piece
            reads += piece * (request.found + piece / 2)
            request.found += piece
            tokens += piece
            room -= piece
            pieces.append(request)
        return pieces, tokens, reads

    def _admit(self) -> bool:
        """Whether the head of the queue gets a place."""
        if not self.waiting or len(self.running) + len(self.prefilling) >= self.places:
            return False
        request = self.waiting[0]
        length = request.found + request.left
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

    def _decoded(self, sequences: int, taken: float) -> None:
        """All that run have a step's tokens more; some are answered."""
        self.decoded += 1
        if self.chunked:
            self.gaps.append(taken)
            self.weights.append(sequences)
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
                self._leave(request)
                self._answered(request)

    def _leave(self, request: DrawnRequest) -> None:
        """Out of the running ones, with its cache."""
        del self.running[request.number]
        grown = (self.decoded - request.joined) * request.growth
        self.cached -= request.held + grown
        self.growth -= request.growth
        self.used -= request.reserved + (0.0 if self.reserves else grown)
        if not self.running:
            self.cached = self.growth = 0.0

    def _prefilled(self, request: DrawnRequest) -> None:
        """Its prompt is through: it has a token, and runs on unless that was all."""
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
        request.steps = max(int(steps + request.luck), 1)
        request.growth = left / request.steps
        request.held, request.joined = request.found, self.decoded
        self.running[request.number] = request
        self.cached += request.held
        self.growth += request.growth
        self.ending.setdefault(self.decoded + request.steps, []).append(request)
        if not self.chunked:
            self.fresh.append(self.now)

    def _answered(self, request: DrawnRequest) -> None:
        late = self.border * self.table.decode(max(len(self.running), 1), self.table.cached[0]) if self.border else 0.0
        ttft, latency = request.first - request.sent + late, self.now - request.sent + late
        self.answers.append((ttft, (latency - ttft) / max(request.output - 1, 1), latency, request.output))
        self.tokens += request.output
        if self.is_closed:
            self._send(self.now + late)

    def _make_room(self) -> None:
        """The cache is full: those admitted last go back to the head of the queue, and will be computed again with what they answered."""
        while len(self.running) > 1 and self.used + self.growth > self.cache_tokens:
            request = next(reversed(self.running.values()))
            made = (self.decoded - request.joined) * request.growth
            self._leave(request)
            request.emitted += round(made)
            request.left, request.found = request.held + made, 0.0
            request.last = self.now
            self.waiting.appendleft(request)
            self.preemptions += 1


def draws(requests: Requests, rate: float | None, seed: int, *, speculates: bool) -> Iterator[tuple[float, float, int, float, float]]:
    """Requests without end: tokens found, to compute and to answer, luck in rounding steps, seconds after the one before."""
    random = np.random.default_rng(seed)
    found_fraction = float(requests.found_fraction)
    while True:
        prompts = random.integers(requests.prompt.least, requests.prompt.most + 1, _DRAWS)
        outputs = random.integers(requests.output.least, requests.output.most + 1, _DRAWS)
        gaps = random.exponential(1 / rate, _DRAWS) if rate is not None else np.zeros(_DRAWS)
        luck = random.random(_DRAWS) if speculates else np.zeros(_DRAWS)
        new = np.maximum(prompts * (1 - found_fraction), 1.0)
        yield from zip((prompts - new).tolist(), new.tolist(), outputs.tolist(), luck.tolist(), gaps.tolist(), strict=True)


def what_was_seen(
    answers: Sequence[tuple[float, float, float, int]],
    *,
    gaps: Sequence[float],
    weights: Sequence[int],
    elapsed: float,
    area_running: float,
    area_queue: float,
    tokens: int,
    limits: GoodputLimits,
    preemptions: int,
    steps: int,
) -> SimulatedLoad:
    """Of `answers` (TTFT, TPOT, latency, tokens) within `elapsed` seconds; areas: sequences times seconds."""
    ttft, tpot, latency, outputs = np.array(answers).T
    kept = (ttft <= limits.ttft) & (tpot <= limits.tpot) & (latency <= limits.request_latency)
    pace = len(answers) / elapsed
    return SimulatedLoad(
        ttft=_spread(ttft),
        tpot=_spread(tpot[outputs > 1]),
        inter_token=_spread(np.array(gaps), np.array(weights)),
        request_latency=_spread(latency),
        running=area_running / elapsed,
        queue=area_queue / elapsed,
        requests_per_second=pace,
        tokens_per_second=tokens / elapsed,
        goodput=pace * float(kept.mean()),
        kept_fraction=float(kept.mean()),
        preemptions=preemptions,
        steps=steps,
    )


def _spread(values: Array, weights: Array | None = None) -> Spread:
    """Mean and percentiles, of values that may stand for several."""
    if not len(values):
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    counts = np.ones(len(values)) if weights is None else weights
    order = np.argsort(values)
    ordered, below = values[order], np.cumsum(counts[order])
    at = [float(ordered[min(np.searchsorted(below, share * below[-1]), len(ordered) - 1)]) for share in (0.5, 0.9, 0.99)]
    return Spread(mean=float(np.average(values, weights=counts)), p50=at[0], p90=at[1], p99=at[2])
