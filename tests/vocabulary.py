"""The wording check of `make lint`: replaced words, vague names and long sentences in pages, messages, code and tests.

    python -m tests.vocabulary            # every file
    python -m tests.vocabulary README.md  # the named files

Checked are the prose of the pages of the root and of docs/, the markdown cells of the notebooks, the texts and comments of YAML files
(words only: a citation may be long), and the string literals of the package that contain a space: help, messages, notes and reports.
Docstrings and comments of the package, the lab and the tests are checked for words, those of commands also for long sentences, because
`--help` prints them. Literals of the lab and the tests are not checked: tests quote texts. Text in backticks is exempt: it names keys,
flags, columns and files. No docstring begins with a word of `OPENINGS`: it names the thing that it describes. Names of functions, types,
parameters and variables contain no word of `NAME_WORDS`, and none is one of `VAGUE_NAMES`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LONGEST_SENTENCE = 40

#: Words that no name contains, and what to name instead.
NAME_WORDS = {
    "stranger": "unseen",
    "strangers": "unseen",
    "told": "given, passed, notes",
    "said": "given, set",
    "nobody": "name the subject",
    "somebody": "name the subject",
    "beside": "outside, extra, concurrent",
    "doubt": "uncertainty, std",
    "doubts": "uncertainties, stds",
    "heard": "read, measured",
    "believed": "prior, posterior",
    "dealt": "assigned, sharded",
    "footing": "basis",
    "habit": "default, behaviour",
    "habits": "defaults, behaviour",
    "crowding": "layer placement",
    "makers": "published layouts",
    "room": "headroom, free memory",
    "door": "entry point",
    "house": "package",
    "road": "path",
    "carrier": "variance source",
}
#: Keys of files of frameworks and engines, named as in these files.
FILE_KEYS = frozenset({"prefill_context_beside", "zero_beside_axes"})
#: Names that do not say what they hold.
VAGUE_NAMES = frozenset({"each", "own", "found", "place", "here", "whole", "made"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A pattern that does not belong in text that users read, what to write instead, and why."""

    pattern: str
    replacement: str
    reason: str


_PEOPLE = "no metaphors of people"
_PARAPHRASE = "the field has a term for it"
_ODD = "not idiomatic"
RULES = (
    Rule(pattern=r"strangers?", replacement="unseen framework", reason=_PEOPLE),
    Rule(pattern=r"nobody|somebody", replacement="name the subject, or: not published, not measured, user", reason=_PEOPLE),
    Rule(pattern=r"one's", replacement="your, the user's", reason=_PEOPLE),
    Rule(pattern=r"rest(?:s|ed|ing)? on", replacement="based on, basis", reason=_ODD),
    Rule(pattern=r"footing", replacement="basis", reason=_ODD),
    Rule(pattern=r"told|tells|telling", replacement="given, passed, set, reported", reason="code does not speak"),
    Rule(pattern=r"said", replacement="given, passed, set, reported", reason="code does not speak"),
    Rule(pattern=r"hear|hears|heard|believed?|believes", replacement="read, measured, estimated, prior, posterior", reason=_PEOPLE),
    Rule(pattern=r"dealt|deals? out", replacement="assigned, sharded, split, distributed", reason=_PARAPHRASE),
    Rule(pattern=r"cut into", replacement="split into, sharded", reason=_PARAPHRASE),
    Rule(pattern=r"beside", replacement="in addition to, next to, with, and", reason=_ODD),
    Rule(pattern=r"hang(?:s|ing)? on", replacement="most sensitive parameters, sensitivity, depends on", reason=_PARAPHRASE),
    Rule(pattern=r"doubt(?:s|ed|ful)?", replacement="uncertainty, standard deviation, prediction interval", reason=_PARAPHRASE),
    Rule(pattern=r"(?:shows?|shown|hides?|hidden|hiding) (?:under|beneath)", replacement="exposed, overlapped", reason=_PARAPHRASE),
    Rule(pattern=r"workers of two kinds|two kinds of workers", replacement="prefill and decode workers", reason=_PARAPHRASE),
    Rule(pattern=r"habits?", replacement="framework defaults, behaviour", reason=_PEOPLE),
    Rule(pattern=r"what bounds", replacement="bottleneck, roofline, memory-bound or compute-bound", reason=_PARAPHRASE),
    Rule(pattern=r"(?:as|so) many(?: as)?", replacement="give the number, or: the same number of", reason=_ODD),
)
#: Folders of which names, docstrings and comments are checked, and no string literals.
WITHOUT_LITERALS = ("lab/", "tests/")
_WORDS = tuple((re.compile(rf"(?<![\w'-])(?:{rule.pattern})(?![\w'])", re.IGNORECASE), rule) for rule in RULES)

_FENCE = re.compile(r"^\s*(?:```|~~~)")
_CODE = re.compile(r"``.+?``|`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_HTML = re.compile(r"<!--.*?-->")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*#+\s+|^\s*>\s?")
_SENTENCE = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[\"'(`*\[]*[A-Z0-9`])|\n\s*\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A paragraph, a table cell or a string literal, and the line of its file on which it starts."""

    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A word that a rule replaces, or a sentence that is too long."""

    file: str
    line: int
    text: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text} -> {self.replacement}"


def word_findings(passage: Passage, file: str) -> Iterator[Finding]:
    """Yield the replaced words of a passage."""
    flat = _without_code(passage).replace("\n", " ")
    for pattern, rule in _WORDS:
        for hit in pattern.finditer(flat):
            line = passage.line + passage.text.count("\n", 0, hit.start())
            yield Finding(file=file, line=line, text=hit[0], replacement=f"{rule.replacement} ({rule.reason})")


def sentence_findings(passage: Passage, file: str) -> Iterator[Finding]:
    """Yield the long sentences of a passage."""
    text, start = _without_code(passage), 0
    for part in [*_SENTENCE.finditer(text), None]:
        end = len(text) if part is None else part.start()
        num_words = len([word for word in _LINK.sub(r"\1", text[start:end]).split() if re.search(r"\w", word)])
        if num_words > LONGEST_SENTENCE:
            opening = " ".join(passage.text[start:end].split()[:6])
            yield Finding(
                file=file,
                line=passage.line + passage.text.count("\n", 0, start),
                text=f'sentence of {num_words} words "{opening} ..."',
                replacement=f"split it (at most {LONGEST_SENTENCE} words)",
            )
        start = len(text) if part is None else part.end()


def findings_of(passage: Passage, file: str) -> list[Finding]:
    """Return the findings in one passage of a text that users read."""
    sentences = () if file.endswith(".yaml") else sentence_findings(passage, file)
    return sorted([*word_findings(passage, file), *sentences], key=lambda finding: finding.line)


def _without_code(passage: Passage) -> str:
    """Return the text with code and comments blanked, at the same offsets."""
    text = _CODE.sub(lambda code: "`" + "x" * (len(code[0]) - 2) + "`", passage.text)
    return _HTML.sub(lambda comment: " " * len(comment[0]), text)


def markdown_passages(text: str, *, first_line: int = 1) -> Iterator[Passage]:
    """Yield the paragraphs, list items, headings and table cells outside fenced blocks."""
    paragraph: list[str] = []
    start = first_line
    fenced = False

    def flushed() -> Iterator[Passage]:
        if paragraph:
            yield Passage(text="\n".join(paragraph), line=start)
            paragraph.clear()

    for number, line in enumerate(text.splitlines(), first_line):
        if _FENCE.match(line):
            yield from flushed()
            fenced = not fenced
        elif fenced:
            continue
        elif line.lstrip().startswith("|"):
            yield from flushed()
            yield from (Passage(text=cell.strip(), line=number) for cell in line.strip().strip("|").split("|") if cell.strip())
        else:
            if not line.strip() or _ITEM.match(line):
                yield from flushed()
            if line.strip():
                if not paragraph:
                    start = number
                paragraph.append(_ITEM.sub("", line))
    yield from flushed()


def notebook_passages(text: str) -> Iterator[Passage]:
    """Yield the passages of the markdown cells, with the number of the cell in place of a line."""
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] == "markdown":
            for passage in markdown_passages("".join(cell["source"])):
                yield Passage(text=passage.text, line=number)


def yaml_passages(text: str) -> Iterator[Passage]:
    """Yield the texts of a YAML file: scalars that contain a space."""
    pending = [node for node in yaml.compose_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if node is not None]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            pending.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        elif isinstance(node, yaml.ScalarNode) and " " in node.value:
            yield Passage(text=node.value, line=node.start_mark.line + 1)


def python_passages(text: str, *, docstrings: bool = False) -> Iterator[Passage]:
    """Yield the string literals that contain a space; docstrings only of functions that are commands, and if asked for."""
    tree = ast.parse(text)
    # Docstrings, those of constants and fields too.
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    if docstrings:
        commands = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))
        skipped -= {id(node.body[0].value) for node in commands if isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # Patterns, and lists of names.
            if ast.unparse(node.func) == "re.compile":
                skipped.update(id(part) for part in ast.walk(node))
            elif node.func.attr == "split":
                skipped.add(id(node.func.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
            # A formatted value is one word of the sentence.
            literal = "".join(str(value.value) if isinstance(value, ast.Constant) else "x" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literal = node.value
        else:
            continue
        if id(node) not in skipped and " " in literal:
            yield Passage(text=literal, line=node.lineno)


def passages_of(file: str) -> Iterator[Passage]:
    """Yield the passages of one file of the checkout that users read."""
    text = (ROOT / file).read_text(encoding="utf-8")
    match Path(file).suffix:
        case ".md":
            return markdown_passages(text)
        case ".ipynb":
            return notebook_passages(text)
        case ".yaml":
            return yaml_passages(text)
        case _:
            return python_passages(text, docstrings=file.startswith("perfmodel/cli/"))


def checked_files() -> list[str]:
    """Return the files whose texts users read, and those of the lab and the tests, as paths from the root of the checkout."""
    patterns = (
        ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"),
        ("docs/**/*.md", "notebooks/*.ipynb", "perfmodel/**/*.py", "lab/**/*.py", "tests/**/*.py"),
        ("hardware_specs/**/*.yaml", "strategies/**/*.yaml"),
    )
    return [
        path.relative_to(ROOT).as_posix()
        for group in patterns
        for pattern in group
        for path in sorted(ROOT.glob(pattern))
        if path.is_file()
    ]


OPENINGS = re.compile(r"(?:Of|What|Those|Whose|How far)\b")


def opening_findings(text: str, file: str) -> Iterator[Finding]:
    """Yield the docstrings that begin without the thing that they describe."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            opening = OPENINGS.match(ast.get_docstring(node, clean=False) or "")
            if opening:
                yield Finding(
                    file=file,
                    line=node.body[0].lineno,
                    text=f'docstring begins with "{opening[0]}"',
                    replacement="begin with the noun or the verb",
                )


_WORD_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def name_findings(text: str, file: str) -> Iterator[Finding]:
    """Yield the definitions, parameters and assigned variables whose names contain a replaced word or are vague."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        words = [] if name in FILE_KEYS else [word.lower() for word in _WORD_OF_NAME.findall(name)]
        replacements = [NAME_WORDS[word] for word in words if word in NAME_WORDS]
        if name in VAGUE_NAMES:
            replacements.append("the noun of what it holds")
        if replacements:
            yield Finding(file=file, line=node.lineno, text=f'name "{name}"', replacement="; ".join(replacements))


def comment_findings(text: str, file: str) -> Iterator[Finding]:
    """Yield the replaced words in docstrings and comments."""
    passages = [
        Passage(text=ast.get_docstring(node, clean=False) or "", line=node.body[0].lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    passages += [Passage(text=token.string, line=token.start[0]) for token in tokens if token.type == tokenize.COMMENT]
    for passage in passages:
        yield from word_findings(passage, file)


_YAML_COMMENT = re.compile(r"(?:^|\s)#(.*)")


def yaml_comment_findings(text: str, file: str) -> Iterator[Finding]:
    """Yield the replaced words and the openings of the comments of a YAML file."""
    for line, code in enumerate(text.splitlines(), 1):
        comment = _YAML_COMMENT.search(code)
        if comment is None:
            continue
        yield from word_findings(Passage(text=comment[1], line=line), file)
        opening = OPENINGS.match(comment[1].strip())
        if opening:
            yield Finding(file=file, line=line, text=f'comment begins with "{opening[0]}"', replacement="begin with the noun or the verb")


def check(files: Sequence[str]) -> list[Finding]:
    """Return the findings in the files."""
    with_literals = [file for file in files if not file.startswith(WITHOUT_LITERALS)]
    findings = [finding for file in with_literals for passage in passages_of(file) for finding in findings_of(passage, file)]
    for file in files:
        if file.endswith(".py"):
            text = (ROOT / file).read_text(encoding="utf-8")
            findings += [*opening_findings(text, file), *name_findings(text, file), *comment_findings(text, file)]
        elif file.endswith(".yaml"):
            findings += yaml_comment_findings((ROOT / file).read_text(encoding="utf-8"), file)
    return findings


def main(arguments: Sequence[str]) -> int:
    """Print the findings and return the exit code: 1 where there are some."""
    findings = check(list(arguments) or checked_files())
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
