"""Continuous batching: requests join when the KV cache has free blocks, and leave after their last token."""

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
    """A prompt and the number of tokens to generate by greedy decoding.

    arrives   step at which the request arrives
    """

    prompt: tuple[int, ...]
    num_new: int
    arrives: int = 0

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in the cache: the last generated token is never read."""
        return len(self.prompt) + self.num_new - 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Contents of a step: decoding sequences, prompt rows, and bytes of the cache in use."""

    decoding: int
    prompt_rows: int
    cache_bytes: int


@dataclass(slots=True)
class _Running:
    number: int
    request: ServedRequest
    cached: int = 0
    generated: list[int] = field(default_factory=list)

    def chunk(self, free_rows: int) -> Chunk:
        """Return the next chunk: the last generated token, or up to `free_rows` tokens of the prompt."""
        prompt = self.request.prompt
        if self.cached < len(prompt):
            return Chunk(self.number, self.cached, prompt[self.cached : self.cached + free_rows])
        return Chunk(self.number, self.cached, (self.generated[-1],))


def serve(decoder: Decoder, requests: Sequence[ServedRequest], *, step_tokens: int) -> tuple[list[tuple[int, ...]], list[StepRecord]]:
    """Return the new tokens of each request, and a record of every step.

    Requests join in order of arrival, as soon as blocks for all their tokens are free. In each step, every running request with a
    complete prompt in the cache generates a token. The remaining rows of `step_tokens` go to prompts, in chunks.
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
        # decode first: prompts get the remaining rows
        free_rows, chunks = step_tokens, []
        for sequence in sorted(running, key=lambda sequence: sequence.cached < len(sequence.request.prompt)):
            if free_rows:
                chunks.append(sequence.chunk(free_rows))
                free_rows -= len(chunks[-1].tokens)
        step = make_step(chunks, cache)
        best = decoder.run(step).argmax(dim=-1).tolist()
        by_number = {sequence.number: sequence for sequence in running}
        decoding = sum(chunk.start >= len(by_number[chunk.sequence].request.prompt) for chunk in chunks)
        records.append(StepRecord(decoding, sum(len(chunk.tokens) for chunk in chunks) - decoding, cache.bytes_held))
        for chunk, token in zip(step.chunks, best, strict=True):
            sequence = by_number[chunk.sequence]
            sequence.cached = chunk.stop
            if sequence.cached >= len(sequence.request.prompt):
                sequence.generated.append(token)
            if len(sequence.generated) == sequence.request.num_new:
                finished[sequence.number] = tuple(sequence.generated)
                cache.release(sequence.number)
                running.remove(sequence)
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
