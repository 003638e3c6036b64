"""Served load from step times, elementwise over plans: clients in a closed loop, Poisson arrivals at a rate, a static batch.

I, O  input and output tokens              E     tokens per step
D     decode steps, (O - 1) / E            b     running sequences
K     limit of b by cache and engine       t_d   a decode step
t_p   a prompt's own prefill               t_p'  time that it adds to the steps of the others

All times in seconds. All counts are those of one replica: c clients of R replicas are c / R here, r requests a second r / R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.serving.queueing import (
    NORMAL_99,
    RARE,
    completions_variance,
    count_99,
    relative_excess_99,
    stationary_running,
    tenth_percentile,
    wait_tail_99,
)
from perfmodel.cost.serving.requests import Filling, Requests, Scheduling, decode_steps, fill_steps, squared_variation
from perfmodel.cost.serving.times import Array, ServingTimes
from perfmodel.foundation.columns import Column

#: Least share of lockstep in a closed loop: the first of ten requests per client, which all clients send at once.
BURST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedLoad:
    """Metrics of one replica under a load, arrays over plans.

    ttft, ttft_p99         send to first token, its mean and 99th percentile over requests; infinite if the queue only grows      [s]
    tpot, tpot_p99         (latency - ttft) / (O - 1) of a request                                                                 [s]
    inter_token_p99        of all gaps between steps that a client observes                                                        [s]
    request_latency        ttft + (O - 1) tpot                                                                                     [s]
    running, queue         running sequences and requests that wait for a slot, on average                                         [-]
    requests_per_second, tokens_per_second   completed requests; output tokens                                                     [1/s]
    decode_time, prefill_time   t_d, t_p                                                                                           [s]
    is_saturated           more clients than slots, or a higher rate than the throughput
    """

    ttft: Array
    ttft_p99: Array
    tpot: Array
    tpot_p99: Array
    inter_token_p99: Array
    request_latency: Array
    running: Array
    queue: Array
    requests_per_second: Array
    tokens_per_second: Array
    decode_time: Array
    prefill_time: Array
    is_saturated: Array


def lockstep_share(requests: Requests, scheduling: Scheduling) -> Array:
    """Return the share s of clients of a closed loop that run in lockstep: the engine's only if all answers have one length.

    Prefill first, answers of one length: requests that are prefilled together end together, wave after wave. With answers of n equally
    likely lengths, one in n requests of a wave ends in a step, and its successor is prefilled at once; only the initial burst remains.
    Chunked: requests that are prefilled earlier end earlier, so waves dissolve for any lengths; s is the engine's.
    """
    n = requests.output.most - requests.output.least + 1
    s = np.asarray(scheduling.lockstep, dtype=float)
    return np.asarray(np.where(np.asarray(scheduling.chunked), s, np.minimum(s, BURST + np.maximum(s - BURST, 0.0) / n)))


def closed_loop(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, concurrency: Column, capacity: Column) -> ServedLoad:
    """Return the load of c clients, each of which sends its next request when the previous one is answered.

        b = min(c, K)
        E2E  = h0 + t_p + (b - q) t_p' + (D + m) t_d
        TTFT = h0 + t_p + s (b - q) / 2 t_p' + m t_d
        TPOT = (E2E - TTFT) / (O - 1) = [D t_d + (b - q) (1 - s / 2) t_p'] / (O - 1)
        X    = b / E2E                                      requests a second (Little's law)
        over capacity: TTFT += (c - K) / X

    h0 `first_token_time`, m `border_steps`, s `lockstep_share`, q prompts that share a step (1 except under heavy load). The latency
    without queueing does not depend on s: lockstep moves time from the decode steps to the first token. Chunked, a decode step takes no
    longer than one with prompts, so that TPOT <= D t_mixed / (O - 1). With short answers the rest is a wait of prompts for one another,
    before the first token.

    99th percentiles. TTFT: over positions in a wave and lengths of prompts. TPOT: over positions, and the number of prompts during a short
    answer. Gaps, chunked: the largest step that occurs once in a hundred. Gaps, prefill first: the prompts in one gap, spread (Poisson) or,
    in a wave, in the first gap of each request, uniformly from none to all, which is visible if D < 100.
    """
    c, K = np.asarray(concurrency, dtype=float), np.asarray(capacity, dtype=float)
    b = np.minimum(c, K)
    served = fill_steps(times, requests, scheduling, b)
    D, tokens_after = decode_steps(requests, scheduling), np.maximum(requests.output.mean - 1, 1.0)
    s, others = lockstep_share(requests, scheduling), np.maximum(b - served.together, 0.0)

    front = scheduling.first_token_time + served.prompt + scheduling.border_steps * served.decode
    wave = s * others * served.alongside
    decode_time = D * served.decode + others * served.alongside
    latency = front + decode_time
    feasible = np.greater_equal(K, 1.0) | np.greater_equal(K, c)
    rate = np.where(feasible, b / latency, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = np.where(c > K, np.maximum(c - K, 0.0) / rate, 0.0)
    behind = np.maximum(decode_time - wave / 2, 0.0)
    longest = longest_answer(served, scheduling, D)
    answering = np.minimum(behind, longest)
    ttft = front + wave / 2 + (behind - answering) + wait
    tpot = answering / tokens_after
    short = np.maximum(tenth_percentile(requests.output) - 1, 1.0)
    strays = NORMAL_99 * np.sqrt(others * completions_variance(requests.output)) * served.alongside / short

    share = others * served.steps / np.maximum(D, 1.0)
    step_time = decode_time / np.maximum(D, 1.0)
    in_chunks = chunked_gap(served, share=share, arriving=rate * step_time)
    spread = served.decode + count_99(np.where(share > RARE, share, 0.0)) * served.alongside / served.steps
    in_wave = served.decode + others * served.alongside * np.clip(1 - RARE * D, 0.0, 1.0)
    gap = np.where(np.asarray(scheduling.chunked), in_chunks, (1 - s) * spread + s * in_wave)
    return load_of(
        ttft=ttft,
        ttft_p99=ttft + np.hypot(0.49 * wave, served.prompt * relative_excess_99(requests.prompt)),
        tpot=tpot,
        tpot_p99=np.minimum(tpot + 0.49 * wave / tokens_after + strays, np.maximum(longest / tokens_after, tpot)),
        inter_token_p99=gap,
        request_latency=latency + wait,
        running=np.where(feasible, b, 0.0),
        queue=np.maximum(c - K, 0.0),
        requests_per_second=rate,
        tokens_per_second=rate * requests.output.mean,
        decode_time=served.decode,
        prefill_time=served.prompt,
        is_saturated=c > K,
    )


def longest_answer(filled: Filling, scheduling: Scheduling, steps: Array) -> Array:
    """Return the time of `steps` decode steps that are all filled with prompts; no limit if prompts run by themselves. [s]"""
    full = filled.stalled + np.maximum(filled.max_prompts - filled.together, 0.0) * filled.alongside
    return np.where(np.asarray(scheduling.chunked) | (steps <= 0), steps * full, np.inf)


def maximum_load(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, capacity: Column) -> ServedLoad:
    """Return the load of K clients, so that no slot is empty and no request waits: the highest throughput, and the latency at it."""
    return closed_loop(times, requests, scheduling, concurrency=capacity, capacity=capacity)


def static_batch(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, batch: Column, capacity: Column) -> ServedLoad:
    """Return the load of B requests that start together, with none after them: prefill of all, then decode steps over a growing cache.

        t(B) = h0 + (B / q) n t_p(q) + sum over j = 1 .. D of t_d(B, I + j E)      q = clip(T / I', 1, B) prompts a step
        over capacity: waves, t = (B / K) t(K)

    The sum uses two Gauss points, exact if the step time is cubic in the cached length. The number of waves is not rounded up: an
    engine refills slots as they empty. TTFT is the time at which the last request of the batch has its first token, as in benchmarks of
    static batches.
    """
    B, K = np.asarray(batch, dtype=float), np.asarray(capacity, dtype=float)
    b, waves = np.minimum(B, K), np.maximum(B / np.maximum(K, 1e-12), 1.0)
    D, tokens_after = decode_steps(requests, scheduling), np.maximum(requests.output.mean - 1, 1.0)
    rows, new = scheduling.rows_per_step, requests.new_tokens
    n = np.maximum(np.ceil(new / np.asarray(scheduling.step_tokens, dtype=float)), 1.0)
    q = np.clip(np.floor(np.asarray(scheduling.step_tokens, dtype=float) / new), 1.0, np.maximum(b, 1.0))
    piece = new / n
    prompts = np.maximum(b, 1.0) / q * n * times.prefill(piece, requests.found_tokens + (new - piece) / 2, q)
    first, last = requests.prompt.mean + 1, requests.prompt.mean + requests.output.mean - 1
    middle, half = (first + last) / 2, np.maximum(last - first, 0.0) / 2
    steps = [times.decode(b, middle + sign * half / np.sqrt(3.0), rows) for sign in (-1, 1)]
    decode = (steps[0] + steps[1]) / 2
    ttft = scheduling.first_token_time + prompts + scheduling.border_steps * decode
    latency = waves * (ttft + D * decode)
    feasible = np.greater_equal(K, 1.0) | np.greater_equal(K, B)
    rate = np.where(feasible, B / latency, 0.0)
    tpot = (latency - ttft) / tokens_after
    return load_of(
        ttft=ttft,
        ttft_p99=ttft + (waves - 1) / waves * latency,
        tpot=np.where(D > 0, tpot, 0.0),
        tpot_p99=np.where(D > 0, tpot, 0.0),
        inter_token_p99=steps[1],
        request_latency=latency,
        running=np.where(feasible, b, 0.0),
        queue=np.maximum(B - K, 0.0),
        requests_per_second=rate,
        tokens_per_second=rate * requests.output.mean,
        decode_time=decode,
        prefill_time=prompts,
        is_saturated=B > K,
    )


def open_loop(times: ServingTimes, requests: Requests, scheduling: Scheduling, *, rate: Column, capacity: Column) -> ServedLoad:
    """Return the load of r requests a second with Poisson arrivals, independent of the answers.

    Decode shares its steps among all running sequences: a processor-sharing queue with a state-dependent speed, whose mean number is
    insensitive to the distribution of the work. For t_d affine in b it is exactly

        b = r D t_d(b + 1) / (1 - r t_p'),   TPOT = b / (r (O - 1))

    (an arriving request finds b others), solved elementwise (`stationary.py`). Saturated if b exceeds K, or r t_p' reaches 1:
    r >= r_max = K / (t_p + (K - q) t_p' + D t_d), the throughput of K clients.

        TTFT = h0 + (half a step) P(busy) + t_p + r L t_p' + W_p + W_K + m t_d
        W_p = r S^2 (1 + cv^2) / (2 (1 - r S))     M/G/1 of prompts, S the service time of the prompt queue
        W_K = rho^(sqrt(2 (K + 1)) - 1) / (K (1 - rho)) E2E(K) (1 + cv_O^2) / 2,  rho = r / r_max     slots in the cache

    S is t_p, for chunked prompts that fit into one step divided by the number that fit. Half a step is the residual time of the step that
    runs on arrival, of time-averaged length L; chunked prompts then share their step with those that arrived in the same L.

    99th percentiles. Waits: by an exponential tail (and of prompts by their lengths). b: by a normal distribution of variance
    b / (1 - r D dt_d/db), of which 2 / 3 remain in the average over a request's own time. Prompts during a short answer, and in one
    gap: `percentiles.py`.

    Sources: Pollaczek-Khinchine; Sakasegawa, Ann. Inst. Stat. Math. 29, 1977 (M/G/K); Bonald & Proutiere, Queueing Systems 44, 2003
    (insensitivity of processor sharing with a state-dependent speed).
    """
    r, K = np.asarray(rate, dtype=float), np.asarray(capacity, dtype=float)
    D, tokens_after = decode_steps(requests, scheduling), np.maximum(requests.output.mean - 1, 1.0)
    slots = np.maximum(K, 1.0)
    full = fill_steps(times, requests, scheduling, slots)
    full_latency = full.prompt + np.maximum(slots - full.together, 0.0) * full.alongside + D * full.decode
    highest = np.where(np.greater_equal(K, 1.0), slots / full_latency, 0.0)
    saturated = r >= highest

    def of_running(count: Array) -> tuple[Array, Array]:
        some = fill_steps(times, requests, scheduling, count)
        return some.decode, some.alongside

    running, slope = stationary_running(of_running, rate=r + 0 * highest, steps=D + 0 * highest, slots=slots + 0 * r)
    b = np.where(saturated, slots, running)
    at = fill_steps(times, requests, scheduling, np.minimum(b + 1, slots))
    stable, answered = np.where(saturated, 0.0, r), np.where(saturated, highest, r)
    used = np.minimum(answered * at.alongside, 1 - 1e-9)
    decode_time = np.minimum(D * at.decode / (1 - used), longest_answer(at, scheduling, D))
    tpot = np.where(D > 0, decode_time / tokens_after, 0.0)

    chunked = np.asarray(scheduling.chunked)
    in_prompts = np.where(chunked, np.minimum(stable * at.prompt / at.together, 1.0), 0.0)
    step = in_prompts * at.stalled + (1 - in_prompts) * at.decode
    spare = np.maximum(at.max_prompts - at.together, 0.0)
    shared = np.where(chunked, np.minimum(stable * step, spare) * at.alongside, 0.0)
    residual = step / 2 * (1 - np.exp(-b))

    leaving = np.where(chunked, at.prompt / at.max_prompts, at.prompt)
    busy_prompts = np.minimum(stable * leaving, 1 - 1e-9)
    wait_prompts = stable * leaving**2 * (1 + squared_variation(requests.prompt)) / (2 * (1 - busy_prompts))
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = np.where(saturated, 0.0, np.minimum(r / highest, 1 - 1e-9))
    varied = (1 + squared_variation(requests.output)) / 2
    wait_slot = rho ** (np.sqrt(2 * (slots + 1)) - 1) / (slots * (1 - rho)) * full_latency * varied
    ttft = scheduling.first_token_time + residual + at.prompt + shared + wait_prompts + wait_slot + scheduling.border_steps * at.decode
    burst = np.where(chunked, np.minimum(count_99(stable * step), spare) * at.alongside - shared, 0.0)
    tail = wait_tail_99(wait_prompts, busy_prompts) + wait_tail_99(wait_slot, rho) + residual + np.maximum(burst, 0.0)
    tail = np.hypot(tail, at.prompt * relative_excess_99(requests.prompt))

    excess_running = np.sqrt(b / np.maximum(1 - stable * D * slope / (1 - used), 0.05))
    excess_running = NORMAL_99 * np.minimum(excess_running, np.maximum(slots - b, 0.0) / NORMAL_99)
    short = np.maximum(tenth_percentile(requests.output) - 1, 1.0)
    deviation = np.sqrt(answered * decode_time * short / tokens_after) * at.alongside / short
    tpot_p99 = tpot + (np.sqrt(2 / 3) * slope * excess_running * D / tokens_after + NORMAL_99 * deviation) / (1 - used)
    strays = NORMAL_99 * np.sqrt(slots * completions_variance(requests.output)) * full.alongside / short
    at_most = (full_latency - full.prompt) / tokens_after + strays
    tpot_p99 = np.where(D > 0, np.maximum(np.minimum(tpot_p99, at_most), tpot), 0.0)
    in_chunks = chunked_gap(at, share=np.minimum(answered * decode_time * at.steps / np.maximum(D, 1.0), 1.0), arriving=answered * step)
    first = at.decode + count_99(answered * at.decode, answered * at.alongside) * at.alongside
    gaps = np.where(chunked, in_chunks, first) + slope * excess_running

    endless = np.where(saturated, np.inf, 0.0)
    waiting = wait_prompts + wait_slot
    return load_of(
        ttft=ttft + endless,
        ttft_p99=ttft + tail + endless,
        tpot=tpot,
        tpot_p99=tpot_p99,
        inter_token_p99=gaps,
        request_latency=ttft + decode_time + endless,
        running=np.where(saturated, np.where(np.greater_equal(K, 1.0), slots, 0.0), answered * (at.prompt + decode_time)),
        queue=np.where(saturated, np.inf, r * waiting),
        requests_per_second=answered,
        tokens_per_second=answered * requests.output.mean,
        decode_time=at.decode,
        prefill_time=at.prompt,
        is_saturated=saturated,
    )


def load_of(**columns: NDArray[Any] | float) -> ServedLoad:
    """Return the record of columns that broadcast with one another."""
    return ServedLoad(**dict(zip(columns, (np.array(column) for column in np.broadcast_arrays(*columns.values())), strict=True)))


def chunked_gap(filled: Filling, *, share: Array, arriving: Array) -> Array:
    """Return the 99th percentile of gaps if prompts are chunked into decode steps. [s]

    share     of steps with a prompt
    arriving  expected arrivals of prompts during a step, which will then share one

    The largest number k of prompts for which share P(k - 1 more) is over one in a hundred, limited by the prompts that fit into a step.
    """
    more = np.minimum(
        count_99(arriving, rare=np.minimum(RARE / np.maximum(share, 1e-12), 1.0)), np.maximum(filled.max_prompts - filled.together, 0.0)
    )
    return np.where(share > RARE, filled.stalled + more * filled.alongside, filled.decode)
