"""Step times that a served load needs, of a model alone or with a draft model (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column

Array = NDArray[np.float64]


class ServingTimes(Protocol):
    """Time of one step of an engine. [s] Arguments and results broadcast over plans; sequences need not be whole numbers.

    The formulas assume: a step with only a prompt is a prefill, mixed(0, z, t, x) = prefill(t, x); a step without a prompt
    is a decode step, mixed(b, z, 0, x) = decode(b, z); no time decreases when an argument grows.
    """

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """Return the time of a step in which `sequences` have `new_tokens` each (1 + drafted) over `cached` tokens, including the new."""

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """Return the time of a step of `prompts` prompts, each of `tokens` new tokens after `cached` tokens in the cache."""

    def mixed(
        self,
        sequences: Column,
        cached: Column,
        prompt_tokens: Column,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> Array:
        """Return the time of a decode step with `prompt_tokens` new tokens of each of `prompts` prompts, after `prompt_cached` tokens."""


def expected_tokens(acceptance: Column, drafted: Column) -> Array:
    """Return the tokens that a step yields when it verifies drafts. [-]

    E = (1 - a^(gamma + 1)) / (1 - a);   gamma + 1 at a = 1

    acceptance  a      probability that a drafted token is accepted, given those before it [-]
    drafted     gamma  drafted tokens per step                                             [-]

    Source: Leviathan, Kalman & Matias, ICML 2023, eq. 1. Assumes that acceptances of successive tokens are independent and identical.
    """
    a, gamma = np.asarray(acceptance, dtype=float), np.asarray(drafted, dtype=float)
    below = np.minimum(a, 1 - 1e-9)
    return np.where(a >= 1, gamma + 1, (1 - below ** (gamma + 1)) / (1 - below))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeTimes:
    """`ServingTimes` with drafts: a verify step of 1 + gamma rows per sequence, and gamma decode steps of the draft model.

    Without a draft model (n-gram look-up) drafting takes no time on the chip. The draft model prefills prompts too.
    """

    target: ServingTimes
    draft: ServingTimes | None
    drafted: Column

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """Return the time of a verify step with its drafts; `new_tokens`: rows of the target per sequence."""
        verify = self.target.decode(sequences, cached, new_tokens)
        return verify if self.draft is None else verify + self.drafted * self.draft.decode(sequences, cached)

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """Return the time of a prompt through the target and the draft."""
        time = self.target.prefill(tokens, cached, prompts)
        return time if self.draft is None else time + self.draft.prefill(tokens, cached, prompts)

    def mixed(
        self,
        sequences: Column,
        cached: Column,
        prompt_tokens: Column,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> Array:
        """Return the time of a step with both: the draft processes the prompt in its first decode step."""
        time = self.target.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts, new_tokens)
        if self.draft is None:
            return time
        first = self.draft.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts)
        return time + first + np.where(np.greater(sequences, 0), self.drafted - 1, 0) * self.draft.decode(sequences, cached)
