"""ARCHITECTURE.md names folders and files that exist."""

import re
from pathlib import Path

import perfmodel

PACKAGE = Path(perfmodel.__file__).parent
ROOT = PACKAGE.parent
NAME = re.compile(r"`([\w./*-]+(?:/|\.(?:py|yaml|json|md)))`")


def places(line):
    """Every file or folder that a line names; one without a folder lies in the folder named last in the line."""
    folder = None
    for name in NAME.findall(line):
        if "/" in name:
            folder = name if name.endswith("/") else name.rpartition("/")[0]
            yield name
        elif folder is not None and not (ROOT / name).exists():
            yield f"{folder.rstrip('/')}/{name}"
        else:
            yield name


def exists(name):
    return any(list(base.glob(name.rstrip("/"))) for base in (PACKAGE, ROOT))


def test_what_the_map_names_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = [place for line in text.splitlines() for place in places(line)]
    assert len(named) > 60
    assert [name for name in named if not exists(name)] == []


def test_a_name_that_is_not_there_is_found():
    assert not exists("cost/nothing.py")
    assert list(places("| x | `cost/step.py`, `nothing.py`; `search/` |")) == ["cost/step.py", "cost/nothing.py", "search/"]
