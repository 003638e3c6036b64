"""Times of steps as a served load needs them, of a model alone or with one that drafts (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfmodel.foundation.columns import Column

Array = NDArray[np.float64]


class ServingTimes(Protocol):
    """How long one step of an engine takes. [s] Arguments and results broadcast over plans; sequences need not be whole numbers.

    What the formulas rely on: a step of nothing but a prompt is a prefill, mixed(0, z, t, x) = prefill(t, x); a step without a prompt
    is a decode step, mixed(b, z, 0, x) = decode(b, z); no time falls when an argument grows.
    """

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """A step in which `sequences` have `new_tokens` each over `cached` tokens, new ones included (1 + drafted where it verifies)."""

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """A step of `prompts` prompts, each of `tokens` new tokens after `cached` ones that lie in the cache already."""

    def mixed(
        self,
        sequences: Column,
        cached: Column,
        prompt_tokens: Column,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> Array:
        """A decode step that also takes `prompt_tokens` new tokens of each of `prompts` prompts, after `prompt_cached` cached ones."""


def expected_tokens(acceptance: Column, drafted: Column) -> Array:
    """Tokens that a step yields when it verifies drafts. [-]

    E = (1 - a^(gamma + 1)) / (1 - a);   gamma + 1 at a = 1

    acceptance  a      probability that a drafted token is accepted, given those before it [-]
    drafted     gamma  tokens that are drafted for a step                                  [-]

    Source: Leviathan, Kalman & Matias, ICML 2023, eq. 1. Assumes that acceptances of successive tokens are independent and alike.
    """
    a, gamma = np.asarray(acceptance, dtype=float), np.asarray(drafted, dtype=float)
    below = np.minimum(a, 1 - 1e-9)
    return np.where(a >= 1, gamma + 1, (1 - below ** (gamma + 1)) / (1 - below))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeTimes:
    """`ServingTimes` of a model whose decode steps verify drafts: its own over 1 + gamma rows a sequence, and gamma of the draft.

    Without a draft model (n-gram look-up) drafting takes no time on the chip. A prompt is prefilled by the draft model too.
    """

    target: ServingTimes
    draft: ServingTimes | None
    drafted: Column

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """A step that verifies, with its drafts; `new_tokens` rows of the target a sequence."""
        verify = self.target.decode(sequences, cached, new_tokens)
        return verify if self.draft is None else verify + self.drafted * self.draft.decode(sequences, cached)

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """A prompt through the target and the draft."""
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
        """Both in one step: the draft takes the prompt with its first step of decode."""
        time = self.target.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts, new_tokens)
        if self.draft is None:
            return time
        first = self.draft.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts)
        return time + first + np.where(np.greater(sequences, 0), self.drafted - 1, 0) * self.draft.decode(sequences, cached)
