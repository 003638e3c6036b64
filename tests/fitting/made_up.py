"""Runs of a made-up framework, with steps as perfmodel predicts them."""

from __future__ import annotations

import json
from functools import cache

import perfmodel
from perfmodel.frameworks.profile import load_profile

#: What its loop does otherwise than the one that a fit starts from.
TRUTH = {"matmul_rate_fraction": 0.6, "rms_norm_traffic": 8.0}
BASE = "torch-fsdp2"
JOB = {"model": "llama-3-8b", "chip": "h100-sxm-80gb", "chips": 16, "global_batch": 64}
PLANS = (
    {"tp": 1, "dp": 16, "zero": 3, "micro_batch": 1, "seq_len": 4096},
    {"tp": 1, "dp": 16, "zero": 3, "micro_batch": 2, "seq_len": 2048},
    {"tp": 2, "dp": 8, "zero": 3, "micro_batch": 1, "seq_len": 4096, "recompute": "full"},
    {"tp": 4, "dp": 4, "zero": 3, "micro_batch": 2, "seq_len": 4096},
    {"tp": 1, "dp": 16, "zero": 3, "micro_batch": 1, "seq_len": 8192, "recompute": "full"},
)


@cache
def rows() -> tuple[dict[str, object], ...]:
    """One for each plan, with its step time."""
    profile = load_profile(BASE).having(**TRUTH)
    runs = []
    for plan in PLANS:
        asked = {**JOB, **plan}
        predicted = perfmodel.predict(cluster=asked.pop("chip"), **asked, profile=profile)
        runs.append({"id": f"run-{len(runs)}", **JOB, **plan, "step_time": predicted.step_time})
    return tuple(runs)


def changed(index: int, **values: object) -> dict[str, object]:
    return {**rows()[index], **values}


def csv_text(runs) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run))
    return "\n".join([",".join(names), *(",".join(str(run.get(name, "")) for name in names) for run in runs)]) + "\n"


def jsonl_text(runs) -> str:
    return "".join(json.dumps(run) + "\n" for run in runs)
