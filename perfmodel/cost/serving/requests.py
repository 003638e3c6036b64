"""Requests and scheduling: lengths of requests, and the rules by which an engine fills steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.serving.times import expected_tokens
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
