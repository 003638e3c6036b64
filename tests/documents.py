"""The examples in README.md, SKILL.md and docs/: read, run and compared with what stands there.

    python -m tests.documents README.md docs/predicting.md     # write what they print now into the pages

A fenced block of `sh` holds command lines, one of `python` a program; both run in one folder, in the order of the page, and a page's
programs share their names. The block of `text` after one is what it prints, one of `text first=12` its first lines, of
`text lines=6-11` those. A block `LANGUAGE file=NAME` is a file; `sh not-run: REASON` is shown alone.

`<!--figure:NAME-->8.1<!--/figure-->` holds a figure of docs/figures.json; `--figures` inserts these alone and runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "SKILL.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))

_FILE = re.compile(r"\w+ file=\S+$")
_FENCE = re.compile(r"^```(?P<info>.*)$")
_FIGURE = re.compile(r"<!--figure:(?P<name>\w+)-->(?P<value>.*?)<!--/figure-->")
# What a clock of this machine measures, and the machine itself: shown in the pages, never compared.
_MEASURED = (
    re.compile(r"evaluated in [\d.,]+ [a-zµ]+(?:, [\d.,]+ \S+ a second)?"),
    re.compile(r"(?<=took )[\d.,]+ \S+"),
    re.compile(r"(?<=tables )[\d.,]+ [µa-z]+"),
    re.compile(r"(?<=search )[\d.,]+ [µa-z]+(?![a-z])"),
    re.compile(r"^took .*$", re.MULTILINE),
    re.compile(r"torch \d[\w.+]*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its info string, its text, and the lines of the page that the text takes [first, last)."""

    info: str
    text: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A block that does something, and the block of what it prints, if it shows that."""

    block: Block
    shown: Block | None


@dataclass(slots=True)
class Runner:
    """Runs examples in the working folder; programs of one page share their names."""

    names: dict[str, Any] = field(default_factory=dict)

    def run(self, block: Block) -> str:
        """Run the block and return its standard output."""
        if _FILE.match(block.info):
            Path(block.info.partition("=")[2].strip()).write_text(block.text, encoding="utf-8")
            return ""
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(printed):
            if block.info == "python":
                exec(compile(block.text, "example", "exec"), self.names)
            else:
                for line in block.text.replace("\\\n", " ").splitlines():
                    _command(line)
        printed.seek(0)
        return printed.read()


def _command(line: str) -> None:
    from perfmodel.cli import app as cli

    words = shlex.split(line, comments=True)
    if not words:
        return
    assert words[0] == "perfmodel", f"{line}: examples call perfmodel; mark others `not-run: REASON`"
    code = cli.run(words[1:])
    assert code == 0, f"{line}: exit code {code}"


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = text.splitlines()
    start, info = None, ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and start is None:
            start, info = number + 1, fence["info"].strip()
        elif fence and start is not None:
            yield Block(info=info, text="\n".join(lines[start:number]) + "\n", first=start, last=number)
            start = None
    assert start is None, f"line {start}: a fenced block that does not end"


def examples(text: str) -> list[Example]:
    """Return the examples that a page runs. A block of `text` belongs to the one before it."""
    pairs = list(blocks(text))
    following = [*pairs[1:], None][: len(pairs)]
    return [
        Example(block=block, shown=after if after is not None and after.info.split()[:1] == ["text"] else None)
        for block, after in zip(pairs, following, strict=True)
        if block.info in ("sh", "python") or _FILE.match(block.info)
    ]


def shown_of(info: str, printed: str) -> str:
    """Return the part of what was printed that a block of `text` shows: all, its first lines, or some of its lines."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    first = re.fullmatch(r"text first=(\d+)", info)
    some = re.fullmatch(r"text lines=(\d+)-(\d+)", info)
    if first:
        lines = lines[: int(first[1])]
    elif some:
        lines = lines[int(some[1]) - 1 : int(some[2])]
    return "".join(f"{line}\n" for line in lines)


def agrees(shown: Block, printed: str) -> bool:
    """Whether a page shows what was printed, but for what a clock measures."""
    return _masked(shown.text) == _masked(shown_of(shown.info, printed))


def _masked(text: str) -> str:
    """The text without what a clock measures; lines may break elsewhere where such a figure has another length."""
    masked = text
    for pattern in _MEASURED:
        masked = pattern.sub("<measured>", masked)
    return masked if masked == text else " ".join(masked.split())


def rewritten(text: str) -> str:
    """The page with what its examples print now, in the working folder."""
    runner, lines = Runner(), text.splitlines()
    changes: list[tuple[Block, str]] = []
    for example in examples(text):
        printed = runner.run(example.block)
        if example.shown is not None and not agrees(example.shown, printed):
            changes.append((example.shown, shown_of(example.shown.info, printed)))
    for shown, printed in reversed(changes):
        lines[shown.first : shown.last] = printed.splitlines()
    return "\n".join(lines) + "\n"


def page_figures() -> dict[str, str]:
    """Return name -> figure of docs/figures.json."""
    groups = json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8"))
    return {name: value for group in groups.values() for name, value in group.items()}


def figures_of(text: str) -> dict[str, str]:
    """Return the figures that a page quotes by marker, as they stand there."""
    return {match["name"]: match["value"] for match in _FIGURE.finditer(text)}


def with_figures(text: str, figures: Mapping[str, str]) -> str:
    """Return the page with each marked figure replaced by its value in the data file."""
    return _FIGURE.sub(lambda match: f"<!--figure:{match['name']}-->{figures[match['name']]}<!--/figure-->", text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what the examples of pages print now into the pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--figures", action="store_true", help="insert the figures of docs/figures.json only; run no example")
    options = parser.parse_args()
    for page in options.pages:
        path, working_folder = page.resolve(), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
            try:
                text = path.read_text(encoding="utf-8")
                text = with_figures(text if options.figures else rewritten(text), page_figures())
            finally:
                os.chdir(working_folder)
                sys.path.remove(folder)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
