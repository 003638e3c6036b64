"""A plan whose step times are affine: what a served load is made of can be written down by hand."""

from dataclasses import dataclass, replace

import numpy as np

from perfmodel.cost.serving.requests import Requests
from perfmodel.cost.serving.simulate import Benchmark, run_engine, run_pools, table_of
from perfmodel.cost.serving.simulated_metrics import summarize_runs
from perfmodel.cost.serving.times import StepTable
from perfmodel.workload.serving import Lengths, constant


@dataclass(frozen=True)
class ToySteps:
    """t = floor + row (rows) + key (keys read by decode) + square (keys read by prompts)."""

    floor: float = 5e-3
    row: float = 20e-6
    key: float = 2e-9
    square: float = 4e-10

    def decode(self, sequences, cached, new_tokens=1.0):
        return self.mixed(sequences, cached, 0.0, new_tokens=new_tokens)

    def prefill(self, tokens, cached=0.0, prompts=1.0):
        return self.mixed(0.0, 0.0, tokens, cached, prompts)

    def mixed(self, sequences, cached, prompt_tokens, prompt_cached=0.0, prompts=1.0, new_tokens=1.0):
        sequences, tokens = np.asarray(sequences, dtype=float), np.asarray(prompt_tokens, dtype=float)
        rows = sequences * new_tokens + prompts * tokens
        keys = prompts * tokens * (prompt_cached + tokens / 2)
        return self.floor + self.row * rows + self.key * sequences * cached + self.square * keys


def requests(prompt=1000, output=200, cached_fraction=0.0):
    lengths = [Lengths(least=x[0], most=x[1]) if isinstance(x, tuple) else constant(x) for x in (prompt, output)]
    return Requests(prompt=lengths[0], output=lengths[1], found_fraction=cached_fraction)


def simulate(times, requests, scheduling, places, *, limits=None, **run):
    """Run one engine with these step times, and return the metrics of its requests."""
    table, benchmark = times, Benchmark(**run)
    if not isinstance(times, StepTable):
        table = table_of(times, requests, scheduling, replace(places, max_sequences=max(places.max_sequences, 1)), benchmark)
    return summarize_runs([(run_engine(table, requests, scheduling, places, benchmark), 1)], limits or {})


def simulate_pools(pools, requests, *, limits=None, **run):
    """Run two pools, and return the metrics of their requests."""
    return summarize_runs([(run_pools(pools, requests, Benchmark(**run)), 1)], limits or {})
