"""Reader of launch scripts: the variables, arrays and defaults of a shell script, and its commands. Nothing is executed.

It expands assignments, arrays, `${NAME}`, `${NAME:-default}`, `$((...))`, `$(expr ...)`, quotes, comments and continued lines. Branches and
loops are read in order, as if each ran once. The output of other commands is unknown and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from perfmodel.configs.expressions import evaluate

#: Tokens of a quoted text, of a word, and of a script. The last two open a substitution, which is one token up to its closing bracket.
_QUOTED = r"\\.|`[^`]*`|\$[A-Za-z_]\w*|\$[0-9@*#?]|\$[({]|."
_WORD = rf"'[^']*'?|\"(?:\\.|[^\"\\])*\"?|{_QUOTED}"
_SCRIPT = rf"(?P<comment>(?<![^\s(])#[^\n]*)|{_WORD}"
_OPEN = ("$(", "${", "(", "{")

_BEFORE = re.compile(r"(?:(?:then|else|do|export|local|readonly|declare(?:\s+-\w+)?)\s+)*")  # an assignment or a command
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"!?([A-Za-z_]\w*|[0-9@*#?])(?:\[([@*0-9]*)\])?(?::?([-=+?])(.*))?", re.DOTALL)
_KEYWORDS = re.compile(r"(?:if|elif|then|else|fi|for|while|until|do|done|case|esac|function)\b|\{|\}|\[\[?\s")

#: Name -> elements of an array; other variables have one.
_Variables = dict[str, list[str]]


def read_script(text: str) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of a script in order: the words after expansion, and the variables set for the command."""
    variables: _Variables = {}
    commands = []
    for statement in _split(re.sub(r"\\\r?\n", " ", text), lambda token: token in ";|&\n"):
        if _KEYWORDS.match(statement := _BEFORE.sub("", statement, count=1)):
            continue
        assigned: _Variables = {}
        words: list[str] = []
        for raw in _split(statement, str.isspace):
            if not words and (assignment := _ASSIGNMENT.fullmatch(raw)):
                name, adds, value = assignment.groups()
                before = variables.get(name, []) if adds else []
                if value.startswith("("):
                    elements = [field for part in _split(value[1:-1], str.isspace) for field in _fields(part, variables)]
                    assigned[name] = [*before, *elements]
                elif len(before) == 1:
                    assigned[name] = [before[0] + _expand(value, variables)]
                else:
                    assigned[name] = [*before, _expand(value, variables)]
            elif re.match(r"\d?[<>]", raw):
                break
            else:
                words += _fields(raw, variables)
        if words:
            commands.append((words, {name: " ".join(value) for name, value in assigned.items()}))
        else:
            variables |= assigned
    return commands


def _tokens(text: str, pattern: str) -> Iterator[str]:
    """Yield the tokens of a text without comments. Brackets of a script, and all those in a substitution, make one token."""
    token, depth = "", 0
    for match in re.finditer(pattern, text, re.DOTALL):
        if match[0] in (_OPEN if depth or pattern is _SCRIPT else _OPEN[:2]):
            depth += 1
        elif depth and match[0] in ")}":
            depth -= 1
        token += "" if match.lastgroup == "comment" else match[0]
        if token and not depth:
            yield token
            token = ""
    if token:
        yield token


def _split(text: str, separates: Callable[[str], bool]) -> list[str]:
    """Return the pieces of a script between its separators; quotes, arrays and substitutions are not split."""
    pieces = [""]
    for token in _tokens(text, _SCRIPT):
        if separates(token) and not (token == "&" and pieces[-1].endswith(">")):  # not in `2>&1`
            pieces.append("")
        else:
            pieces[-1] += token
    return [piece.strip() for piece in pieces if piece.strip()]


def _fields(raw: str, variables: _Variables) -> list[str]:
    """Return the words to which one word expands: an array to its elements, an unquoted text to its parts."""
    if array := re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", raw.strip('"')):
        elements = variables.get(array[1], [])
        # an unquoted element is split: `--split '99,1,0'` is two words
        return elements if raw.startswith('"') else [word.strip("'") for element in elements for word in element.split()]
    expanded = _expand(raw, variables)
    return expanded.split() if "$" in raw and "'" not in raw and '"' not in raw else [expanded]


def _expand(text: str, variables: _Variables, pattern: str = _WORD) -> str:
    """Return the text with its variables and arithmetic expanded; an unknown command expands to nothing."""
    expanded = ""
    for token in _tokens(text, pattern):
        match token[:2]:
            case "$(":
                expanded += _command_output(token[2:-1], variables)
            case "${":
                expanded += _parameter(token[2:-1], variables)
            case quoted if quoted[:1] == '"' and pattern is _WORD:
                expanded += _expand(token[1:].removesuffix('"'), variables, _QUOTED)
            case quoted if quoted[:1] == "'" and pattern is _WORD:
                expanded += token[1:].removesuffix("'")
            case variable if variable[:1] == "$" and variable[1:]:
                expanded += " ".join(variables.get(token[1:], []))
            case other if other[:1] != "`":
                expanded += token[1:] if other[:1] == "\\" and other[1:] else token
    return expanded


def _command_output(inside: str, variables: _Variables) -> str:
    """Return the value of `$((...))`, and the output of `$(expr ...)` and `$(echo ...)`; "" for other commands."""
    name, _, rest = inside.strip().partition(" ")
    if inside.startswith("("):
        expression = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: " ".join(variables.get(match[1], [match[1]])), inside[1:-1])
    elif name == "expr":
        expression = _expand(rest, variables)
    else:
        return _expand(rest, variables) if name == "echo" and "|" not in inside else ""
    value = evaluate(re.sub("/+", "//", expression), {})
    return "" if value is None else str(int(value) if isinstance(value, (bool, float)) else value)


def _parameter(inside: str, variables: _Variables) -> str:
    """Return the value of `${NAME}`, `${NAME[0]}` or `${NAME:-default}`; `${NAME:=default}` also sets the variable."""
    match = _PARAMETER.fullmatch(inside)
    if match is None:
        return ""
    name, index, form, default = match.groups()
    elements = variables.get(name, [])
    text = "".join(elements[int(index) :][:1]) if (index or "").isdecimal() and len(elements) > 1 else " ".join(elements)
    if form in ("-", "=") and not text:
        text = _expand(default, variables)
        if form == "=":
            variables[name] = [text]
    return text
