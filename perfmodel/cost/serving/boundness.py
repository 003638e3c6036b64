"""Every operator of a step with its work and what bounds it: compute, memory, latency, links or the host (Kundu et al. 2024, section 5).

Intensity is FLOP over bytes that must move; the ridge of a chip is its FLOP rate over its memory bandwidth. An operator whose fixed time is
over half of what it takes is bound by latency, whatever its intensity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.machine import Machine
from perfmodel.cost.serving.routing import share_met
from perfmodel.cost.serving.states import UPDATE_KERNELS, state_bytes, state_elements, update_flops
from perfmodel.cost.serving.step import PARTS, StepCosts, keys_within
from perfmodel.cost.serving.work import Work
from perfmodel.foundation.dtypes import itemsize
from perfmodel.hardware.calibration import KERNEL_CODE
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.quantization import Quantization

Array = NDArray[np.float64]
Bound = Literal["compute", "memory", "latency", "link", "host"]
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One operator of one step on one chip, all layers of its kind together.

    shape       [m, n, k] of a product on this chip; of others what they have
    flops, bytes, time   of all its calls   [FLOP, byte, s]
    calls       how often a step runs it
    intensity   flops / bytes      ridge: the intensity from which computing takes longer than memory   [FLOP/byte]
    bandwidth   of the chip's memory [byte/s]
    crossover   rows of a step from which the product is bound by compute; 0: there is none
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


def operator_rows(costs: StepCosts, *, phase: Phase, sequences: float = 0.0, cached: float = 0.0, tokens: float = 0.0) -> list[OperatorRow]:
    """Operators of a step that decodes `sequences` over `cached` tokens, or of a prompt of `tokens` after `cached`, for the first plan."""
    is_prompt = phase == "prefill"
    program = costs.prompt_program if is_prompt else costs.decode_program
    ranks, met = float(costs.dp[0] * costs.pp[0]), max(sequences / float(costs.pp[0]), 1.0)
    work = Work(
        decoding=np.array([0.0 if is_prompt else max(sequences / ranks, 1.0)]),
        cached=np.array([max(cached, 1.0)]),
        new_tokens=np.array([1.0]),
        prompts=np.array([1.0 if is_prompt else 0.0]),
        prompt_tokens=np.array([tokens if is_prompt else 0.0]),
        prompt_cached=np.array([cached if is_prompt else 0.0]),
        tokens=np.array([tokens if is_prompt else met]),
        copies=np.array([0.0 if is_prompt else (float(costs.pcp[0]) - 1.0) * met]),
        sharing=costs.pcp[:1],
    )
    rows = _products(costs, work, phase)
    rows += _attention(costs, work, phase)
    rows += _states(costs, work, phase)
    parts = costs.parts(
        0.0 if is_prompt else sequences,
        cached,
        prompt_tokens=tokens if is_prompt else 0.0,
        prompt_cached=cached if is_prompt else 0.0,
    )
    rows += _experts(costs, work, phase, float(parts["experts"][0]))
    for name, bound in (("passes", "memory"), ("communication", "link"), ("pipeline_sends", "link"), ("host", "host")):
        time = float(parts[name][0])
        if time > 0:
            shown: Bound = bound  # type: ignore[assignment]
            shape = f"{float(work.rows[0]):,.0f} rows"
            calls = len(program.rows.streaming.names) if name == "passes" else 1
            rows.append(
                OperatorRow(name=name, phase=phase, shape=shape, flops=0.0, bytes=0.0, time=time, calls=calls, bound=shown, ridge=0.0)
            )
    return rows


def _products(costs: StepCosts, work: Work, phase: Phase) -> list[OperatorRow]:
    program = costs.prompt_program if phase == "prefill" else costs.decode_program
    machine, found = costs.machine, []
    for calls in costs.calls(program, work):
        quantization, times = costs.format_of(calls), costs.product_time(program, calls)
        w, a = quantization.weight_bytes, quantization.activation_bytes
        ridge = _ridge(machine, quantization)
        for at, place in enumerate(calls.which):
            batch, m, n, k = (float(getattr(calls, name)[at][0]) for name in ("batch", "m", "n", "k"))
            time = float(times[at][0])
            moved = batch * (w * k * n + a * m * k + 2.0 * m * n)
            flops = 2.0 * batch * m * n * k
            count = program.regions[program.fused.region[place]].count
            shape = f"[{m:,.1f}, {k:,g}] [{k:,g}, {n:,g}]".replace(".0, ", ", ")
            found.append(
                OperatorRow(
                    name=" + ".join(program.fused.names[place]),
                    phase=phase,
                    shape=f"{batch:g} x {shape}" if batch > 1 else shape,
                    flops=flops * count,
                    bytes=moved * count,
                    time=time * count,
                    calls=count,
                    bound=bound_of(flops, moved, time, floor=machine.matmul.floor_time, ridge=ridge),
                    ridge=ridge,
                    bandwidth=machine.memory_bandwidth,
                    crossover=crossover_rows(n, k, w, a, ridge),
                )
            )
    return found


def _ridge(machine: Machine, quantization: Quantization) -> float:
    """[FLOP/byte] Of products of weights in that format."""
    rate = machine.peak_flop_rate * machine.serving.relative_rate.get(quantization.product, 1.0)
    return rate / machine.memory_bandwidth


def bound_of(flops: float, num_bytes: float, time: float, *, floor: float, ridge: float) -> Bound:
    """Bottleneck of an operator: latency, compute or memory."""
    if floor > 0.5 * time:
        return "latency"
    return "compute" if num_bytes and flops / num_bytes > ridge else "memory"


def crossover_rows(n: float, k: float, weight_bytes: float, activation_bytes: float, ridge: float) -> float:
    """Rows m* at which 2 m n k / (w n k + a m k + 2 m n) is the ridge R / B: w n k r / (2 n k - r (a k + 2 n)); 0 where none is enough."""
    left = 2.0 * n * k - ridge * (activation_bytes * k + 2.0 * n)
    return weight_bytes * n * k * ridge / left if left > 0 else 0.0


def _attention(costs: StepCosts, work: Work, phase: Phase) -> list[OperatorRow]:
    is_prompt = phase == "prefill"
    program = costs.prompt_program if is_prompt else costs.decode_program
    machine, found = costs.machine, []
    for row, count, time in costs.attention_rows(program, work):
        heads, kv_heads, width = float(row.heads[0]), float(row.kv_heads[0]), row.head_dim + row.value_dim
        if is_prompt:
            q, x = float(work.prompt_tokens[0]), float(work.prompt_cached[0])
            tokens = q + x
            own = float(work.own_prompt_rows[0])
            flops = 2.0 * heads * own * keys_seen(program.model, q, x) * width
            moved = 2.0 * (heads * own * width + kv_heads * tokens * width)
        else:
            b, heads, cut = float(work.decoding[0]), heads * float(costs.dcp[0]), float(costs.dcp[0] * costs.pcp_cut[0])
            tokens = float(work.cached[0]) / cut
            seen = keys_seen(program.model, 1.0, float(work.cached[0]) - 1.0) / cut
            flops = 2.0 * b * heads * seen * width
            of_cache = row.head_dim if row.is_latent else width  # a value is a part of its latent
            moved = b * (kv_heads * seen * of_cache * itemsize(costs.cache) + 2.0 * heads * width)
        ridge = machine.peak_flop_rate / machine.memory_bandwidth
        floor = machine.attention["flash"].floor_time if is_prompt else machine.decode_attention["flash"].floor_time
        found.append(
            OperatorRow(
                name=row.name,
                phase=phase,
                shape=f"{heads:g} heads over {kv_heads:g}, {tokens:,.0f} tokens",
                flops=flops * count,
                bytes=moved * count,
                time=time * count,
                calls=int(count),
                bound=bound_of(flops, moved, time, floor=floor, ridge=ridge),
                ridge=ridge,
                bandwidth=machine.memory_bandwidth,
            )
        )
    return found


def _states(costs: StepCosts, work: Work, phase: Phase) -> list[OperatorRow]:
    """State updates of sequences that decode; in prompts the products of a scan are rows of their own."""
    if phase == "prefill":
        return []
    machine, model, b, tp = costs.machine, costs.decode_program.model, float(work.decoding[0]), float(costs.tp[0])
    found = []
    for mixer, count, times in costs.state_times(costs.decode_program, work, 1):
        elements, time = state_elements(model, mixer) / tp, float(times[0])
        flops, moved = b * update_flops(model, mixer) / tp, 2.0 * b * state_bytes(model, mixer) / tp
        ridge = machine.peak_flop_rate / machine.memory_bandwidth
        floor = float(machine.streaming.table[0][KERNEL_CODE[UPDATE_KERNELS[mixer]]])
        found.append(
            OperatorRow(
                name=f"{mixer} states",
                phase=phase,
                shape=f"{b:g} sequences, {elements:,.0f} elements",
                flops=flops * count,
                bytes=moved * count,
                time=time * count,
                calls=count,
                bound=bound_of(flops, moved, time, floor=floor, ridge=ridge),
                ridge=ridge,
                bandwidth=machine.memory_bandwidth,
            )
        )
    return found


def keys_seen(model: TransformerConfig, queries: float, before: float) -> float:
    """Keys that each of the new tokens sees after `before` others, on average over them and over layers with a window and without."""
    if model.latent is not None and model.latent.index_heads:
        return float(keys_within(model.latent.index_top, queries, before))
    window, share = float(model.sliding_window or model.attention_chunk), model.sliding_layer_fraction
    whole = before + 0.5 * (queries + 1.0)
    return share * float(keys_within(window, queries, before)) + (1.0 - share) * whole if share else whole


def _experts(costs: StepCosts, work: Work, phase: Phase, time: float) -> list[OperatorRow]:
    program = costs.decode_program
    experts = program.model.experts
    if experts is None or not time:
        return []
    num = sum(program.regions[region].count for region in program.experts)
    chips, ep = float(costs.dp[0] * costs.pcp[0] * costs.tp[0]), float(costs.expert_parts[0])
    tokens = float(work.tokens[0])
    met = experts.num_experts * float(share_met(tokens, experts.num_experts, experts.top_k)) / ep
    width = experts.width / (chips / ep)
    matrices = 3.0 if experts.gated else 2.0
    rows = (tokens + float(work.copies[0])) * experts.top_k / ep
    flops = 2.0 * rows * matrices * width * program.model.hidden_size
    weight_bytes = costs.quantization.weight_bytes
    moved = met * matrices * width * program.model.hidden_size * weight_bytes + 4.0 * rows * program.model.hidden_size
    ridge = _ridge(costs.machine, costs.quantization)
    shape = f"{met:,.1f} experts, {rows / max(met, 1e-9):,.1f} rows each, width {width:g}"
    bound = bound_of(flops, moved, time / num, floor=costs.machine.grouped_matmul.floor_time, ridge=ridge)
    return [
        OperatorRow(
            name="experts",
            phase=phase,
            shape=shape,
            flops=flops * num,
            bytes=moved * num,
            time=time,
            calls=num,
            bound=bound,
            ridge=ridge,
            bandwidth=costs.machine.memory_bandwidth,
        )
    ]


__all__ = ["PARTS", "OperatorRow", "bound_of", "crossover_rows", "operator_rows"]
