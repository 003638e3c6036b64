"""Sphinx extension: pages that are generated when the site is built, and links that leave docs/.

A page holds a line `<!--site:NAME ARGUMENT-->`, which is replaced by generated Markdown when Sphinx reads the page:

    commands        every command with its options, from the command line itself
    signature NAME  the arguments of a public function, from perfmodel/signatures.pyi
    type NAME       the fields or members of a public type, from the type itself
    file NAME       a page of the root of the checkout, such as ARCHITECTURE.md

A link to a page of the root or to a notebook becomes a link to its page on the site. A link to another file becomes plain text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: Pages of the root of the checkout -> their pages on the site.
ROOT_PAGES = {name: f"project/{name.lower()}" for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
ROOT_PAGES["README.md"] = "index.md"

_MARK = re.compile(r"^<!--site:(?P<name>\w+)(?: (?P<argument>[\w.]+))?-->$", re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_ROW = re.compile(r"(?P<name>[\w.,/ ]*?\w)(?:  +|: )(?P<text>\S.*)")


class BrokenLinkError(Exception):
    """A page links a file that does not exist."""


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("source-read", _on_read)
    app.add_lexer("csv", TextLexer)
    return {"parallel_read_safe": True}


def _on_read(app: Any, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        source[0] = page_text(source[0], path)


def page_text(text: str, path: Path) -> str:
    """Return the Markdown of a page with its generated parts and with links for the site."""
    makers: dict[str, Callable[[str], str]] = {
        "commands": lambda _: commands_text(),
        "signature": signature_text,
        "type": type_text,
        "file": lambda name: site_links((ROOT / name).read_text(encoding="utf-8"), folder=ROOT, page=path),
    }
    text = site_links(text, folder=path.parent, page=path)
    return _MARK.sub(lambda mark: makers[mark["name"]](mark["argument"] or ""), text)


def site_links(text: str, *, folder: Path, page: Path) -> str:
    """Return the text of a file in `folder` with its links as they are on `page`."""

    def replaced(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link["target"]))
        if not target.exists():
            raise BrokenLinkError(f"{page.relative_to(ROOT)}: links {link['target']}, which does not exist")
        name = target.relative_to(ROOT).as_posix()
        if name in ROOT_PAGES:
            target = DOCS / ROOT_PAGES[name]
        elif target.suffix == ".ipynb":  # a link in docs/tutorials to a notebook, of which Sphinx follows the symbolic link
            return f"{{doc}}`{link['text']} </tutorials/{target.stem}>`"
        elif DOCS not in target.parents or target.is_dir():
            return link["text"]
        return f"{link['image']}[{link['text']}]({os.path.relpath(target, page.parent)}{link['anchor'] or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


def commands_text() -> str:
    """Return a section for every command: what it does, its options in groups, examples."""
    from perfmodel.cli import app, help

    sections = []
    for heading, verbs in help.COMMANDS.items():
        sections += [f"## {heading}", "", *(_command_text(verb, app.command_of(verb)) for verb in verbs)]
    return "\n".join(sections)


def _command_text(verb: str, command: Any) -> str:
    from perfmodel.cli import examples, help

    lines = [f"### {verb}", "", *_paragraphs(command.help or ""), "```sh"]
    lines += [line for example in examples.EXAMPLES[verb] for line in help.shell_lines(f"perfmodel {example}", width=96)]
    lines += ["```", ""]
    context = command.make_context(verb, [], resilient_parsing=True)
    for heading, records in help.option_groups(command, context).items():
        lines += [f"| {heading} | |", "|---|---|", *(f"| `{_cell(name)}` | {_escaped(_cell(text))} |" for name, text in records), ""]
    return "\n".join(lines)


def signature_text(name: str) -> str:
    """Return the arguments of a public function as a call and a table, with the meaning of each."""
    function, several = _functions()[name]
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    required = [None] * (len(named) - len(arguments.defaults) - len(arguments.kw_defaults))
    defaults = [*required, *arguments.defaults, *arguments.kw_defaults]
    plain, notes = _docstring(ast.get_docstring(function) or "")
    returned = ast.unparse(function.returns) if function.returns else "None"
    positional = ", ".join(argument.arg for argument in (*arguments.posonlyargs, *arguments.args))
    call = f"perfmodel.{name}({positional}{', ' if positional and arguments.kwonlyargs else ''}{'*, ...' if arguments.kwonlyargs else ''})"
    lines = ["```python", f"{call} -> {returned}", "```", "", *plain]
    if several:
        lines += [f"With a list for an argument that takes lists: `{several}`.", ""]
    if named:
        lines += ["| argument | type | default | meaning |", "|---|---|---|---|"]
    if arguments.kwarg:
        named, defaults = [*named, arguments.kwarg], [*defaults, ast.Constant(value=...)]
    for argument, default in zip(named, defaults, strict=True):
        annotation = ast.unparse(argument.annotation) if argument.annotation else ""
        value = "required" if default is None else f"`{ast.unparse(default)}`"
        meaning = notes.get(argument.arg, "")
        lines.append(f"| `{argument.arg}` | `{_cell(annotation)}` | {value} | {_escaped(_cell(meaning))} |")
    return "\n".join([*lines, ""])


def type_text(name: str) -> str:
    """Return what a public type is, with a table of its fields or its members."""
    import perfmodel

    kind = getattr(perfmodel, name)
    plain, notes = _docstring(inspect.getdoc(kind) or "")
    lines = [f"#### {name}", "", *plain]
    if issubclass(kind, Enum):
        return "\n".join([*lines, "Members: " + ", ".join(f"`{member.name}` (`{member.value}`)" for member in kind), ""])
    if not dataclasses.is_dataclass(kind):
        return "\n".join(lines)
    lines += ["| field | type | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        lines.append(f"| `{field.name}` | `{_cell(str(field.type))}` | {_escaped(_cell(notes.get(field.name, '')))} |")
    return "\n".join([*lines, ""])


@cache
def _functions() -> dict[str, tuple[ast.FunctionDef, str]]:
    """Return name -> (definition for single values, type returned for lists or nothing)."""
    found: dict[str, tuple[ast.FunctionDef, str]] = {}
    for node in ast.parse((ROOT / "perfmodel" / "signatures.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            first = found.get(node.name)
            found[node.name] = (node, "") if first is None else (first[0], ast.unparse(node.returns) if node.returns else "")
    return found


def _docstring(text: str) -> tuple[list[str], dict[str, str]]:
    """Split a docstring into its paragraphs as Markdown and the notes on arguments, which are lines of a name and a meaning."""
    prose, notes, last = [], {}, ""
    for line in text.splitlines():
        row = _ROW.fullmatch(line.strip())
        if line.strip() == "Args:":
            last = ""
        elif row and ("  " in line.strip() or line.startswith("    ")) and not row["name"].endswith("."):
            last = row["name"]
            notes |= {name.strip(): row["text"] for name in last.split(",")}
        elif last and line.startswith("  "):
            notes |= {name.strip(): f"{notes[name.strip()]} {line.strip()}" for name in last.split(",")}
        else:
            last = ""
            prose.append(line)
    return _paragraphs("\n".join(prose)), notes


def _paragraphs(text: str) -> list[str]:
    return [_escaped(line.replace("\b", "").rstrip()) for line in text.splitlines()] + [""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Return the text with what Markdown would read as markup, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if number % 2 else re.sub(r"([*_<\[])", r"\\\1", part) for number, part in enumerate(parts))
