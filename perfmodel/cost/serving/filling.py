"""Prompts in the steps of an engine: the steps per prompt, the prompts that share a step, and the time that a prompt adds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.columns import Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filling:
    """Steps of b running sequences and of the prompts that follow one another in their slots.

    decode       t_d     a decode step of all running sequences                              [s]
    stalled              the longest common step: with prompts, or a prefill by itself       [s]
    prompt       t_p     a prompt's own prefill, from its first step to its first token      [s]
    alongside    t_p'    time that it adds to the steps of the others                        [s]
    together     q       prompts that share a step                                           [-]
    max_prompts          prompts that fit into one step                                      [-]
    steps        n       chunks of a prompt                                                  [-]
    """

    decode: Array
    stalled: Array
    prompt: Array
    alongside: Array
    together: Array
    max_prompts: Array
    steps: Array


def decode_steps(requests: Requests, scheduling: Scheduling) -> Array:
    """Return the decode steps of a request: its tokens after the first, over the tokens that a step yields, (O - 1) / E. [-]"""
    return np.asarray((requests.output.mean - 1) / np.asarray(scheduling.tokens_per_step), dtype=float)


def fill_steps(times: ServingTimes, requests: Requests, scheduling: Scheduling, running: Column) -> Filling:
    """Return the steps of an engine with `running` sequences and the prompts that replace them.

    A cycle of b sequences has b prompts of n steps each and D = (O - 1) / E decode steps of every sequence; it takes

        n t_mixed + (b - q) t_p' + D t_d

    chunked: a step has T - b tokens for prompts (at least T I' / (I' + D), the share left by decode if all steps are full). Hence
    n = ceil(I' / (T - b)) equal chunks. The average chunk follows x I + (I' - I'/n) / 2 tokens. A sequence in prefill does not decode.
    Chunks are added to the D + n steps of the cycle, one per step. If b n exceeds that, q of them share a step as far as they fit. Chunks
    that still find no step lengthen the cycle:

        N = b n / q,  q = clip(b n / (D + n), 1, (T - b) / I')
        t_p = n t_mixed,   t_p' = (n / q) (t_mixed - t_d) + max(N - D - n, 0) / b t_d
        decoding in a step with prompts: b - q, or b D / N if every step has prompts (t_d is then that of this number)

    prefill first: a prompt runs by itself (split if longer than T) while decoding sequences wait; t_p = n t_prefill, t_p' = t_p / q.
    """
    b = np.maximum(np.asarray(running, dtype=float), 1.0)
    chunked = np.asarray(scheduling.chunked)
    D, z = decode_steps(requests, scheduling), requests.mean_cached
    new, cached, rows = requests.new_tokens, requests.found_tokens, scheduling.rows_per_step

    step_tokens = np.asarray(scheduling.step_tokens, dtype=float)
    left = np.maximum(step_tokens - b * rows, step_tokens * (new / (new + D * rows)))
    free_tokens = np.where(chunked, left, step_tokens)
    n = np.maximum(np.ceil(new / free_tokens), 1.0)
    piece = new / n
    offset = cached + (new - piece) / 2
    max_prompts = np.maximum(free_tokens / new, 1.0)
    together = np.maximum(b * n / np.maximum(D + n, 1.0), scheduling.prompts_together)
    q = np.clip(together, 1.0, np.minimum(np.floor(max_prompts), b))

    with_prompts = b * n / q
    decoding = np.where(with_prompts > D + n, b * D / with_prompts, np.maximum(b - q, 0.0))
    decode = times.decode(np.where(chunked & (with_prompts > D + n), decoding, b), z, rows)
    mixed = times.mixed(np.where(chunked, decoding, 0.0), z, piece, offset, q, rows)
    in_chunks = np.maximum(mixed - decode, 0.0) * n / q + np.maximum(with_prompts - D - n, 0.0) / b * decode
    first = mixed * n
    return Filling(
        decode=np.asarray(decode + 0 * first),
        stalled=np.asarray(np.where(chunked, np.maximum(mixed, decode), decode + first)),
        prompt=np.asarray(first),
        alongside=np.asarray(np.where(chunked, in_chunks, first / q)),
        together=np.asarray(q + 0 * first),
        max_prompts=np.asarray(max_prompts + 0 * first),
        steps=np.asarray(n + 0 * first),
    )
