"""Options from records: each `Word` of a record (`foundation/words.py`) becomes an option, with help, names and type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from perfmodel.foundation.words import Word, Words

Result = TypeVar("Result")

#: Order of the words of a record in help; others follow in record order.
_ORDER = (
    "model", "cluster", "chips", "nodes", "global_batch", "batch_tokens", "seq_len", "profile", "settings", "cp_form", "offload",
    "gradient_compression", "precision",
    "input_len", "output_len", "concurrency", "rate", "prefix_hit", "engine", "quantization", "kv_precision", "draft_tokens",
    "acceptance", "draft_model", "optimizer", "train", "routing", "capacity_factor",
    "dp", "fsdp", "tp", "pp", "cp", "dp_replicate", "dp_shard", "ep", "etp", "dispatcher",
    "zero", "micro_batch", "virtual_stages", "schedule", "recompute", "recompute_modules",
    "sequence_parallel", "rules", "order", "attention",
)  # fmt: skip
#: Options apart from the rest of their record in help: after an option, or after a whole record.
_AFTER = {"chip": "cluster", "calibration": "knobs", "memory_headroom": "calibration", "risk": "memory_headroom"}


def flag(field: str) -> str:
    """Return the flag of a field."""
    return "--" + field.replace("_", "-")


def option(metavar: str, help: str) -> Any:
    """Return an option of one verb, named as its parameter. metavar: placeholder of its value in help."""
    return typer.Option(metavar=metavar, help=help)


def argument(metavar: str, help: str) -> Any:
    """Return an argument of one verb."""
    return typer.Argument(metavar=metavar, help=help)


def command(
    *,
    after: Mapping[str, str] = {},  # never mutated
    **groups: type | Words | Group,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator of verbs that replaces each named parameter, a record, by one option per word.

    after   order in help: parameter or option -> the one that it follows
    groups  parameter -> record
    """
    chosen = {name: group if isinstance(group, Group) else Group.of(group) for name, group in groups.items()}

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        blocks: list[tuple[str, str, inspect.Parameter]] = []  # name of the option, name of the parameter of the verb
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            parts = chosen[name].options if name in chosen else {name: parameter}
            blocks += [(option, name, entry) for option, entry in parts.items()]
        for moved, anchor in [*after.items(), *((name, anchor_name) for name, anchor_name in _AFTER.items() if name not in after)]:
            names = {name for block in blocks for name in block[:2]}
            if moved in names and anchor in names:
                block = [entry for entry in blocks if moved in entry[:2]]
                blocks = [entry for entry in blocks if moved not in entry[:2]]
                position = max(index for index, entry in enumerate(blocks) if anchor in entry[:2]) + 1
                blocks[position:position] = block
        home = {option: name for option, name, _ in blocks}

        @wraps(function)
        def call(**given: object) -> Result:
            arguments = {name: value for name, value in given.items() if home[name] not in chosen}
            for name, group in chosen.items():
                arguments[name] = group.make({option: value for option, value in given.items() if home[option] == name})
            return function(**arguments)

        kind = inspect.Parameter.KEYWORD_ONLY
        call.__signature__ = inspect.Signature([entry.replace(kind=kind) for _, _, entry in blocks])  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


class Group:
    """Group of options that makes one argument of a verb."""

    def __init__(self, options: Mapping[str, inspect.Parameter], make: Callable[[dict[str, Any]], Any]) -> None:
        self.options, self.make = options, make

    @classmethod
    def of(cls, chosen: type | Words) -> Group:
        words = chosen if isinstance(chosen, Words) else Words(chosen)
        names = words.words()
        ordered = names if words.only else sorted(names, key=_position_in_help)
        options = {}
        for name in ordered:
            word = names[name]
            many = (words.several and word.several) or (words.varied and word.is_varied) or word.repeats
            if many and not word.repeats:
                help = word.several_help or f"{_help(word, word.otherwise)} [*]"
            else:
                help = words.helps.get(name) or _help(word, "" if name in words.defaults else word.otherwise)
            default = words.defaults.get(name, word.default_text) or None
            options[name] = _keyword_only(name, _typed(word, name, help=help, many=many), [] if many else default)
        return cls(options, lambda given: words.make({name: value for name, value in given.items() if value is not None}))


def largest_of(knobs: tuple[str, ...]) -> Group:
    """Return the options `--max-KNOB`; they make a mapping of knob -> given largest value."""
    words = {f"max_{knob}": Word(help=f"Largest {flag(knob)} to try", kind=int) for knob in sorted(knobs, key=_position_in_help)}
    options = {name: _keyword_only(name, _typed(word, name, help=_help(word)), None) for name, word in words.items()}
    return Group(options, lambda given: {name[4:]: words[name].value(value, name) for name, value in given.items() if value is not None})


def _position_in_help(name: str) -> int:
    """Return the position of an option in help; options not in `_ORDER` come last, in record order."""
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _help(word: Word, otherwise: str = "") -> str:
    return f"{word.help}; {otherwise}." if otherwise else f"{word.help}."


def _typed(word: Word, name: str, *, help: str, many: bool = False) -> Any:
    if word.kind is bool:
        plain = flag(word.option or name)
        return Annotated[bool | None, typer.Option(f"{plain}/--no-{plain[2:]}", help=help, show_default=False)]
    text = str if word.kind is int else word.kind  # a word parses its own numbers, such as `8k`
    kind = list[str] if many else text | None
    return Annotated[kind, typer.Option(flag(word.option or name), *word.aliases, metavar=word.metavar, help=help)]


def _keyword_only(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
