"""Times of steps as a served load needs them: the one thing that the formulas of load know of a model, a chip and a plan."""

from __future__ import annotations

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
