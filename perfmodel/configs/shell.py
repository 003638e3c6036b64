"""Reader of launch scripts: the variables, arrays and defaults of a shell script, and its commands. Nothing is executed.

It expands assignments, arrays, `${NAME}`, `${NAME:-default}`, `$((...))`, `$(expr ...)`, quotes, comments and continued lines. Branches and
loops are read in order, as if each ran once. The output of other commands is unknown and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfmodel.configs.expressions import evaluate

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PREFIX = re.compile(r"[A-Za-z_]\w*=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?]")
_BRACED = re.compile(r"!?([A-Za-z_]\w*|[0-9@*#?])(\[[@*0-9]*\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
_KEYWORDS = re.compile(r"(?:if|elif|then|else|fi|for|while|until|do|done|case|esac|function)\b|\{|\}|\[\[?\s")
_SEPARATOR = re.compile(r"&&|\|\||[;|\n]|(?<!>)&")  # of statements; `&` in `2>&1` is none
_SPACE = re.compile(r"\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A command of a script: its words after expansion, and the variables set for it."""

    words: tuple[str, ...]
    environment: dict[str, str]


def read_script(text: str) -> list[ShellCommand]:
    """Return the commands of a script in order."""
    variables: dict[str, Any] = {}
    commands = []
    for statement in filter(None, map(str.strip, _scan(re.sub(r"\\\r?\n", " ", text), _SEPARATOR, comments=True))):
        statement = re.sub(r"^(?:then|else|do)\s+", "", statement)
        for name, default in re.findall(r"^:\s+\"?\$\{([A-Za-z_]\w*):?=(.*)\}\"?$", statement):
            variables.setdefault(name, default)
        assigned = _ASSIGNMENT.fullmatch(statement)
        if assigned and (assigned[3].startswith("(") or len(list(_words(statement))) == 1 or statement.startswith(("export", "local"))):
            name, adds, value = assigned.groups()
            expanded: Any = _expand(value, variables)
            if value.startswith("("):
                expanded = [word for raw in _words(value[1:-1]) for word in _fields(raw, variables)]
            if adds and name in variables:
                before = variables[name]
                are_texts = isinstance(before, str) and isinstance(expanded, str)
                expanded = before + expanded if are_texts else [*_elements(before), *_elements(expanded)]
            variables[name] = expanded
        elif not _KEYWORDS.match(statement):
            commands.append(_command(statement, variables))
    return [command for command in commands if command.words]


def _elements(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _scan(text: str, separator: re.Pattern[str], *, comments: bool) -> Iterator[str]:
    """Yield the pieces between separators; quotes, arrays and substitutions are not split."""
    current, depth, index, quote = "", 0, 0, ""
    while index < len(text):
        char = text[index]
        if quote:
            quote = "" if char == quote else quote
        elif char == "\\":
            current += char
            index, char = index + 1, text[index + 1 : index + 2]
        elif char in "'\"":
            quote = char
        elif comments and char == "#" and (not current or current[-1] in " \t\n("):
            index = text.find("\n", index)
            if index < 0:
                break
            continue
        elif char in "({":
            depth += 1
        elif char in ")}" and depth:
            depth -= 1
        elif not depth and (mark := separator.match(text, index)):
            yield current
            current, index = "", mark.end()
            continue
        current += char
        index += 1
    yield current


def _command(statement: str, variables: dict[str, Any]) -> ShellCommand:
    environment: dict[str, str] = {}
    words: list[str] = []
    for raw in _words(statement):
        if not words and _PREFIX.match(raw):
            name, _, value = raw.partition("=")
            environment[name] = _expand(value, variables)
        elif raw[:1] in "<>" or re.match(r"\d?>", raw):
            break
        else:
            words += _fields(raw, variables)
    return ShellCommand(words=tuple(words), environment=environment)


def _words(text: str) -> Iterator[str]:
    """Yield the words of a statement before expansion, with their quotes."""
    yield from filter(None, _scan(text, _SPACE, comments=False))


def _fields(raw: str, variables: dict[str, Any]) -> list[str]:
    """Return the words to which one word expands: an array to its elements, an unquoted text to its parts."""
    array = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", raw.strip('"'))
    if array:
        elements = _elements(variables.get(array[1], []))
        # an unquoted element is split: `--split '99,1,0'` is two words
        return elements if raw.startswith('"') else [word.strip("'") for element in elements for word in element.split()]
    expanded = _expand(raw, variables)
    return expanded.split() if "$" in raw and "'" not in raw and '"' not in raw else [expanded]


def _expand(text: str, variables: dict[str, Any]) -> str:
    """Return the text with its variables and arithmetic expanded; an unknown command expands to nothing."""
    expanded, quote, index = "", "", 0
    while index < len(text):
        char = text[index]
        if char == "'" and quote != '"':
            end = text.find("'", index + 1)
            end = len(text) if end < 0 else end
            expanded, index = expanded + text[index + 1 : end], end + 1
        elif char == '"':
            quote, index = "" if quote else '"', index + 1
        elif char == "\\" and index + 1 < len(text):
            expanded, index = expanded + text[index + 1], index + 2
        elif char == "$" and text.startswith(("$(", "${"), index):
            substituted = _parameter if text[index + 1] == "{" else _command_output
            inside, index = _bracketed(text, index + 1)
            expanded += substituted(inside, variables)
        elif char == "$" and (name := _NAME.match(text, index + 1)):
            expanded += _text(variables.get(name[0], ""))
            index = name.end()
        elif char == "`":
            end = text.find("`", index + 1)
            index = len(text) if end < 0 else end + 1
        else:
            expanded, index = expanded + char, index + 1
    return expanded


def _bracketed(text: str, start: int) -> tuple[str, int]:
    """Return the text between the bracket at `start` and its closing bracket, and the index after that."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({") - (text[index] in ")}")
        if not depth:
            return text[start + 1 : index], index + 1
    return text[start + 1 :], len(text)


def _command_output(inside: str, variables: dict[str, Any]) -> str:
    """Return the value of `$((...))`, and the output of `$(expr ...)` and `$(echo ...)`; "" for other commands."""
    if inside.startswith("("):
        plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: str(variables.get(name[1], name[1])), inside[1:-1])
        value = evaluate(re.sub("/+", "//", plain), {})
        return "" if value is None else str(int(value) if isinstance(value, (bool, float)) else value)
    name, _, rest = inside.strip().partition(" ")
    expanded = _expand(rest, variables)
    if name == "expr":
        value = evaluate(expanded.replace("/", "//"), {})
        return "" if value is None else str(value)
    return expanded if name == "echo" and "|" not in inside else ""


def _parameter(inside: str, variables: dict[str, Any]) -> str:
    match = _BRACED.match(inside)
    if match is None:
        return ""
    name, index, form, default = match.groups()
    value = variables.get(name, "")
    if index and isinstance(value, list) and index[1:-1].isdecimal():
        value = value[int(index[1:-1])] if int(index[1:-1]) < len(value) else ""
    text = _text(value)
    if form and form[-1] in "-=" and not text:
        text = _expand(default, variables)
        if form[-1] == "=":
            variables[name] = text
    return text


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
