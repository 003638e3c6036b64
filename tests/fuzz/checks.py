"""Checks of every answer: possible numbers, parts that add up, and refusals in one sentence."""

import json
import math
import re
from typing import Any

from perfmodel.foundation.errors import LONGEST_SENTENCE, InputError, PerfModelError

ROUNDING = 1e-9


class Finding(BaseException):
    """Something that must not be; no `except Exception` of the code under test swallows it."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Finding(what)


def check_prediction(prediction: Any) -> None:
    """A `Prediction`: finite, nothing negative, parts and classes add up, no utilisation above the peak."""
    check_step(
        prediction.step_time, prediction.parts, prediction.memory,
        {"mfu_causal": prediction.mfu_causal, "hfu": prediction.hfu}, prediction.tokens_per_second_per_chip,
    )  # fmt: skip


def check_step(time: float, parts: dict[str, float], memory: dict[str, float], shares: dict[str, float], rate: float) -> None:
    require(math.isfinite(time) and time > 0, f"step time {time}")
    for name, part in parts.items():
        require(math.isfinite(part) and part >= 0, f"part {name} of {part}")
    require(math.isclose(sum(parts.values()), time, rel_tol=ROUNDING), f"parts add up to {sum(parts.values())}, not {time}")
    total = memory["total"]
    require(math.isfinite(total), f"memory {total}")
    for name, value in memory.items():
        require(math.isfinite(value) and value >= 0, f"memory of {name} {value}")
    require(
        math.isclose(sum(memory.values()) - total, total, rel_tol=ROUNDING),
        f"memory adds up to {sum(memory.values()) - total}, not {total}",
    )
    for name, share in shares.items():
        require(0 <= share <= 1 + ROUNDING, f"{name} of {share}")
    require(math.isfinite(rate) and rate >= 0, f"{rate} tokens a second")


def check_refusal(error: PerfModelError, *, needs_remedy: bool = False) -> None:
    """A clear sentence: short enough to read, fit for a terminal, and it says something, of files also what to do."""
    message = str(error)
    require(10 <= len(message) <= 4100, f"a message of {len(message)} characters: {message[:200]}")
    if isinstance(error, InputError):
        check_length(message)
    require(message.replace("\n", " ").replace("\t", " ").isprintable(), f"a message that steers the terminal: {message[:200]!r}")
    require(not needs_remedy or "; " in message, f"no remedy: {message[:300]}")
    require("Traceback" not in message and "please report" not in message, message[:400])


def check_length(message: str) -> None:
    """Require each fault to be a short sentence, and all of them together to be as long as four; a path may come on top."""
    faults = re.split(r"; (?=\(\d+\) |--[\w-]+: is missing; )", message)
    require(len(message) <= 4 * LONGEST_SENTENCE + 90, f"{len(faults)} faults of {len(message)} characters: {message[:200]}")
    for fault in faults:
        require(len(fault) <= LONGEST_SENTENCE + 90, f"a fault of {len(fault)} characters: {fault}")


def check_json(text: str) -> Any:
    """One JSON object without nan or infinity."""

    def refuse(constant: str) -> None:
        raise Finding(f"{constant} in JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise Finding(f"not JSON ({error}): {text[:200]}") from None
