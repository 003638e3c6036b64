"""Random inputs of every kind: `python -m tests.fuzz.run --inputs 100000 --seed 1`. Exit code 1 where something must not have been.

An input depends on the seed, its kind and its number alone, so `--kind plans --only 1234` tries one again.
"""

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.checks import Finding
from tests.fuzz.kinds import KINDS, SHARES

PATIENCE = 20.0  # seconds of processor time for one input
MEMORY = 12 * 2**30


@dataclass
class Outcome:
    """taken: inputs that were not refused; findings: what must not have been, as (kind, number, trace)."""

    tried: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, int, str]] = field(default_factory=list)


def kind_of(number: int) -> str:
    """The kind of the input with this number: each hundred holds all kinds by their shares, mixed."""
    order = [kind for kind, share in SHARES.items() for _ in range(share)]
    return order[number * 37 % len(order)]


def try_one(kind: str, number: int, seed: int, folder: Path, outcome: Outcome) -> None:
    outcome.tried[kind] += 1
    try:
        with _limited(PATIENCE):
            outcome.taken[kind] += KINDS[kind](random.Random(f"{seed} {kind} {number}"), folder)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:
        outcome.findings.append((kind, number, traceback.format_exc()))


def fuzz(inputs: int, seed: int, *, kinds: tuple[str, ...] = tuple(KINDS), progress: Callable[[int], None] = lambda _: None) -> Outcome:
    outcome = Outcome()
    with _own_folder() as folder:
        for number in range(inputs):
            kind = kind_of(number)
            if kind in kinds:
                try_one(kind, number, seed, folder, outcome)
            progress(number + 1)
    return outcome


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A home and a working folder that no real file is in."""
    before, home = Path.cwd(), os.environ.get("HOME")
    with tempfile.TemporaryDirectory(prefix="perfmodel-fuzz-") as name:
        os.chdir(name)
        os.environ["HOME"] = name
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            os.environ.pop("HOME")
            if home is not None:
                os.environ["HOME"] = home


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Finding(f"took over {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def report(outcome: Outcome) -> str:
    lines = [f"{kind:<12}{outcome.tried[kind]:>9,} tried{outcome.taken[kind]:>9,} taken" for kind in KINDS if outcome.tried[kind]]
    last_lines = Counter(trace.strip().splitlines()[-1][:160] for _, _, trace in outcome.findings)
    lines += [f"{len(outcome.findings)} findings of {outcome.tried.total():,} inputs"]
    lines += [f"{count:>6} x {line}" for line, count in last_lines.most_common(40)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; may be given several times")
    parser.add_argument("--only", type=int, help="the one input of this number")
    parser.add_argument("--traces", type=int, default=5, help="traces to print, of different kinds of findings")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    kinds = tuple(options.kind or KINDS)
    start = time.monotonic()
    if options.only is not None:
        outcome = Outcome()
        with _own_folder() as folder:
            for kind in kinds if options.kind else (kind_of(options.only),):
                try_one(kind, options.only, options.seed, folder, outcome)
    else:
        steps = max(options.inputs // 20, 1)

        def tell(done: int) -> None:
            if done % steps == 0:
                print(f"{done:,} inputs, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

        outcome = fuzz(options.inputs, options.seed, kinds=kinds, progress=tell)
    seen = set()
    for kind, number, trace in outcome.findings:
        frames = "\n".join(line for line in trace.splitlines() if "perfmodel/" in line)[-200:]
        if frames not in seen and len(seen) < options.traces:
            seen.add(frames)
            print(f"--- --kind {kind} --only {number}\n{trace}")
    print(report(outcome))
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    sys.exit(main())
