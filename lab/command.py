"""Shared parts of the commands `python -m lab.NAME CASES.jsonl`: bad input prints one sentence and exits with code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from perfmodel.foundation.errors import PerfModelError

P = ParamSpec("P")


def command_parser(name: str, doc: str | None, *, cases: bool = True) -> argparse.ArgumentParser:
    """Return the parser of `lab.NAME`, described by the first line of its docstring. cases: the first argument is a file of runs."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0], prog=f"python -m lab.{name}")
    if cases:
        parser.add_argument("cases", type=Path, metavar="CASES.jsonl", help="published training runs, one JSON object a line")
    return parser


def exits_on_errors(main: Callable[P, None]) -> Callable[P, int]:
    """Return `main` with an exit code: 0, or 2 after an error of this package, which is printed on stderr."""

    @wraps(main)
    def run(*arguments: P.args, **named: P.kwargs) -> int:
        try:
            main(*arguments, **named)
        except PerfModelError as error:
            print(error, file=sys.stderr)
            return 2
        return 0

    return run
