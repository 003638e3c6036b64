"""One engine of a simulated load, step by step: continuous batching of requests with different lengths.

An engine prefills and decodes, or is a worker of one of two pools and does one of both. Step times come from a table.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from perfmodel.cost.serving.requests import Scheduling
from perfmodel.cost.serving.times import StepTable

#: Token budget of a step if the engine has none: the end of the table.
MOST_TOKENS = 131_072.0


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


class DrawnRequest:
    """State of one request: lengths in tokens, times in seconds."""

    __slots__ = (
        "begun", "cached", "emitted", "first", "growth", "held", "joined", "last",
        "left", "number", "output", "reserved", "rounding", "sent", "steps",
    )  # fmt: skip

    def __init__(self, number: int, sent: float, cached: float, new: float, output: int, rounding: float) -> None:
        self.number, self.sent = number, sent
        self.cached, self.left, self.output, self.rounding = cached, new, output, rounding
        self.steps = self.joined = self.emitted = 0
        self.begun = self.first = self.last = -1.0
        self.held = self.growth = self.reserved = 0.0


class SimulatedEngine:
    """State of an engine. `begin` starts a step, or several equal ones, and `end` ends it.

    waiting         requests in the queue; the workers of a pool share it
    gaps            times between steps of the engines of a run, and the number of sequences with that gap   [s], [-]
    whole_prompts   prompts run whole, this many together even beyond the tokens of a step; 0: a prompt is cut where the tokens end   [-]
    link_free       when its links have sent all caches; in two pools   [s]

    Chunked: a step contains all decoding sequences and is filled with prompts. Otherwise prompts run before any decode step, up to the
    token budget.
    """

    def __init__(
        self,
        table: StepTable,
        scheduling: Scheduling,
        batch_limits: BatchLimits,
        waiting: deque[DrawnRequest],
        gaps: list[tuple[float, float]],
        *,
        chunked: bool,
        whole_prompts: int = 0,
    ) -> None:
        self.table, self.waiting, self.gaps = table, waiting, gaps
        self.slots, self.cache_tokens = batch_limits.max_sequences, batch_limits.cache_tokens
        self.block, self.reserves = batch_limits.block_tokens, batch_limits.reserves_output
        self.chunked, self.whole_prompts = chunked, whole_prompts
        self.step_tokens = min(float(scheduling.step_tokens), MOST_TOKENS)
        self.rows, self.per_step = float(scheduling.rows_per_step), float(scheduling.tokens_per_step)
        self.decoded = self.preemptions = self.steps = 0
        self.prefilling: deque[DrawnRequest] = deque()
        self.joining: list[DrawnRequest] = []
        self.running: dict[int, DrawnRequest] = {}
        self.ending: dict[int, list[DrawnRequest]] = {}
        self.ends: list[int] = []
        self.cached = self.used = self.growth = 0.0
        self.fresh: list[float] = []
        self.last_decode = 0.0
        self.is_stepping = False
        self.link_free = 0.0
        self.pieces: list[DrawnRequest] = []
        self.decoding, self.num_steps, self.taken = 0, 1, 0.0

    @property
    def num_requests(self) -> int:
        """Sequences with a slot."""
        return len(self.running) + len(self.prefilling) + len(self.joining)

    def join(self, request: DrawnRequest, now: float) -> None:
        """Give a slot to a request whose prompt was prefilled by another engine; it decodes from the next step on."""
        request.first = now
        self.joining.append(request)

    def begin(self, now: float, until: float) -> float:
        """Start a step; return its duration, 0 if there is nothing to do. [s]

        until   time of the next event of the run; decode steps up to it are taken together   [s]
        """
        for request in self.joining:
            self.start(request, request.first)
        self.joining.clear()
        self.pieces, tokens, reads = self._prompts()
        decodes = bool(self.running) and (self.chunked or not self.pieces)
        if not (self.pieces or decodes):
            return 0.0
        while decodes and not self.reserves and len(self.running) > 1 and self.used + self.growth > self.cache_tokens:
            # the cache is full: the request admitted last returns to the head of the queue and is recomputed with its answer
            request = next(reversed(self.running.values()))
            generated = (self.decoded - request.joined) * request.growth
            self.release(request)
            request.emitted += round(generated)
            request.left, request.cached = request.held + generated, 0.0
            request.last = now
            self.waiting.appendleft(request)
            self.preemptions += 1
        sequences = self.decoding = len(self.running) if decodes else 0
        self.num_steps, taken = 1, 0.0
        if decodes and not self.pieces:
            self.num_steps, taken = self._steps_to_next_event(sequences, now, until)
        if decodes:
            self.cached += self.num_steps * self.growth
            self.used += 0.0 if self.reserves else self.num_steps * self.growth
        if self.num_steps == 1:
            taken = self.table.step(sequences, self.cached / sequences if sequences else 0.0, tokens, reads / tokens if tokens else 0.0)
        for request in self.pieces:
            request.begun = now if request.begun < 0 else request.begun
        self.is_stepping, self.taken = True, taken
        return taken

    def end(self, now: float) -> tuple[list[DrawnRequest], list[DrawnRequest]]:
        """End the step; return the requests with all their tokens, still to be released, and those whose prompt is prefilled."""
        self.is_stepping = False
        self.steps += self.num_steps
        prefilled = [request for request in self.pieces if request.left <= 0]
        for _ in prefilled:
            self.prefilling.popleft()
        if not self.decoding:
            return [], prefilled
        self.decoded += self.num_steps
        if self.chunked or self.num_steps > 1:
            self.gaps.append((self.taken / self.num_steps, self.decoding * self.num_steps))
        else:
            old = self.decoding - len(self.fresh)
            if old > 0:
                self.gaps.append((now - self.last_decode, old))
            self.gaps.extend((now - last, 1) for last in self.fresh)
            self.fresh.clear()
        self.last_decode = now
        answered = [
            request
            for request in dict.fromkeys(self.ending.pop(self.decoded, ()))  # a preempted one may end when it would have
            if self.running.get(request.number) is request and request.joined + request.steps == self.decoded
        ]
        return answered, prefilled

    def start(self, request: DrawnRequest, since: float) -> bool:
        """Decode a request after its prompt; return False if it has all its tokens.

        since   end of its prefill   [s]
        """
        request.emitted += 1
        left = request.output - request.emitted
        if left <= 0:
            self.used -= request.reserved
            return False
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
            self.fresh.append(since)
        return True

    def _steps_to_next_event(self, sequences: int, now: float, until: float) -> tuple[int, float]:
        """Return the decode steps until the next event (an answer ends, a request arrives, the cache is full), and their total time. [s]

        Their times are linear in the table: t, t + d, t + 2 d ...
        """
        if until <= now or (not self.chunked and (self.fresh or self.last_decode < now)):
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
        left = until - now
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
        while budget > 0 or len(pieces) < self.whole_prompts:
            if len(pieces) == len(self.prefilling) and not self._admit(budget if len(pieces) >= self.whole_prompts > 0 else float("inf")):
                break
            request = self.prefilling[len(pieces)]
            piece = request.left if self.whole_prompts > 1 else min(request.left, budget)
            request.left -= piece
            reads += piece * (request.cached + piece / 2)
            request.cached += piece
            tokens += piece
            budget -= piece
            pieces.append(request)
        return pieces, tokens, reads

    def _admit(self, longest: float) -> bool:
        """Admit the head of the queue if there is a slot and cache for it; return whether it was admitted.

        longest   new tokens of a prompt that still fits into the step   [-]
        """
        if not self.waiting or self.waiting[0].left > longest or len(self.running) + len(self.prefilling) >= self.slots:
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

    def release(self, request: DrawnRequest) -> None:
        """Remove a running request, with its cache."""
        del self.running[request.number]
        grown = (self.decoded - request.joined) * request.growth
        self.cached -= request.held + grown
        self.growth -= request.growth
        self.used -= request.reserved + (0.0 if self.reserves else grown)
        if not self.running:
            self.cached = self.growth = 0.0
