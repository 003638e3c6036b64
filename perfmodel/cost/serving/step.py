"""Time of one serving step on columns of plans, from the rows of the forward pass. `load.py` reads nothing else of a model and a machine.

    t = host + sum over layers of (products + experts + attention + passes + collectives) + logits and sampling

A step has T rows on an attention rank: a token for each decoding sequence (1 + drafted if it verifies), and the new tokens of prompts. All
operators but attention depend on T only; attention depends on each sequence with its cache. Rows of the head are sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.collectives import send_time
from perfmodel.cost.evaluate import members_inside, row_times
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.engine_step import EngineStep, StepFormats, engine_collective_time
from perfmodel.cost.serving.program import ServingProgram
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.columns import Column
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.frameworks.engine import Engine
from perfmodel.hardware.calibration import COLLECTIVE_CODE
from perfmodel.parallel.grid import LayoutGrid
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization

Array = NDArray[np.float64]

#: Parts of a step, in the order in which they are shown.
PARTS = ("products", "experts", "attention", "passes", "communication", "logits", "pipeline_sends", "host")


@dataclass(slots=True, kw_only=True, eq=False)
class StepCosts:
    """`ServingTimes` of columns of plans: arguments broadcast against them; so do results.

    grid          of a replica's chips: tp and pp, attention ranks as dp_replicate, ranks that share prompts as cp
    tp, pp, dp    degrees; expert_parts: ranks that experts are sharded over
    dcp           ranks of tp that share the tokens of a cache (`attention.py`)
    pcp           ranks that share the tokens of a prompt; pcp_cut: pcp if they share those of a cache too, else 1
    """

    decode_program: ServingProgram
    prompt_program: ServingProgram
    machine: Machine
    engine: Engine
    quantization: Quantization
    cache: Dtype
    grid: LayoutGrid
    dcp: Array
    pcp: Array
    pcp_cut: Array
    tp: Array
    pp: Array
    dp: Array
    expert_parts: Array
    distinct_experts: float = 0.0
    _axes: dict[tuple[int, bool], tuple[Array, list[Array]]] = field(default_factory=dict, init=False, repr=False)

    # --- `ServingTimes` -------------------------------------------------------------------------------------------------------------

    def decode(self, sequences: Column, cached: Column, new_tokens: Column = 1.0) -> Array:
        """Return the time of a step in which `sequences` of a replica have `new_tokens` each over `cached` tokens. [s]"""
        return self.total(self.parts(sequences, cached, new_tokens=new_tokens))

    def prefill(self, tokens: Column, cached: Column = 0.0, prompts: Column = 1.0) -> Array:
        """Return the time of a step of `prompts` prompts of `tokens` new tokens each after `cached` ones. [s]"""
        return self.total(self.parts(0.0, 0.0, prompt_tokens=tokens, prompt_cached=cached, prompts=prompts))

    def mixed(
        self,
        sequences: Column,
        cached: Column,
        prompt_tokens: Column,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> Array:
        """Return the time of a decode step with `prompt_tokens` new tokens of each of `prompts` prompts. [s]"""
        return self.total(
            self.parts(
                sequences,
                cached,
                prompt_tokens=prompt_tokens,
                prompt_cached=prompt_cached,
                prompts=prompts,
                new_tokens=new_tokens,
            )
        )

    @staticmethod
    def total(parts: Mapping[str, Array]) -> Array:
        return sum((parts[name] for name in PARTS), np.zeros(()))

    # --- evaluation ---------------------------------------------------------------------------------------------------------------

    def parts(
        self,
        sequences: Column,
        cached: Column,
        *,
        prompt_tokens: Column = 0.0,
        prompt_cached: Column = 0.0,
        prompts: Column = 1.0,
        new_tokens: Column = 1.0,
    ) -> dict[str, Array]:
        """Return the seconds of each of `PARTS`; they add up to the step."""
        given = (sequences, cached, new_tokens, prompts, prompt_tokens, prompt_cached)
        shape = np.broadcast_shapes(*(np.shape(column) for column in given), (len(self.tp),))
        flat = [np.broadcast_to(np.asarray(column, dtype=float), shape).reshape(-1) for column in given]
        has_prompt = flat[4] > 0
        programs = [program for program, runs in ((self.prompt_program, has_prompt), (self.decode_program, ~has_prompt)) if runs.any()]
        evaluated = [self.evaluate(program, self.step(program, *flat)) for program in programs]
        if len(evaluated) > 1:
            evaluated = [{name: np.where(has_prompt, evaluated[0][name], evaluated[1][name]) for name in PARTS}]
        return {name: time.reshape(shape) for name, time in evaluated[0].items()}

    def step(
        self,
        program: ServingProgram,
        sequences: Array,
        cached: Array,
        new: Array,
        prompts: Array,
        prompt_tokens: Array,
        prompt_cached: Array,
    ) -> EngineStep:
        """Return the columns of a step on one attention rank, for the replica's sequences and prompts."""
        repeats = sequences.size // len(self.tp)
        tp, pp, dp, pcp, dcp, cut, ep = (
            np.tile(degree, repeats) for degree in (self.tp, self.pp, self.dp, self.pcp, self.dcp, self.pcp_cut, self.expert_parts)
        )
        has_prompt, ranks = prompt_tokens > 0, dp * pp
        q = np.where(has_prompt, prompt_tokens, 0.0)
        decoding, of_rank = _fullest_share(sequences, ranks), np.where(has_prompt, _fullest_share(prompts, ranks), 0.0)
        verified = _fullest_share(sequences, pp) * new
        rows = decoding * new + of_rank * q / pcp
        (sizes, inside), element_bytes = self._axes_of(program, repeats), program.rows.activation_bytes
        return EngineStep(
            decoding=decoding,
            cached=np.maximum(cached, 1.0),
            new_tokens=new,
            prompts=of_rank,
            prompt_tokens=q,
            prompt_cached=prompt_cached,
            tokens=verified + np.where(has_prompt, _fullest_share(prompts, pp) * q, 0.0),
            copies=(pcp - 1.0) * verified,
            sharing=pcp,
            padded=rows if program.is_prompt else self._padded(rows),
            dcp=dcp,
            cut=cut,
            chips=tp * pcp * dp,
            expert_parts=ep,
            groups={name: (sizes[at], [tier[at] for tier in inside]) for name, at in program.groups.items()},
            kernels=self.engine.kernels,
            formats=StepFormats(
                quantization=self.quantization.with_elements(element_bytes),
                plain=QUANTIZATIONS["bf16"].with_elements(element_bytes),
                cache_bytes=itemsize(self.cache),
            ),
            distinct_experts=self.distinct_experts,
            takes_prompts=program.is_prompt,
        )

    def amounts(self, program: ServingProgram, step: EngineStep, rows: Array) -> tuple[Array, Array, list[Array]]:
        """Return the amounts of the program's rows on this rank, sizes of groups, and members inside tiers.

        Rows of prompts are cut over the ranks that share them; the graph is that of all of them.
        """
        sizes, inside = self._axes_of(program, rows.size // len(self.tp))
        shared = step.sharing if program.is_prompt else np.ones_like(rows)
        amount = program.amounts(sizes, rows=rows * shared, outputs=step.outputs * shared, sequences=step.decoding)
        return amount, sizes, inside

    def evaluate(self, program: ServingProgram, step: EngineStep) -> dict[str, Array]:
        """Return the seconds of each of `PARTS` of a step."""
        amount, sizes, inside = self.amounts(program, step, step.padded)
        times = row_times(program.rows, self.machine, inside, amount, sizes, step)
        mixers, last = program.of_mixers, program.of_mixers - 1
        counts = program.counts
        layers = counts[:last]
        # sends between stages, and a gather before the head by ranks that share prompts
        hidden, sent = step.formats.element_bytes * program.model.hidden_size, np.zeros_like(step.padded)
        gather, gathered = COLLECTIVE_CODE[CollectiveKind.ALL_GATHER], step.padded * step.sharing * hidden
        gather_time = engine_collective_time(gather, gathered, step.groups["pcp"], self.machine, self.engine.kernels)
        if np.max(self.pp) > 1:
            repeats = step.padded.size // len(self.pp)
            pp, hop = np.tile(self.pp, repeats), [np.tile(hop, repeats) for hop in self.grid.hop]
            sent = np.where(pp > 1, (pp - 1.0) * send_time(step.padded * hidden, pp, hop, self.machine), 0.0)
        parts = {
            "products": _ordered_sum(layers, times.matmul[:last]),
            "experts": _ordered_sum(layers, times.experts[:last]) if len(times.experts) else np.zeros_like(step.rows),
            "attention": _ordered_sum(counts[mixers:], times.attention[mixers:] + times.streaming[mixers:]),
            "passes": _ordered_sum(layers, times.streaming[:last]),
            "communication": _ordered_sum(layers, times.communication[:last] + times.communication[mixers:-1]),
            "logits": times.matmul[last] + times.streaming[last] + times.communication[last] + gather_time,
            "pipeline_sends": sent,
        }
        device = sum(parts.values(), np.zeros(()))
        parts["host"] = self._host(program, device, step)
        return parts

    def _axes_of(self, program: ServingProgram, repeats: int) -> tuple[Array, list[Array]]:
        """Return the sizes of the groups of axes, and members inside tiers."""
        key = (repeats, program.is_prompt)
        if key not in self._axes:
            sizes = np.array([self.grid.size(mask) for mask in program.rows.amounts.masks])
            tiers = [np.tile(tier, (1, repeats)) for tier in members_inside(program.rows, self.grid)]
            if len(self._axes) > 64:
                self._axes.clear()
            self._axes[key] = np.tile(sizes, (1, repeats)), tiers
        return self._axes[key]

    def _padded(self, rows: Array) -> Array:
        """Return the rows of a step padded to captured graphs, interpolated between whole numbers of rows."""
        known = np.array((*self.engine.scheduling.graph_sizes, np.inf)) if self.engine.host.has_graphs else np.array([np.inf])

        def captured(count: Array) -> Array:
            above = known[np.searchsorted(known, count)]
            return np.where(np.isfinite(above), np.maximum(above, count), count)

        low = np.maximum(np.floor(rows + 1e-9), 1.0)
        least = captured(low)
        return np.asarray(least + np.maximum(rows - low, 0.0) * (captured(low + 1.0) - least))

    def _host(self, program: ServingProgram, device: Array, step: EngineStep) -> Array:
        """Return the exposed host time: launches without CUDA graphs, and the engine's time per step and per sequence."""
        host, rows = self.engine.host, program.rows
        sequences = (step.decoding + step.prompts) * np.tile(self.pp, device.size // len(self.pp))
        engine_time = host.step_time + host.sequence_time * sequences
        launched = np.zeros_like(device)
        if program.is_prompt:
            launched = np.full_like(device, program.model.num_hidden_layers * host.layer_prefill_time)
        if not host.has_graphs:
            kernels = len(rows.matmul.names) + len(rows.low.names) + program.num_passes + len(rows.cached)
            blocks = max(sum(1 for region in program.regions if region.is_block), 1)
            launched = np.maximum(launched, kernels / blocks * program.model.num_hidden_layers * host.launch_time)
        if self.machine.host.is_chip:
            return launched + engine_time  # nothing overlaps with the host
        waits = np.maximum(launched - device, 0.0)
        return waits + (host.step_time if program.is_prompt and host.overlaps_host else engine_time)


def _ordered_sum(counts: Array, times: Array) -> Array:
    """Return the sum over regions, in order.

    A matrix product would order its terms by the number of columns, so a column's result would depend on the others.
    """
    total = counts[0] * times[0]
    for count, time in zip(counts[1:], times[1:], strict=True):
        total = total + count * time
    return np.asarray(total)


def _fullest_share(number: Array, groups: Array) -> Array:
    """Return the number in the fullest of several groups: an equal share, but at least 1 if there is any."""
    return np.maximum(number / groups, np.minimum(number, 1.0))


__all__ = ["PARTS", "StepCosts"]
