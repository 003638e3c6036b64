"""Every operator of a step with its work and its bottleneck: compute, memory, latency, links or the host (Kundu et al. 2024, section 5).

Arithmetic intensity is FLOPs over memory traffic; the ridge of a chip is its FLOP rate over its memory bandwidth. An operator is
latency-bound at any intensity if its fixed time is over half of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.evaluate import product_sizes, product_times, products_of, streaming_times
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
    amount, _, _ = costs.amounts(program, step, step.rows)
    rows = [*_products(costs.machine, program, step, amount), *_attention(costs.machine, program, step, amount)]
    if not is_prompt:
        rows += _states(costs.machine, program, step, amount)
    words = {"prompt_tokens": tokens, "prompt_cached": cached} if is_prompt else {}
    parts = {name: float(time[0]) for name, time in costs.parts(0.0 if is_prompt else sequences, cached, **words).items()}
    rows += _experts(costs.machine, program, step, parts["experts"])
    for name, bound in _BOUNDS.items():
        if parts[name] > 0:
            shape, calls = f"{float(step.rows[0]):,.0f} rows", program.num_passes if name == "passes" else 1
            rows.append(
                OperatorRow(
                    name=name, phase=phase, shape=shape, flops=0.0, bytes=0.0, time=parts[name], calls=calls, bound=bound, ridge=0.0
                )
            )
    return rows


def _row(
    machine: Machine,
    step: EngineStep,
    name: str,
    shape: str,
    *,
    count: int,
    flops: float,
    num_bytes: float,
    time: float,
    floor: float,
    quantization: Quantization = QUANTIZATIONS["bf16"],
    crossover: float = 0.0,
) -> OperatorRow:
    """Return an operator of `count` calls; work and times are those of one call."""
    ridge = _ridge(machine, quantization)
    return OperatorRow(
        name=name,
        phase="prefill" if step.takes_prompts else "decode",
        shape=shape,
        flops=flops * count,
        bytes=num_bytes * count,
        time=time * count,
        calls=count,
        bound=bound_of(flops, num_bytes, time, floor=floor, ridge=ridge),
        ridge=ridge,
        bandwidth=machine.memory.bandwidth,
        crossover=crossover,
    )


def _products(machine: Machine, program: ServingProgram, step: EngineStep, amount: Array) -> list[OperatorRow]:
    """Return the products of the layers, those in 16 bits first, and then those of the head."""
    formats = {id(products): step.formats.of(is_low) for products, is_low in products_of(program.rows)}
    rows: list[OperatorRow] = []
    of_head: list[OperatorRow] = []
    for products, times in product_times(program.rows, machine, amount, step):
        sizes, quantization = product_sizes(products, amount), formats[id(products)]
        w, a = step.formats.product_bytes(quantization)
        for at, (name, segment) in enumerate(zip(products.names, products.segments, strict=True)):
            batch, m, n, k = (float(sizes[size][at][0]) for size in ("batch", "m", "n", "k"))
            shape = f"[{m:,.1f}, {k:,g}] [{k:,g}, {n:,g}]".replace(".0, ", ", ")
            (of_head if segment == len(program.regions) - 1 else rows).append(
                _row(
                    machine,
                    step,
                    name,
                    f"{batch:g} x {shape}" if batch > 1 else shape,
                    count=program.regions[segment].count,
                    flops=2.0 * batch * m * n * k,
                    num_bytes=batch * (w * k * n + a * m * k + step.formats.element_bytes * m * n),
                    time=float(times[at][0]),
                    floor=machine.matmul.floor_time,
                    quantization=quantization,
                    crossover=crossover_rows(n, k, w, a, _ridge(machine, quantization)),
                )
            )
    return rows + of_head


def _ridge(machine: Machine, quantization: Quantization) -> float:
    """Return the ridge of products with weights in that format. [FLOP/byte]"""
    rate = machine.peak_flop_rate * machine.serving.relative_rate.get(quantization.product, 1.0)
    return rate / machine.memory.bandwidth


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


def _attention(machine: Machine, program: ServingProgram, step: EngineStep, amount: Array) -> Iterator[OperatorRow]:
    for cached in program.rows.cached:
        heads, kv_heads = amount[cached.heads], amount[cached.kv_heads]
        flops, num_bytes = cached_attention_work(cached.work, heads, kv_heads, step)
        cut = step.dcp * step.cut
        tokens = step.prompt_tokens + step.prompt_cached if step.takes_prompts else step.cached / cut
        local_heads = heads if step.takes_prompts else heads * step.dcp
        yield _row(
            machine,
            step,
            cached.name,
            f"{float(local_heads[0]):g} heads over {float(kv_heads[0]):g}, {float(tokens[0]):,.0f} tokens",
            count=program.regions[cached.segment - program.of_mixers].count,
            flops=float(flops[0]),
            num_bytes=float(num_bytes[0]),
            time=float(cached_attention_time(cached.work, heads, kv_heads, step, machine)[0]),
            floor=(machine.attention if step.takes_prompts else machine.serving.decode_attention)["flash"].floor_time,
        )


def _states(machine: Machine, program: ServingProgram, step: EngineStep, amount: Array) -> Iterator[OperatorRow]:
    """Return the state updates of decoding sequences; in prompts the products of a scan are separate rows."""
    rows = program.rows.streaming
    if not rows.names:
        return
    times, elements = streaming_times(program.rows, machine, amount), amount[rows.columns["elements"]]
    num_bytes = np.add.reduceat(amount[rows.accesses], rows.access_starts, axis=0)
    for at in np.flatnonzero(rows.segments >= program.of_mixers):
        sequences, entries = float(step.decoding[0]), float(elements[at][0])
        yield _row(
            machine,
            step,
            rows.names[at].rpartition(".")[2],
            f"{sequences:g} sequences, {entries / sequences:,.0f} elements",
            count=program.regions[rows.segments[at] - program.of_mixers].count,
            flops=float(rows.columns["element_flops"][at]) * entries,
            num_bytes=float(num_bytes[at][0]),
            time=float(times[at][0]),
            floor=float(machine.streaming.table[0][rows.columns["kernel"][at]]),
        )


def _experts(machine: Machine, program: ServingProgram, step: EngineStep, time: float) -> list[OperatorRow]:
    """Return the experts of all layers on a chip of mean load. time: of all layers"""
    if not program.rows.experts or not time:
        return []
    work = program.rows.experts[0].work
    num = sum(program.regions[routed.segment].count for routed in program.rows.experts)
    flops, num_bytes, activated, rows = (float(column[0]) for column in routed_experts_work(work, step))
    width = work.width / float(step.chips[0] / step.expert_parts[0])
    return [
        _row(
            machine,
            step,
            "experts",
            f"{activated:,.1f} experts, {rows / max(activated, 1e-9):,.1f} rows each, width {width:g}",
            count=num,
            flops=flops,
            num_bytes=num_bytes,
            time=time / num,
            floor=machine.grouped_matmul.floor_time,
            quantization=step.formats.quantization,
        )
    ]


__all__ = ["OperatorRow", "bound_of", "crossover_rows", "operator_rows"]
