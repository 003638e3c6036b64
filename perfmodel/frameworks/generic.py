"""Profile of an unknown framework, the mean of the known ones.

Every family of frameworks has weight 1. A switch or a word is that of most families. A number is their mean; for rates, factors and host
times it is the geometric mean. Numbers that a framework took from others do not count, nor do options of parallelism that it cannot run.
So `generic` is between fused and eager frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.ensemble import can_have, known_families
from perfmodel.frameworks.options import KIND_OF
from perfmodel.frameworks.profile import GENERIC, ExecutionProfile
from perfmodel.frameworks.runnable import ANYTHING
from perfmodel.hardware.calibration import ATTENTION_KERNELS
from perfmodel.hardware.reader import list_calibrations, load_calibration
from perfmodel.parallel.choices import ZERO_STAGES

#: Properties of one cluster, not of a framework.
_NOT_SHARED = frozenset({"host_layer_time_per_tp_across_nodes", "places_layers_by_cost"})

#: Behaviour that was measured in one framework's allocator only: delays that its own collectives and accumulators cause.
SAFE_MEMORY = {
    "delayed_collectives": 0.0,
    "waiting_gradient_fraction": 0.0,
    "gradient_copy_bytes": 0.0,
}

#: Options that together determine the memory of weights, gradients and optimizer states. They are those of one framework, because a mixture
#: would need more or less memory than any framework: torch's own, which most training loops use. Without it, each is the most common value.
MEMORY_ACCOUNT = "torch-fsdp2"
ACCOUNTED = ("stores_master_weights", "accumulate_dtype", "zero2_stores_shards")

#: Numbers without a meaningful mean, because 0 means another behaviour: the most common value is taken.
_VOTED = ("bucket_bytes",)

_HOST_TIMES = ("host_launch_time", "step_time_constant")

#: Peak memory, which may end a job: the largest of the families, not the mean.
_MOST = ("loss_peak_bytes",)


def generic_profile(families: dict[str, list[ExecutionProfile]] | None = None) -> ExecutionProfile:
    """Return one profile from those of several families."""
    known = known_families() if families is None else families
    if not known:
        raise InputError("families: none is left; give profiles that name their family")
    every = [profile for profiles in known.values() for profile in profiles]
    values: dict[str, object] = {}
    for option, kind in KIND_OF.items():
        match kind:
            case "bool" | "str":
                values[option] = _most_common(known.values(), option)
            case "float":
                vote = _most_common if option in _VOTED else _mean
                values[option] = vote(known.values(), option)
    values["attention_rate_fraction"] = _attention_rate(known.values(), str(values["attention_kernel"]))
    values |= {name: profile.option(name) for profile in every if profile.name == MEMORY_ACCOUNT for name in ACCOUNTED}
    values["overlaps_gradients"] = ZERO_STAGES  # the delayed part is a share, which can be fitted
    values |= {name: max(_mean([profiles], name) for profiles in known.values()) for name in _MOST}
    values |= SAFE_MEMORY | {name: type(values[name])(0) for name in _NOT_SHARED}  # type: ignore[call-arg]
    names = ", ".join(f"{name} ({', '.join(profile.name for profile in profiles)})" for name, profiles in sorted(known.items()))
    has_account = any(profile.name == MEMORY_ACCOUNT for profile in every)
    account = f"; what weights, gradients and states take as in {MEMORY_ACCOUNT}" if has_account else ""
    identity = {
        "name": GENERIC,
        "family": "",
        "unknown": (),
        "default_attention": "flash",
        "runs": ANYTHING,
        "source": f"the mean of {len(known)} families, each weighing one, of what each knows: {names}{account} (lab.generic)",
    }
    return every[0].having(release="", **values | identity)  # type: ignore[arg-type]


def _capable_profiles(families: Iterable[Sequence[ExecutionProfile]], name: str) -> list[Sequence[ExecutionProfile]]:
    """Return the profiles of each family that can run the plans to which the option applies; all profiles if none can."""
    every = list(families)
    able = [[profile for profile in profiles if can_have(profile, name)] for profiles in every]
    return [profiles for profiles in able if profiles] or every


def _most_common(families: Iterable[Sequence[ExecutionProfile]], name: str) -> Any:
    """Return the value that most families have; ties go to the first by name.

    For options that only some families can run (tensor parallelism), two or three families are left: ties go to the value of more
    frameworks.
    """
    every = list(families)
    able = _capable_profiles(every, name)
    votes: dict[Any, tuple[float, int]] = {}
    for profiles in able:
        for profile in profiles:
            behaviour = profile.option(name)
            weight, number = votes.get(behaviour, (0.0, 0))
            votes[behaviour] = (round(weight + 1.0 / len(profiles), 9), number + (len(able) < len(every)))
    return max(sorted(votes, key=str), key=lambda behaviour: votes[behaviour])


def _is_ratio(name: str) -> bool:
    """Return whether a number has a geometric mean: host times differ by factors too, as in the priors of every fit."""
    return name.endswith(("rate_fraction", "_traffic", "_factor", "_weight")) or name in ("logit_bytes", *_HOST_TIMES)


def _mean(families: Iterable[Sequence[ExecutionProfile]], name: str) -> float:
    means = []
    for profiles in _capable_profiles(families, name):
        values = []
        for profile in profiles:
            value = float(profile.option(name))
            if name == "exposed_gradient_fraction":
                # at ZeRO stages that wait for the end of backward the whole reduction is exposed
                stages = profile.runs.sharding.zero
                waiting = sum(stage not in profile.communication.overlaps_gradients for stage in stages) / len(stages)
                values.append(waiting + (1.0 - waiting) * value)
            elif name not in profile.unknown and (value or name not in _HOST_TIMES):  # a host time of zero is none about others
                values.append(value)
        if values:
            means.append(float(np.mean(np.log(values) if _is_ratio(name) else values)))
    if not means:
        return 1.0 if _is_ratio(name) and name not in _HOST_TIMES else 0.0
    mean = float(np.mean(means))
    return float(f"{np.exp(mean) if _is_ratio(name) else mean:.3g}")


def _attention_rate(families: Iterable[Sequence[ExecutionProfile]], kernel: str) -> float:
    """Return the mean of the families' rates of fused attention relative to `kernel`, including the rates of their generations."""
    generations = [calibration.sustained.attention_generations for calibration in map(load_calibration, list_calibrations())]
    rates = {
        generation: float(
            np.exp(np.mean([np.log(by_kernel.get(generation, 1.0) / by_kernel.get(kernel, 1.0)) for by_kernel in generations if by_kernel]))
        )
        for generation in ATTENTION_KERNELS
    }

    def with_kernel(profile: ExecutionProfile) -> ExecutionProfile:
        return profile.having(attention_rate_fraction=profile.rates.attention_rate_fraction * rates[profile.kernels.attention_kernel])

    return _mean([[with_kernel(profile) for profile in profiles] for profiles in families], "attention_rate_fraction")
