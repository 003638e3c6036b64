"""Discrete-event simulation of prefill and decode workers, beyond the closed form of two pools (`disaggregated.py`).

A prompt waits for a prefill worker and is computed in a batch with other waiting prompts. Its cache is sent over the worker's links. It
then waits for a slot, and decodes with all sequences on its worker. Deterministic: the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np

from perfmodel.cost.serving.disaggregated import TwoPools
from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulate import (
    LEAST_BLOCK,
    MOST_TOKENS,
    Answer,
    DrawnRequest,
    GoodputLimits,
    RunRecord,
    SimulatedLoad,
    StoppingRule,
    draws,
    summarize_runs,
)
from perfmodel.cost.serving.times import tabulate
from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import bad_field


def simulate_pools(
    pools: TwoPools,
    requests: Requests,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    answered: int | None = None,
    warm_up: int | None = None,
    stopping: StoppingRule | None = None,
    limits: GoodputLimits | None = None,
    seed: int = 0,
) -> SimulatedLoad:
    """Run both pools until `answered` requests complete after the first `warm_up`, and on until the `stopping` rule holds.

    answered, warm_up  by default 10 and 2 rounds of the clients, or 1000 and 200 at a rate
    concurrency  clients of all workers, each of which sends its next request when the previous one is answered; all start at once
    rate         requests a second with Poisson arrivals instead

    One queue for all prefill workers, first come, first served: an idle worker takes the prompts that fit into the tokens of a step, and at
    least `prompts_together` if they wait. Caches are sent one after another over a worker's links, V / B each. A request joins the
    decode worker with the fewest sequences, at the border of a step. Its first token is observed when it has a slot, as in `disaggregated`.
    """
    if (concurrency is None) == (rate is None):
        raise bad_field("concurrency", concurrency, "one of concurrency and rate must be given", "give one of them")
    if _one(pools.capacity) < 1:
        raise bad_field("capacity", pools.capacity, "must be at least 1", "use a decode worker with more room")
    wanted = answered if answered is not None else (10 * concurrency if concurrency is not None else 1000)
    before = warm_up if warm_up is not None else (2 * concurrency if concurrency is not None else 200)
    block = 0 if stopping is None else max(before + wanted, LEAST_BLOCK)
    return _Run(pools, requests, concurrency, rate, seed, block).run(before, wanted, limits or GoodputLimits(), stopping)


def _one(value: Column) -> float:
    """Return the value of the simulated plan."""
    return float(np.ravel(value)[0])


class _DecodeWorker:
    """Sequences of one worker; new ones join when its next step begins."""

    __slots__ = ("cached", "decoded", "ending", "growth", "is_stepping", "joining", "num_running")

    def __init__(self) -> None:
        self.num_running = self.decoded = 0
        self.cached = self.growth = 0.0
        self.joining: list[DrawnRequest] = []
        self.ending: dict[int, list[DrawnRequest]] = {}
        self.is_stepping = False

    @property
    def used_slots(self) -> int:
        return self.num_running + len(self.joining)


class _Run:
    """State of a run: one pass of the loop is one event."""

    def __init__(self, pools: TwoPools, requests: Requests, concurrency: int | None, rate: float | None, seed: int, block: int) -> None:
        scheduling, of_prompts, workers, handover = pools.scheduling, pools.prefill_scheduling, pools.workers, pools.handover
        longest = float(requests.prompt.most + requests.output.most)
        cached = (float(requests.prompt.least), longest)
        self.step_tokens = min(_one(of_prompts.step_tokens), MOST_TOKENS)
        self.together, self.slots = int(_one(of_prompts.prompts_together)), int(_one(pools.capacity))
        most = self.slots if concurrency is None else min(self.slots, concurrency)
        tokens, rows = max(self.step_tokens, float(self.together * requests.prompt.most)), float(scheduling.rows_per_step)
        self.prompts = tabulate(pools.prefill, sequences=1, cached=cached, tokens=tokens, keys=longest)
        self.steps_of_answers = tabulate(pools.decode, sequences=most, cached=cached, tokens=2.0, keys=longest, rows_per_step=rows)
        self.clients = concurrency or 1
        self.per_step = float(scheduling.tokens_per_step)
        self.front, self.border = float(scheduling.first_token_time), float(scheduling.border_steps)
        self.is_closed = rate is None
        self.draws = draws(requests, rate, seed, speculates=self.per_step > 1, block=block)
        self.token_bytes, self.bandwidth, self.latency, self.layers = (
            _one(column) for column in (handover.token_bytes, handover.bandwidth, handover.latency, handover.layers)
        )
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.scheduled = self.sent = self.steps = 0
        self.now = self.area_running = self.area_queue = 0.0
        self.queue: deque[DrawnRequest] = deque()
        self.transferred: deque[DrawnRequest] = deque()
        self.idle = list(range(int(_one(workers.prefill))))
        self.link_free = [0.0] * len(self.idle)
        self.workers = [_DecodeWorker() for _ in range(int(_one(workers.decode)))]
        self.num_running = 0
        self.answers: list[Answer] = []
        self.gaps: list[float] = []
        self.weights: list[int] = []

    def run(self, before: int, wanted: int, limits: GoodputLimits, stopping: StoppingRule | None) -> SimulatedLoad:
        for _ in range(self.clients):
            self._send(0.0)
        self._until(before)
        start, first = self.now, len(self.answers)
        self.gaps, self.weights = [], []
        self.area_running = self.area_queue = 0.0
        self._until(first + wanted)
        while stopping is not None and (more := stopping.missing(self.answers[first:])):
            self._until(len(self.answers) + more)
        record = RunRecord(
            answers=self.answers[first:],
            gaps=self.gaps,
            weights=self.weights,
            elapsed=self.now - start,
            area_running=self.area_running,
            area_queue=self.area_queue,
            preemptions=0,
            steps=self.steps,
            clients=0 if not self.is_closed else self.clients,
        )
        return summarize_runs([(record, 1)], limits)

    def _until(self, answered: int) -> None:
        while len(self.answers) < answered:
            at, _, action, argument = heappop(self.events)
            passed = at - self.now
            self.area_running += passed * self.num_running
            self.area_queue += passed * (len(self.queue) + len(self.transferred))
            self.now = at
            action(argument)

    def _at(self, time: float, action: Callable[[Any], None], argument: object) -> None:
        self.scheduled += 1
        heappush(self.events, (time, self.scheduled, action, argument))

    def _send(self, at: float) -> None:
        cached, new, output, rounding, delay, _ = next(self.draws)
        sent = at if self.is_closed else at + delay
        self._at(sent + self.front, self._arrive, DrawnRequest(self.sent, sent, sent + self.front, cached, new, output, rounding))
        self.sent += 1

    # --- prompts ----------------------------------------------------------------------------------------------------------------------

    def _arrive(self, request: DrawnRequest) -> None:
        self.queue.append(request)
        if not self.is_closed:
            self._send(request.sent)
        # requests that arrive at the same time share a step: a worker reads its queue after all of them are in it
        self._at(self.now, self._prefill, None)

    def _prefill(self, _: None) -> None:
        while self.idle and self.queue:
            worker = self.idle.pop()
            batch = [self.queue.popleft()]
            tokens = batch[0].left
            while self.queue and (tokens + self.queue[0].left <= self.step_tokens or len(batch) < self.together):
                batch.append(self.queue.popleft())
                tokens += batch[-1].left
            taken = self._prompt_time(batch, tokens)
            self._at(self.now + taken, self._prefilled, (worker, batch, taken))

    def _prompt_time(self, batch: list[DrawnRequest], tokens: float) -> float:
        """Return the time of one step, or of the equal pieces of a prompt that is longer than a step. [s]"""
        if len(batch) > 1 or tokens <= self.step_tokens:
            reads = sum(request.left * (request.cached + request.left / 2) for request in batch)
            return self.prompts.step(0, 0.0, tokens, reads / tokens)
        pieces = int(-(-tokens // self.step_tokens))
        piece = tokens / pieces
        return sum(self.prompts.step(0, 0.0, piece, batch[0].cached + (at + 0.5) * piece) for at in range(pieces))

    def _prefilled(self, done: tuple[int, list[DrawnRequest], float]) -> None:
        """Send the caches of a batch one after another; all layers but the last may be sent during the prefill."""
        worker, batch, taken = done
        for request in batch:
            request.cached, request.left = request.cached + request.left, 0.0
            sending = self.token_bytes * request.cached / self.bandwidth
            begun = max(self.link_free[worker], self.now - (1 - 1 / self.layers) * taken)
            self.link_free[worker] = max(begun + sending, self.now + sending / self.layers)
            self._at(self.link_free[worker] + self.latency, self._assign, request)
        self.idle.append(worker)
        self._prefill(None)

    # --- answers ----------------------------------------------------------------------------------------------------------------------

    def _assign(self, received: DrawnRequest | None = None) -> None:
        """Assign transferred requests to workers with a free slot, after one whose cache was just received."""
        if received is not None:
            self.transferred.append(received)
        while self.transferred:
            worker = min(self.workers, key=lambda candidate: candidate.used_slots)
            if worker.used_slots >= self.slots:
                return
            request = self.transferred.popleft()
            request.first = self.now
            if request.output <= 1:
                self._answered(request, worker)
                continue
            worker.joining.append(request)
            self.num_running += 1
            if not worker.is_stepping:
                self._begin(worker)

    def _begin(self, worker: _DecodeWorker) -> None:
        """Start the next step, with the requests that joined."""
        for request in worker.joining:
            left = request.output - 1
            request.steps = max(int(left / self.per_step + request.rounding), 1)
            request.growth, request.held, request.joined = left / request.steps, request.cached, worker.decoded
            worker.ending.setdefault(worker.decoded + request.steps, []).append(request)
            worker.cached += request.held
            worker.growth += request.growth
        fresh, worker.joining = worker.joining, []
        worker.num_running += len(fresh)
        worker.cached += worker.growth
        worker.is_stepping = True
        taken = self.steps_of_answers.decode(worker.num_running, worker.cached / worker.num_running)
        self._at(self.now + taken, self._stepped, (worker, fresh, taken))

    def _stepped(self, done: tuple[_DecodeWorker, list[DrawnRequest], float]) -> None:
        worker, fresh, taken = done
        worker.decoded += 1
        self.steps += 1
        self.gaps.append(taken)
        self.weights.append(worker.num_running - len(fresh))
        for request in fresh:
            self.gaps.append(self.now - request.first)
            self.weights.append(1)
        for request in worker.ending.pop(worker.decoded, ()):
            worker.num_running -= 1
            self.num_running -= 1
            worker.cached -= request.held + request.steps * request.growth
            worker.growth -= request.growth
            self._answered(request, worker)
        worker.is_stepping = False
        self._assign()
        if not worker.is_stepping and (worker.num_running or worker.joining):
            self._begin(worker)
        elif not worker.num_running and not worker.joining:
            worker.cached = worker.growth = 0.0

    def _answered(self, request: DrawnRequest, worker: _DecodeWorker) -> None:
        late = (
            self.border * self.steps_of_answers.decode(max(worker.num_running, 1), self.steps_of_answers.cached[0]) if self.border else 0.0
        )
        ttft, latency = request.first - request.sent + late, self.now - request.sent + late
        self.answers.append((ttft, (latency - ttft) / max(request.output - 1, 1), latency, request.output))
        if self.is_closed:
            self._send(self.now + late)
