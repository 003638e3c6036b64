"""Requests and scheduling: lengths of requests, the rules by which an engine fills steps, and the steps that prompts fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.serving.times import Array, ServingTimes, expected_tokens
from perfmodel.foundation.columns import Column
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine import Engine
from perfmodel.workload.serving import Lengths, ServingJob, Speculation

#: Token budget of a step without a limit.
UNLIMITED = float("inf")


def squared_variation(lengths: Lengths) -> float:
    """Return the squared coefficient of variation of lengths. [-]"""
    return lengths.variance / lengths.mean**2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Lengths of a request.

    prompt            I  prompt tokens
    output            O  output tokens, including the first, which prefill yields
    found_fraction    x  share of the prompt's tokens that hit the prefix cache
    """

    prompt: Lengths
    output: Lengths
    found_fraction: Column = 0.0

    def __post_init__(self) -> None:
        if np.any(np.less(self.found_fraction, 0)) or np.any(np.greater(self.found_fraction, 1)):
            raise bad_field("found_fraction", self.found_fraction, "must lie between 0 and 1", "write .3 where 30 % of a prompt is found")

    @classmethod
    def of_job(cls, job: ServingJob) -> Requests:
        """Return the requests of a serving job."""
        return cls(prompt=job.input_len, output=job.output_len, found_fraction=job.prefix_hit)

    @property
    def new_tokens(self) -> Column:
        """Computed tokens of a prompt: I (1 - x), at least its last token, which yields the first output token."""
        return np.maximum(self.prompt.mean * (1 - np.asarray(self.found_fraction)), 1.0)

    @property
    def found_tokens(self) -> Column:
        """Prompt tokens that hit the prefix cache."""
        return self.prompt.mean - self.new_tokens

    @property
    def mean_cached(self) -> Column:
        """Cached tokens of a running sequence, averaged over its decode steps.

        z = I + sum(1 .. O - 1) / (O - 1), over requests I + E[O^2 - O] / (2 E[O - 1]): I + O / 2 if all answers have one length,
        and more if lengths differ, as long answers run in more steps.
        """
        mean, variance = self.output.mean, self.output.variance
        return self.prompt.mean + np.where(mean > 1, (variance + mean * (mean - 1)) / np.maximum(2 * (mean - 1), 1e-12), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduling:
    """Rules by which an engine fills its steps. Values or arrays over plans.

    chunked            prompts run in decode steps, in chunks of the tokens left in `step_tokens`; else by themselves, before any decode
    step_tokens     T  token budget of a step
    prompts_together   prompts that an engine collects before it prefills them in one step (1: no wait)
    lockstep        s  share of requests in lockstep: 0 spread evenly, 1 all prefill and then all decode
    first_token_time h0  from the client to the first token, excluding steps: network, tokenisation, API server [s]
    border_steps       decode steps between the end of prefill and the first token or decode step
    tokens_per_step E  of a sequence in a decode step (speculation; else 1)
    rows_per_step      new tokens of a sequence that a decode step computes: 1 + drafted
    """

    chunked: bool | np.ndarray = True
    step_tokens: Column = UNLIMITED
    prompts_together: Column = 1.0
    lockstep: Column = 0.0
    first_token_time: Column = 0.0
    border_steps: Column = 0.0
    tokens_per_step: Column = 1.0
    rows_per_step: Column = 1.0

    @classmethod
    def of_engine(
        cls, engine: Engine, *, step_tokens: Column = 0.0, ranks: Column = 1.0, speculation: Speculation | None = None
    ) -> Scheduling:
        """Return the engine's rules. step_tokens: of a plan, 0 for the engine's default; ranks: attention ranks."""
        drafted, acceptance = (speculation.draft_tokens, speculation.acceptance) if speculation is not None else (0, 0.0)
        return cls(
            chunked=engine.scheduling.has_chunks,
            step_tokens=np.where(np.greater(step_tokens, 0), step_tokens, engine.scheduling.max_tokens).astype(float),
            prompts_together=ranks if engine.scheduling.gathers_prompts else 1.0,
            lockstep=engine.scheduling.lockstep,
            first_token_time=engine.host.request_time,
            border_steps=engine.host.border_steps,
            tokens_per_step=float(expected_tokens(acceptance, drafted)),
            rows_per_step=1.0 + drafted,
        )

    def __post_init__(self) -> None:
        in_step = np.asarray(self.lockstep)
        rules = (
            ("lockstep", np.all((in_step >= 0) & (in_step <= 1)), "must lie between 0 and 1"),
            ("step_tokens", np.all(np.greater_equal(self.step_tokens, 1)), "must be at least 1"),
            ("prompts_together", np.all(np.greater_equal(self.prompts_together, 1)), "must be at least 1"),
            ("first_token_time", np.all(np.greater_equal(self.first_token_time, 0)), "must not be negative"),
            ("border_steps", np.all(np.greater_equal(self.border_steps, 0)), "must not be negative"),
            ("tokens_per_step", np.all(np.greater_equal(self.tokens_per_step, 1)), "must be at least 1"),
            ("rows_per_step", np.all(np.greater_equal(self.rows_per_step, self.tokens_per_step)), "a step yields at most a token a row"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise bad_field(name, getattr(self, name), rule)


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
