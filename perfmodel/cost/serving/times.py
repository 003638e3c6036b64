"""Step times that a served load needs: of a model alone, with a draft model (speculative decoding), and in a table for simulations."""

from __future__ import annotations

from bisect import bisect_right
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


_CACHED_POINTS = 17
_POINTS_AN_OCTAVE = 4
#: Keys that a prompt token reads in the table of decode and prompts together: short prompts, independent of the lengths.
_FEW_KEYS = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Step time as a function of four numbers. [s]

        t(b, z, T, w) = M(b, T) + [D(b, z) - D(b, z0)] + [P(T, w) - P(T, w0)]

    b sequences that decode over z tokens each, T prompt tokens, each of which reads w keys on average (those of the cache and half of
    its own prompt). Products see b + T rows together; attention of both kinds adds up. Hence three tables of two dimensions, linear
    between their points, instead of one of four.
    """

    cached: tuple[float, float]
    decode_rows: list[list[float]]
    mixed_rows: list[list[float]]
    tokens: list[float]
    keys: list[float]
    prompt_rows: list[list[float]]

    def decode(self, sequences: int, cached: float) -> float:
        """Return the time of a step without prompts. [s]"""
        low, width = self.cached
        position = (cached - low) / width
        index = min(max(int(position), 0), _CACHED_POINTS - 2)
        row = self.decode_rows[sequences]
        return row[index] + (position - index) * (row[index + 1] - row[index])

    def linear_steps(self, cached: float, growth: float) -> int:
        """Return the decode steps from `cached` on, each of which reads `growth` more, up to the next point of the table. [-]"""
        low, width = self.cached
        index = int((cached - low) / width)
        if index >= _CACHED_POINTS - 2 or growth <= 0:
            return 1 << 62
        return int((low + (max(index, 0) + 1) * width - cached) / growth) + 1

    def step(self, sequences: int, cached: float, tokens: float, keys: float) -> float:
        """Return the time of any step; `keys`: read by a prompt token. [s]"""
        if tokens <= 0:
            return self.decode(sequences, cached)
        index, share = _position(self.tokens, tokens)
        row = self.mixed_rows[sequences]
        time = row[index] + share * (row[index + 1] - row[index])
        column, part = _position(self.keys, keys)
        near, far = self.prompt_rows[index], self.prompt_rows[index + 1]
        time += (1 - share) * (near[column] + part * (near[column + 1] - near[column]))
        time += share * (far[column] + part * (far[column + 1] - far[column]))
        if sequences:
            time += self.decode(sequences, cached) - self.decode_rows[sequences][0]
        return time


def _position(points: list[float], value: float) -> tuple[int, float]:
    """Return the interval of a value between points, and its fraction in it."""
    index = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return index, (value - points[index]) / (points[index + 1] - points[index])


def tabulate(
    times: ServingTimes, *, sequences: int, cached: tuple[float, float], tokens: float, keys: float, rows_per_step: float = 1.0
) -> StepTable:
    """Return the table of a plan for steps of up to `sequences` sequences of `cached` tokens (from, to) and `tokens` prompt tokens.

    times  of one plan: every result has the shape of the arguments
    keys   largest number of keys that a prompt token reads
    """
    low, high = cached
    width = max((high - low) / (_CACHED_POINTS - 1), 1e-6)
    over_cache = low + width * np.arange(_CACHED_POINTS)
    counts = _whole_points(sequences)
    some_tokens = _whole_points(max(tokens, 2.0))[1:]
    some_keys = np.unique(np.concatenate([[1.0, _FEW_KEYS], _whole_points(max(keys, 2 * _FEW_KEYS))[1:]]))

    def prompts(amount: Array, read: Array) -> tuple[Array, Array, Array]:
        """Return equal prompts of `amount` tokens in total that read `read` keys per token: (tokens, cached, number)."""
        number = np.maximum(amount / (2 * read), 1.0)
        return amount / number, np.maximum(read - amount / (2 * number), 0.0), number

    T, w = np.meshgrid(some_tokens, some_keys, indexing="ij")
    few = prompts(some_tokens, np.full_like(some_tokens, _FEW_KEYS))
    prefill = times.prefill(*prompts(T, w)) - times.prefill(*few)[:, None]
    decode = times.decode(counts[1:, None], over_cache[None, :], rows_per_step)
    mixed = times.mixed(counts[1:, None], low, few[0][None, :], few[1][None, :], few[2][None, :], rows_per_step)
    every = np.arange(1, sequences + 1)

    def at_every_count(values: Array) -> list[list[float]]:
        values = np.broadcast_to(values, (len(counts) - 1, values.shape[1]))
        return np.stack([np.interp(every, counts[1:], column) for column in values.T], axis=1).tolist()

    return StepTable(
        cached=(low, width),
        decode_rows=[[0.0] * _CACHED_POINTS, *at_every_count(decode)],
        mixed_rows=[np.broadcast_to(times.prefill(*few), some_tokens.shape).tolist(), *at_every_count(mixed)],
        tokens=some_tokens.tolist(),
        keys=some_keys.tolist(),
        prompt_rows=np.broadcast_to(prefill, T.shape).tolist(),
    )


def _whole_points(most: float) -> Array:
    """Return zero and whole numbers up to `most`: each of the first few, then a fixed number per octave."""
    octaves = np.log2(max(most, 2.0))
    points = np.unique(np.round(2.0 ** np.linspace(0, octaves, int(np.ceil(octaves * _POINTS_AN_OCTAVE)) + 1)))
    return np.unique(np.concatenate([[0.0], points[points <= most], [float(most)]]))
