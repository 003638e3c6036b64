"""Continuous batching: requests join whenever there is room in the cache, and leave when they have all their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfmodel.execute.serving.cache import PagedCache
from perfmodel.execute.serving.decoder import Decoder
from perfmodel.execute.serving.step import Chunk, make_step
from perfmodel.foundation.errors import InputError


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A prompt and how many tokens are wanted after it; greedy: each is the most likely one.

    arrives   the step before which nobody knows of it
    """

    prompt: tuple[int, ...]
    num_new: int
    arrives: int = 0

    @property
    def most_tokens(self) -> int:
        """In the cache: the last token that is made is never read."""
        return len(self.prompt) + self.num_new - 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Contents of a step: sequences that decode, rows of prompts, bytes of the cache that sequences hold."""

    decoding: int
    prompt_rows: int
    cache_bytes: int


@dataclass(slots=True)
class _Running:
    number: int
    request: ServedRequest
    cached: int = 0
    made: list[int] = field(default_factory=list)

    def chunk(self, room: int) -> Chunk:
        """The next tokens: the one made last, or as much of the prompt as there is room for."""
        prompt = self.request.prompt
        if self.cached < len(prompt):
            return Chunk(self.number, self.cached, prompt[self.cached : self.cached + room])
        return Chunk(self.number, self.cached, (self.made[-1],))


def serve(decoder: Decoder, requests: Sequence[ServedRequest], *, step_tokens: int) -> tuple[list[tuple[int, ...]], list[StepRecord]]:
    """The new tokens of each request, and what every step was.

    Requests join in the order in which they come, as soon as blocks for all their tokens are free. In a step every running request
    that has its prompt in the cache gets a token; what is left of `step_tokens` rows goes to prompts, in chunks.
    """
    cache = decoder.cache
    _check(requests, cache, step_tokens)
    waiting = deque(_Running(number, request) for number, request in sorted(enumerate(requests), key=lambda item: item[1].arrives))
    running: list[_Running] = []
    finished: dict[int, tuple[int, ...]] = {}
    records: list[StepRecord] = []
    clock = 0
    while waiting or running:
        while waiting and waiting[0].request.arrives <= clock and cache.has_capacity(waiting[0].request.most_tokens):
            joining = waiting.popleft()
            cache.reserve(joining.number, joining.request.most_tokens)
            running.append(joining)
        clock += 1
        if not running:
            continue
        # those that decode come first: a prompt takes what they leave
        room, chunks = step_tokens, []
        for each in sorted(running, key=lambda each: each.cached < len(each.request.prompt)):
            if room:
                chunks.append(each.chunk(room))
                room -= len(chunks[-1].tokens)
        step = make_step(chunks, cache)
        best = decoder.run(step).argmax(dim=-1).tolist()
        by_number = {each.number: each for each in running}
        decoding = sum(chunk.start >= len(by_number[chunk.sequence].request.prompt) for chunk in chunks)
        records.append(StepRecord(decoding, sum(len(chunk.tokens) for chunk in chunks) - decoding, cache.bytes_held))
        for chunk, token in zip(step.chunks, best, strict=True):
            each = by_number[chunk.sequence]
            each.cached = chunk.stop
            if each.cached >= len(each.request.prompt):
                each.made.append(token)
            if len(each.made) == each.request.num_new:
                finished[each.number] = tuple(each.made)
                cache.release(each.number)
                running.remove(each)
    return [finished[number] for number in range(len(requests))], records


def _check(requests: Sequence[ServedRequest], cache: PagedCache, step_tokens: int) -> None:
    for number, request in enumerate(requests):
        if not request.prompt or request.num_new < 1:
            raise InputError(f"requests[{number}]: has no prompt or asks for no token; give at least one of each")
        blocks = cache.blocks_for(request.most_tokens)
        if blocks > cache.num_blocks:
            taken = f"its {request.most_tokens} tokens take {blocks} blocks"
            raise InputError(f"requests[{number}]: {taken}, the whole cache has {cache.num_blocks}; give it more")
    if step_tokens < 1:
        raise InputError(f"step_tokens={step_tokens}: must be at least 1; a step of no rows makes no token")
