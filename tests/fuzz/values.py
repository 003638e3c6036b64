"""Unexpected values, and ways to break the contents of a file."""

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1.5, -0.0, float("nan"), float("inf"), 1e300, 1e-300, 2**31 - 1, 2**31, 2**63,
    10**39, 10**400, "", " ", "x", "8k", "4M", "10%", "1e999", "nan", "0", "-3", "1,2", "tp=2", "none", "full",
    "NaN GB/s", "0 B/s", "5e-324 B/s", "1e300 TB/s", "450 GB/s", "450", "1 ns", "-1 us", "\ud800", "\x1b[31m", "a\0b", "é", "x" * 5000,
    "d/" * 3000, "../..", "/dev/zero", ".", "~", [], [1], [1, 2, 2, 1], ["tp"], [[]], {}, {"a": 1}, {"name": "x"}, (), (1, 2),
    b"x", 1j, object,
)  # fmt: skip
PLAIN = tuple(value for value in ODD if value is None or isinstance(value, (bool, int, float, str, list, dict)))


def odd(rng: random.Random, like: Any = None, choices: tuple[Any, ...] = PLAIN) -> Any:
    """Another value: near `like` where it is a number or a text, or anything."""
    if rng.random() < 0.5:
        if isinstance(like, bool):
            return not like
        if isinstance(like, int):
            return rng.choice(
                (like * 2, like * 3, like + 1, like - 1, -like, like // 2, float(min(like, 10**300)), str(like), rng.randint(1, 64))
            )
        if isinstance(like, float):
            return rng.choice((like * 1e3, like * 1e-3, like * 1e30, -like, 1.0, 0.0, 1.0 / (like or 1.0), like + 1.0))
        if isinstance(like, str) and like:
            cut = rng.randrange(len(like) + 1)
            return rng.choice((like[:cut], like + like, like.upper(), like[::-1], like[:cut] + rng.choice("0 9e.%GkT/s-") + like[cut:]))
    return copy.deepcopy(rng.choice(choices))


def places(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are in nested mappings and lists."""
    paths = [prefix] if prefix else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        paths += places(value, (*prefix, key))
    return paths


def mutate(rng: random.Random, data: dict[str, Any], *, most: int = 3) -> dict[str, Any]:
    """A copy with up to `most` values changed, removed, added or swapped."""
    broken = copy.deepcopy(data)
    for _ in range(rng.randint(0, most)):
        known = places(broken)
        if not known:
            break
        *path, last = rng.choice(known)
        holder = broken
        for key in path:
            holder = holder[key]
        match rng.choice(("change", "change", "change", "remove", "add", "swap")):
            case "change":
                holder[last] = odd(rng, holder[last])
            case "remove":
                del holder[last]
            case "add" if isinstance(holder, dict):
                holder[rng.choice((f"{last}x", "notes", "x", "", "\ud800"))] = odd(rng)
            case "swap" if isinstance(holder, dict):
                other = rng.choice(list(holder))
                holder[last], holder[other] = holder[other], holder[last]
    return broken


def scramble(rng: random.Random, text: str) -> str:
    """The text with a few pieces cut, doubled or replaced."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 2, 10, 100)))
        piece = rng.choice(
            ("", text[start:end] * 2, "[", "{", ": ", "- ", "&a ", "*a", "<<: ", "\n", "!!python/object:os.system ", "\x00", "9" * 50)
        )
        text = text[:start] + piece + text[end:]
    return text
