"""Speculative decoding: tokens that a verifying step yields, and what a step with its drafts takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.columns import Column


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
        own = self.target.prefill(tokens, cached, prompts)
        return own if self.draft is None else own + self.draft.prefill(tokens, cached, prompts)

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
        own = self.target.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts, new_tokens)
        if self.draft is None:
            return own
        first = self.draft.mixed(sequences, cached, prompt_tokens, prompt_cached, prompts)
        return own + first + np.where(np.greater(sequences, 0), self.drafted - 1, 0) * self.draft.decode(sequences, cached)
