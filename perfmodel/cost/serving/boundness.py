"""Every operator of a step with its work and its bottleneck: compute, memory, latency, links or the host (Kundu et al. 2024, section 5).

Arithmetic intensity is FLOPs over memory traffic; the ridge of a chip is its FLOP rate over its memory bandwidth. An operator is
latency-bound at any intensity if its fixed time is over half of its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import product_sizes, products_of, work_times
from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.attention import cached_attention_time, cached_attention_work
from perfmodel.cost.serving.engine_step import EngineStep
from perfmodel.cost.serving.experts import routed_experts_work
from perfmodel.cost.serving.program import ServingProgram
from perfmodel.cost.serving.step import StepCosts
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization

Array = NDArray[np.float64]
Bound = Literal["compute", "memory", "latency", "link", "host"]
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator of one step on one chip, all layers of its kind together.

    shape       [m, n, k] of a product on this chip; a description of other operators
    flops, bytes, time   of all its calls   [FLOP, byte, s]
    calls       calls per step
    intensity   flops / bytes      ridge: the intensity above which the operator is compute-bound   [FLOP/byte]
    bandwidth   of the chip's memory [byte/s]
    crossover   rows of a step from which the product is compute-bound; 0: never
    """

    name: str
    phase: Phase
    shape: str
    flops: float
    bytes: float
    time: float
    calls: int
    bound: Bound
    ridge: float
    crossover: float = 0.0
    bandwidth: float = 0.0

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


#: Bottleneck of the parts of a step that are shown as one row each.
_BOUNDS: dict[str, Bound] = {"passes": "memory", "communication": "link", "pipeline_sends": "link", "host": "host"}


def operator_rows(costs: StepCosts, *, phase: Phase, sequences: float = 0.0, cached: float = 0.0, tokens: float = 0.0) -> list[OperatorRow]:
    """Return the operators of a step of the first plan.

    Decode of `sequences` over `cached` tokens, or prefill of `tokens` after `cached`.
    """
    is_prompt = phase == "prefill"
    program = costs.prompt_program if is_prompt else costs.decode_program
    columns = (0.0, 0.0, 1.0, 1.0, tokens, cached) if is_prompt else (max(sequences, 1.0), cached, 1.0, 1.0, 0.0, 0.0)
    step = costs.step(program, *(np.array([value]) for value in columns))
    amount, sizes, _ = costs.amounts(program, step, step.rows)
    timed = {id(rows): times for _, rows, times in work_times(program.rows, costs.machine, amount, sizes, step)}
    of = _Operators(machine=costs.machine, program=program, step=step, amount=amount, timed=timed)
    parts = {name: float(time[0]) for name, time in costs.evaluate(program, step).items()}
    layers, head = of.products()
    rows = [*layers, *head, *of.attention(), *([] if is_prompt else of.states()), *of.experts(parts["experts"])]
    for name, bound in _BOUNDS.items():
        if parts[name] > 0:
            shape, calls = f"{float(step.rows[0]):,.0f} rows", program.num_passes if name == "passes" else 1
            row = OperatorRow(
                name=name, phase=phase, shape=shape, flops=0.0, bytes=0.0, time=parts[name], calls=calls, bound=bound, ridge=0.0
            )
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Operators:
    """Operators of one step. timed: times of the rows of each kind, by their identity."""

    machine: Machine
    program: ServingProgram
    step: EngineStep
    amount: Array
    timed: Mapping[int, Array]

    def products(self) -> tuple[list[OperatorRow], list[OperatorRow]]:
        """Return the products of the layers, those in 16 bits first, and those of the head."""
        formats, last = self.step.formats, len(self.program.regions) - 1
        of_layers, of_head = list[OperatorRow](), list[OperatorRow]()
        for products, is_low in products_of(self.program.rows):
            sizes, quantization = product_sizes(products, self.amount), formats.quantization if is_low else formats.plain
            w, a = quantization.weight_bytes, quantization.activation_bytes
            for at, (name, segment) in enumerate(zip(products.names, products.segments, strict=True)):
                batch, m, n, k = (float(sizes[size][at][0]) for size in ("batch", "m", "n", "k"))
                shape = f"[{m:,.1f}, {k:,g}] [{k:,g}, {n:,g}]".replace(".0, ", ", ")
                row = self._row(
                    name,
                    f"{batch:g} x {shape}" if batch > 1 else shape,
                    segment=segment,
                    flops=2.0 * batch * m * n * k,
                    num_bytes=batch * (w * k * n + a * m * k + formats.element_bytes * m * n),
                    time=float(self.timed[id(products)][at][0]),
                    floor=self.machine.matmul.floor_time,
                    quantization=quantization,
                )
                crossover = crossover_rows(n, k, w, a, row.ridge)
                (of_head if segment == last else of_layers).append(replace(row, crossover=crossover))
        return of_layers, of_head

    def attention(self) -> Iterator[OperatorRow]:
        """Yield attention to the cache."""
        step, machine = self.step, self.machine
        for cached in self.program.rows.cached:
            heads, kv_heads = self.amount[cached.heads], self.amount[cached.kv_heads]
            flops, num_bytes = cached_attention_work(cached.work, heads, kv_heads, step)
            tokens = step.prompt_tokens + step.prompt_cached if step.takes_prompts else step.cached / (step.dcp * step.cut)
            local_heads = heads if step.takes_prompts else heads * step.dcp
            yield self._row(
                cached.name,
                f"{float(local_heads[0]):g} heads over {float(kv_heads[0]):g}, {float(tokens[0]):,.0f} tokens",
                segment=cached.segment,
                flops=float(flops[0]),
                num_bytes=float(num_bytes[0]),
                time=float(cached_attention_time(cached.work, heads, kv_heads, step, machine)[0]),
                floor=(machine.attention if step.takes_prompts else machine.serving.decode_attention)["flash"].floor_time,
            )

    def states(self) -> Iterator[OperatorRow]:
        """Yield the state updates of decoding sequences; in prompts the products of a scan are separate rows."""
        rows = self.program.rows.streaming
        if not rows.names:
            return
        times, elements = self.timed[id(rows)], self.amount[rows.columns["elements"]]
        num_bytes = np.add.reduceat(self.amount[rows.accesses], rows.access_starts, axis=0)
        for at in np.flatnonzero(rows.segments >= self.program.of_mixers):
            sequences, entries = float(self.step.decoding[0]), float(elements[at][0])
            yield self._row(
                rows.names[at].rpartition(".")[2],
                f"{sequences:g} sequences, {entries / sequences:,.0f} elements",
                segment=rows.segments[at],
                flops=float(rows.columns["element_flops"][at]) * entries,
                num_bytes=float(num_bytes[at][0]),
                time=float(times[at][0]),
                floor=float(self.machine.streaming.table[0][rows.columns["kernel"][at]]),
            )

    def experts(self, time: float) -> Iterator[OperatorRow]:
        """Yield the experts of all layers on a chip of mean load. time: of all layers"""
        routed = self.program.rows.experts
        if not routed or not time:
            return
        counts = [self.program.regions[row.segment].count for row in routed]
        flops, num_bytes, activated, rows = (float(column[0]) for column in routed_experts_work(routed[0].work, self.step))
        width = routed[0].work.width / float(self.step.chips[0] / self.step.expert_parts[0])
        yield self._row(
            "experts",
            f"{activated:,.1f} experts, {rows / max(activated, 1e-9):,.1f} rows each, width {width:g}",
            count=sum(counts),
            flops=flops,
            num_bytes=num_bytes,
            time=time / sum(counts),
            floor=self.machine.grouped_matmul.floor_time,
            quantization=self.step.formats.quantization,
        )

    def _row(
        self,
        name: str,
        shape: str,
        *,
        flops: float,
        num_bytes: float,
        time: float,
        floor: float,
        segment: int = 0,
        count: int = 0,
        quantization: Quantization = QUANTIZATIONS["bf16"],
    ) -> OperatorRow:
        """Return an operator from the work and times of one call. count: its calls; 0: those of its segment"""
        machine = self.machine
        rate = machine.peak_flop_rate * machine.serving.relative_rate.get(quantization.product, 1.0)
        ridge, count = rate / machine.memory.bandwidth, count or self.program.regions[segment % self.program.of_mixers].count
        return OperatorRow(
            name=name,
            phase="prefill" if self.step.takes_prompts else "decode",
            shape=shape,
            flops=flops * count,
            bytes=num_bytes * count,
            time=time * count,
            calls=count,
            bound=bound_of(flops, num_bytes, time, floor=floor, ridge=ridge),
            ridge=ridge,
            bandwidth=machine.memory.bandwidth,
        )


def bound_of(flops: float, num_bytes: float, time: float, *, floor: float, ridge: float) -> Bound:
    """Return the bottleneck of an operator: latency, compute or memory."""
    if floor > 0.5 * time:
        return "latency"
    return "compute" if num_bytes and flops / num_bytes > ridge else "memory"


def crossover_rows(n: float, k: float, weight_bytes: float, activation_bytes: float, ridge: float) -> float:
    """Return the rows m* from which a product is compute-bound; 0 if there are none.

    2 m n k / (w n k + a m k + 2 m n) = R / B = r:   m* = w n k r / (2 n k - r (a k + 2 n))
    """
    left = 2.0 * n * k - ridge * (activation_bytes * k + 2.0 * n)
    return weight_bytes * n * k * ridge / left if left > 0 else 0.0


__all__ = ["OperatorRow", "bound_of", "crossover_rows", "operator_rows"]
