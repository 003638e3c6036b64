"""Words: inputs of a verb, each defined once as a field of a record.

A record is a frozen dataclass whose fields are made by `word`. Arguments in Python (`takes`), options of the command line
(`cli/options.py`), keys of files and names of knobs are derived from its fields, so a new word is one line.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache, partial, wraps
from importlib import import_module
from itertools import product
from typing import Any, TypeAlias, TypeVar, cast

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.foundation.values import read_integer, several, several_numbers, text_of, yes_or_no

Read = Callable[[Any, str], Any]
Result = TypeVar("Result")
Value = TypeVar("Value")
#: One value, several as a list, or none.
Several: TypeAlias = "Value | Sequence[Value] | None"


#: An option of the command line in a help text; in Python it is an argument.
_OPTION = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Word:
    """Description of an input (a word) of a verb.

    help, otherwise   meaning, and meaning if left out
    metavar           placeholder of its value in help
    kind              type on a command line: int, str, bool or Path
    aliases           other names of its option
    option            name of its option, if not the word's; repeats: the option may be repeated
    takes             types in a program; empty: those of the field's annotation
    read              reader of a given value and the word's name, where the kind does not suffice; it returns the value or raises
    least             smallest number
    several           whether several values may be given to a verb that takes several; several_help: help of such a verb
    split             function of a given value and the word's name that returns its values, where commas and lists do not separate them
    default_text      default shown on a command line
    missing           remedy if a required word is missing
    choices           enumeration of a closed choice
    is_searched       whether a search varies it
    is_shorthand      whether it stands for other words, which files hold instead
    is_last           whether it comes after the words of the other parts of a record
    in_files          default in a file that leaves it out; None: no default
    """

    help: str
    otherwise: str = ""
    metavar: str = "N"
    kind: type = str
    aliases: tuple[str, ...] = ()
    option: str = ""
    repeats: bool = False
    takes: str = ""
    read: Read | None = None
    least: int = 1
    several: bool = False
    several_help: str = ""
    split: Callable[[Any, str], list[Any]] | None = None
    default_text: str = ""
    missing: str = ""
    choices: type[StrEnum] | None = None
    is_searched: bool = False
    is_shorthand: bool = False
    is_last: bool = False
    in_files: Any = None

    @property
    def is_varied(self) -> bool:
        """Whether a verb that varies knobs takes several values of it."""
        return self.is_searched and self.kind is not bool

    def values(self, given: object, name: str) -> list[Any]:
        """Return the given values, one or several, before they are read."""
        if self.split is not None:
            return self.split(given, name)
        return several_numbers(given, name) if self.kind is int else several(given)

    def value(self, given: object, name: str) -> Any:
        """Return the given value after reading. Raises InputError."""
        if self.read is not None:
            return self.read(given, name)
        if self.kind is int:
            return read_integer(given, name, least=self.least, remedy="write 8")
        return yes_or_no(given, name) if self.kind is bool else text_of(given, name, "its name")


def reader(module: str, function: str) -> Read:
    """Return a reader of values that is imported when it reads the first value: `--help` reads none."""

    def read(value: object, name: str) -> Any:
        return getattr(import_module(f"perfmodel.{module}"), function)(value, name)

    return read


def word(help: str, *, default: object = None, **more: Any) -> Any:
    """Return a field of a record of words."""
    return field(default=default, metadata={"word": Word(help=help, **more)})


def size(help: str, *, most: int = 2**31 - 1, **more: Any) -> Any:
    """Return a field of a size, such as 64 or 8k."""
    return word(help, takes="int | str", read=partial(read_integer, most=most), **more)


def part(record: type) -> Any:
    """Return a field of a record that consists of records of words."""
    return field(default_factory=record, metadata={"part": record})


@lru_cache(maxsize=64)
def parts_of(record: Any) -> Mapping[str, type]:
    """Return the records of words of which a record consists, by field; only itself, under "", if its fields are words."""
    return {entry.name: entry.metadata["part"] for entry in fields(record) if "part" in entry.metadata} or {"": record}


def _words_of(*records: type) -> Mapping[str, Word]:
    """Return the words of records by name, in their order, but for those that come last."""
    parts: list[Any] = [part for record in records for part in parts_of(record).values()]
    words = [(entry.name, entry.metadata["word"]) for part in parts for entry in fields(part)]
    return dict(sorted(words, key=lambda named: named[1].is_last))


words_of: Callable[..., Mapping[str, Word]] = lru_cache(maxsize=64)(_words_of)


@lru_cache(maxsize=64)
def part_of_word(record: Any) -> Mapping[str, str]:
    """Return word -> field of the part of a record that has it; "": the record itself."""
    part_of = {word: name for name, part in parts_of(record).items() for word in words_of(part)}
    return {word: part_of[word] for word in words_of(record)}


def given_words(record: object) -> dict[str, Any]:
    """Return the words of a record that were given, by name."""
    given: dict[str, Any] = {}
    for word, part in part_of_word(cast(Any, type(record))).items():
        value = getattr(getattr(record, part) if part else record, word)
        if value is not None:
            given[word] = value
    return given


def read_words(record: object, *names: str) -> dict[str, Any]:
    """Return those of the named words of a record that were given, after reading. Raises InputError."""
    words, given = words_of(type(record)), given_words(record)
    return {name: words[name].value(given[name], name) for name in names if name in given}


def missing_words(record: type, given: Collection[str]) -> dict[str, str]:
    """Return the required words of a record that are not given, with the remedy of each."""
    return {name: word.missing for name, word in words_of(record).items() if word.missing and name not in given}


def check_none_missing(missing: Mapping[str, str], *, spelled: Callable[[str], str] = str) -> None:
    """Raise InputError that names all missing words. spelled: spelling of a word in the caller's interface"""
    if missing:
        raise InputError("; ".join(f"{spelled(name)}: is missing; give {remedy}" for name, remedy in missing.items()))


def combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of one value of each word, with the last word varying fastest."""
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


class Combinations(tuple[Any, ...]):
    """Records of all combinations of the values of varied words. is_list: whether some of the words were given as a list."""

    is_list: bool = False


def is_list(given: object) -> bool:
    """Return whether values were given as a list, even of one value; a matrix is one value."""
    return isinstance(given, Sequence) and not isinstance(given, str) and not any(isinstance(entry, (list, tuple)) for entry in given)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Words:
    """Selection of a record's words for a verb.

    only, without   names, separated by spaces: only these, or all except these
    needed          required words
    several         whether the verb takes several values of the words that may have several
    varied          whether it takes several values of searched words: its argument is then `Combinations`
    helps           help texts of this verb, in place of the words' own
    defaults        defaults of this verb, as text
    """

    record: type
    only: str = ""
    without: str = ""
    needed: str = ""
    several: bool = False
    varied: bool = False
    helps: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)

    def words(self) -> Mapping[str, Word]:
        known = words_of(self.record)
        names = self.only.split() or [name for name in known if name not in self.without.split()]
        return {name: known[name] for name in names}

    def make(self, given: Mapping[str, Any]) -> Any:
        """Return the record of the given words, or `Combinations` of records, with the last word varying fastest."""
        words, parts = words_of(self.record), parts_of(self.record)
        if self.varied:
            varied: dict[str, list[Any]] = {}
            has_list = False
            for name, value in given.items():
                if words[name].is_varied:
                    varied[name] = [*dict.fromkeys(words[name].values(value, name))] or [None]
                    has_list = has_list or is_list(value)
            records = Combinations([self.record(**{**given, **chosen}) for chosen in combinations(varied)])
            records.is_list = has_list
            return records
        if "" in parts:
            return self.record(**given)
        part_of = part_of_word(self.record)
        values: dict[str, dict[str, Any]] = {name: {} for name in parts}
        for word, value in given.items():
            values[part_of[word]][word] = value
        return self.record(**{name: part(**values[name]) for name, part in parts.items()})


def takes(**groups: type | Words) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator: parameters with these names, which are records, are replaced by their words as keyword arguments.

    `@takes(knobs=Knobs) def predict(plan, *, knobs)` is called as `predict(plan, tp=2)`; its signature lists every word.
    """
    chosen = {name: group if isinstance(group, Words) else Words(group) for name, group in groups.items()}

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        others = [name for name in signature.parameters if name not in chosen]
        positional = [name for name in others if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        group_of_word = {name: group for group, words in chosen.items() for name in words.words()}
        short = {alias.strip("-"): name for words in chosen.values() for name, entry in words.words().items() for alias in entry.aliases}
        needed = [name for words in chosen.values() for name in words.needed.split()]

        @wraps(function)
        def call(*args: Any, **given: object) -> Result:
            if len(args) > len(positional):
                takes_only = (
                    f"takes {len(positional)} without a name ({', '.join(positional)})" if positional else "takes arguments by name"
                )
                raise TypeError(f"{function.__name__}() {takes_only}, not {len(args)}; write name=value")
            parts: dict[str, dict[str, Any]] = defaultdict(dict)
            rest: dict[str, Any] = {}
            for name, value in given.items():
                if name in group_of_word:
                    parts[group_of_word[name]][name] = value
                elif name in others:
                    rest[name] = value
                else:
                    remedy = f"; here it is {short[name]!r}" if name in short else suggest(name, [*others, *group_of_word])
                    raise TypeError(f"{function.__name__}() has no argument {name!r}{remedy}")
            if needed and (absent := [name for name in needed if name not in given]):
                raise TypeError(f"{function.__name__}() needs {', '.join(absent)}; give it by name: {absent[0]}=...")
            for group, words in chosen.items():
                rest[group] = words.make(parts[group])
            return function(*args, **rest)

        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            parameters += _arguments(chosen[name]) if name in chosen else [parameter]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__, chosen)
        return call

    return decorate


def _documented(doc: str | None, chosen: Mapping[str, Words]) -> str:
    """Return the docstring with one line for each argument that is a word."""
    helps = (
        (name, words.helps[name] if name in words.helps else "; ".join(filter(None, (entry.help, entry.otherwise))))
        for words in chosen.values()
        for name, entry in words.words().items()
    )
    lines = (f"    {name}: {_OPTION.sub(lambda option: option[1].replace('-', '_'), text).rstrip('.')}." for name, text in helps)
    return "\n".join([inspect.cleandoc(doc or ""), "", "Args:", *lines])


def _arguments(words: Words) -> list[inspect.Parameter]:
    parts: list[Any] = [*parts_of(words.record).values()]
    by_name = {entry.name: entry for part in parts for entry in fields(part)}
    parameters = []
    for name, entry in words.words().items():
        kind, default = entry.takes or str(by_name[name].type).removesuffix(" | None"), by_name[name].default
        if name in words.needed.split():
            annotation, default = kind, MISSING
        elif (words.several and entry.several) or (words.varied and entry.is_varied):
            annotation = f"Several[{kind}]"
        else:
            annotation = f"{kind} | None" if default is None else kind
        empty = inspect.Parameter.empty if default is MISSING else default
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=annotation))
    return parameters
