"""ARCHITECTURE.md and the code map name folders and files that exist; a type has one meaning; what people call is documented."""

import ast
import re
from collections import Counter

import pytest

import perfmodel
from perfmodel.cli.app import VERBS
from tests.contracts.sources import PACKAGE, modules, tree_of

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
    pages = ("ARCHITECTURE.md", "docs/project/code-map.md")
    named = [mentioned for page in pages for line in (ROOT / page).read_text(encoding="utf-8").splitlines() for mentioned in places(line)]
    assert len(named) > 60
    assert [name for name in named if not exists(name)] == []


def test_a_name_that_is_not_there_is_found():
    assert not exists("cost/nothing.py")
    assert list(places("| x | `cost/step.py`, `nothing.py`; `search/` |")) == ["cost/step.py", "cost/nothing.py", "search/"]


def test_no_type_name_has_two_meanings():
    names = Counter(node.name for path in modules() for node in tree_of(path).body if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1 and not name.startswith("_")] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_documents(verb):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"perfmodel {verb}" in text or f"`{verb}`" in text for text in (page.read_text(encoding="utf-8") for page in pages))


@pytest.mark.parametrize("name", sorted(set(perfmodel.__all__) - {"__version__"}))
def test_every_public_name_says_what_it_is(name):
    value = getattr(perfmodel, name)
    assert value.__doc__, f"{name}: write a docstring"
    assert not value.__doc__.startswith(f"{name}("), f"{name}: dataclasses write that line themselves; say what it is"
