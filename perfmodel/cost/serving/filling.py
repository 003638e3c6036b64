"""How prompts fill the steps of an engine: the steps that a prompt takes, with how many others, and the time that it adds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.serving.requests import Requests, Scheduling
from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.columns import Column


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filling:
    """The steps of b running sequences and of the prompts that follow one another in their places.

    decode      t_d     a decode step of all that run                                       [s]
    stalled             the longest common step: with prompts, or a prefill by itself       [s]
    prompt      t_p     a prompt's own prefill, from its first step to its first token      [s]
    alongside   t_p'    what it adds to the steps of the others                             [s]
    together    q       prompts that share a step                                           [-]
    max_prompts              prompts that one step could take                                    [-]
    steps       n       that a prompt is cut to                                             [-]
    """

    decode: Array
    stalled: Array
    prompt: Array
    alongside: Array
    together: Array
    max_prompts: Array
    steps: Array


def decode_steps(requests: Requests, scheduling: Scheduling) -> Array:
    """Decode steps of a request: its tokens but the first, over the tokens that a step yields, (O - 1) / E. [-]"""
    return np.asarray((requests.output.mean - 1) / np.asarray(scheduling.tokens_per_step), dtype=float)


def fill_steps(times: ServingTimes, requests: Requests, scheduling: Scheduling, running: Column) -> Filling:
    """Steps of an engine with `running` sequences and the prompts of their followers.

    A cycle of b sequences has b prompts of n steps each and D = (O - 1) / E decode steps of every sequence; it takes

        n t_mixed + (b - q) t_p' + D t_d

    chunked: a step has room for T - b tokens of prompts (at least T I' / (I' + D), what decode leaves where all steps are full), so
    n = ceil(I' / (T - b)), in equal pieces, of which the average one follows x I + (I' - I'/n) / 2 tokens; who prefills does not
    decode. Pieces ride in the D + n steps of the cycle, one a step; where b n are
    more than that, q of them share a step as far as there is room, and what still finds no step lengthens the cycle:

        N = b n / q,  q = clip(b n / (D + n), 1, (T - b) / I')
        t_p = n t_mixed,   t_p' = (n / q) (t_mixed - t_d) + max(N - D - n, 0) / b t_d
        decoding in a step with prompts: b - q, or b D / N where no step is without (t_d is then that of so many)

    prefill first: a prompt runs by itself (cut where it is longer than T) and all that decode wait; t_p = n t_prefill, t_p' = t_p / q.
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
