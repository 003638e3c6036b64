"""Readers of YAML files, which return plain data or raise `InputError`. `foundation/schema.py` validates the data.

PyYAML is imported when the first file is read.
"""

import os
import pickle
import select
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from perfmodel.foundation.errors import InputError, first_of, one_line, shown
from perfmodel.foundation.session import session_cache

MAX_FILE_BYTES = 8 * 2**20
_FIRST_BYTES = 2**16  # most files are smaller; a buffer for the largest takes longer to allocate than they take to read
MAX_DEPTH = 64
MAX_NODES = 10**6
"""Largest number of values in one file, with the values of an alias counted at every use."""
MOST_DIGITS = 40
MOST_FAULTS = 10
_MOST_NAMED = 8
_PIPE_PATIENCE = 10.0  # s, timeout for the first byte of a pipe


@contextmanager
def open_input(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Folders and devices, which may be endless, are refused; a pipe must deliver a byte within ten seconds.

    Raises OSError or ValueError (a null byte) if it cannot be opened; callers convert it to their own message.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # opening a pipe without a writer does not block
    with os.fdopen(opened, "rb") as stream:
        mode = os.fstat(opened).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            if not select.select([opened], [], [], _PIPE_PATIENCE)[0]:
                raise OSError(f"nothing came out of this pipe within {_PIPE_PATIENCE:g} s")
        elif stat.S_ISDIR(mode):
            raise OSError("it is a folder")
        elif not stat.S_ISREG(mode):
            raise OSError("it is a device, not a file")
        os.set_blocking(opened, True)
        yield stream


def read_bytes(path: str | Path, what: str) -> bytes:
    """Return the content of a file of at most `MAX_FILE_BYTES`. what: the kind of file in messages ("YAML file")."""
    try:
        with open_input(path) as stream:
            content = stream.read(_FIRST_BYTES)
            if len(content) == _FIRST_BYTES:
                content += stream.read(MAX_FILE_BYTES + 1 - _FIRST_BYTES)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{one_line(path, 200)}: cannot be read ({reason}); give the path of a {what}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{one_line(path, 200)}: larger than {MAX_FILE_BYTES >> 20} MiB; give the path of a {what}")
    return content


def read_text(path: str | Path, what: str) -> str:
    """Return the content of a UTF-8 text file, as `read_bytes`."""
    try:
        return read_bytes(path, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{one_line(path, 200)}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


#: Longest text whose parsed data is cached, as for shipped files [characters].
MOST_KEPT = 1 << 18


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML (or JSON) file. Repeated keys, other tags and anything that is not a mapping are refused."""
    return parse_yaml(read_text(path, "YAML file"), where=str(path))


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """Return the mapping in a YAML text, as `read_yaml`. where: its name in messages."""
    parse = _parsed if len(text) <= MOST_KEPT else _parse
    data: dict[str, Any] = pickle.loads(parse(text, where))  # a separate copy for each caller
    return data


def _parse(text: str, where: str) -> bytes:
    """Return the mapping in a text, pickled: every prediction reads the same few files, and parsing is much slower than unpickling."""
    import yaml

    if _depth(text) > MAX_DEPTH:
        raise InputError(f"{where}: brackets or dashes nested more than {MAX_DEPTH} deep; this is not one of our files")
    try:
        loader = _loader(yaml)(text)
        try:
            node = loader.get_single_node()
            if "*" in text and "&" in text:  # an alias without an anchor is refused by the loader
                _check_aliases(node)
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except InputError as error:
        raise InputError(f"{where}: {error.full}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{where}: {line}not valid YAML ({one_line(error.problem)}); correct that line") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError, AttributeError) as error:
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{where}: not valid YAML ({one_line(summary, 120)}); correct the file") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: must hold a mapping of fields at the top; write lines such as 'name: my-cluster'")
    return pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)


_parsed = session_cache(maxsize=256)(_parse)


def _depth(text: str) -> int:
    """Return an upper bound of the nesting depth of flow brackets and block dashes; the parser recurses once per level, in C."""
    depth = deepest = 0
    for char in text:
        if char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth = max(0, depth - 1)
    dashes = max((line.count("- ") + line.count("? ") for line in text.splitlines() if line.lstrip()[:2] in ("- ", "? ")), default=0)
    indents: list[int] = []
    for line in text.splitlines():
        body = line.lstrip(" ")
        if body:
            indent = len(line) - len(body)
            while indents and indents[-1] >= indent:
                indents.pop()
            indents.append(indent)
            deepest = max(deepest, len(indents))
    return max(deepest, dashes)


def _check_aliases(root: Any) -> None:
    """Refuse a text whose aliases expand to too many values or refer to themselves; nothing is expanded to check it."""
    sizes: dict[int, tuple[int, int]] = {}  # of a node: values below it, depth
    open_nodes: set[int] = set()

    def measure(node: Any) -> tuple[int, int]:
        key = id(node)
        if key in open_nodes:
            raise InputError(f"line {node.start_mark.line + 1}: an alias stands for a value that holds it; write the value out")
        if key not in sizes:
            open_nodes.add(key)
            parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            children = [measure(part) for part in (parts if isinstance(node.value, list) else ())]
            open_nodes.discard(key)
            sizes[key] = 1 + sum(size for size, _ in children), 1 + max((depth for _, depth in children), default=0)
            if sizes[key][0] > MAX_NODES or sizes[key][1] > MAX_DEPTH:
                raise InputError(
                    f"line {node.start_mark.line + 1}: aliases stand for more than {MAX_NODES:,} values or {MAX_DEPTH} levels; "
                    "write the values out"
                )
        return sizes[key]

    if root is not None:
        measure(root)


@lru_cache(maxsize=1)
def _loader(yaml: Any) -> Any:
    """Return the C loader if PyYAML has it (10 times faster), with errors for repeated keys and for integers of too many digits."""
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class StrictLoader(base):  # type: ignore[misc, valid-type]  # the base is chosen at run time
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise InputError(f"line {key.start_mark.line + 1}: {one_line(key.value)}: given twice; keep one of the two")
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def construct_whole_number(self, node: Any) -> Any:
            if len(node.value) > MOST_DIGITS:
                raise InputError(f"line {node.start_mark.line + 1}: a number of {len(node.value):,} digits; shorten it")
            return self.construct_yaml_int(node)

    StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_whole_number)
    return StrictLoader


def dump_yaml(data: Mapping[str, Any], *, inline_leaves: bool = False) -> str:
    """Return YAML text that `parse_yaml` reads back as equal data, with fields in order. inline_leaves: innermost lists on one line."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    style = None if inline_leaves else False
    try:
        return str(yaml.dump(dict(data), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=style))
    except UnicodeEncodeError as error:
        raise InputError(f"YAML: {shown(error.object)} is no text that a file can hold ({error.reason}); rename it") from None


def listed(sentences: Sequence[str]) -> str:
    """Return the faults of a file as one text: a single fault unchanged, of several the first ten with numbers.

    Fields with the same fault are named together: "vendor, launch_year: required field is missing; add it".
    """
    fields: dict[str, list[str]] = {}
    for sentence in sentences:
        field, colon, fault = sentence.partition(": ")
        is_of_field = bool(colon) and "=" not in field
        fields.setdefault(fault if is_of_field else sentence, []).extend([field] if is_of_field else [])
    faults = []
    for fault, names in fields.items():
        if names:
            group = names[0][: names[0].rfind(".") + 1] if "/" in names[0] else ""  # a path is named once
            first, *others = names
            fault = f"{first_of([first, *(name.removeprefix(group) for name in others)], _MOST_NAMED)}: {fault}"
        faults.append(fault)
    if len(faults) == 1:
        return faults[0]
    first = "; ".join(f"({number}) {fault}" for number, fault in enumerate(faults[:MOST_FAULTS], 1))
    return f"{len(sentences)} faults: {first}" + (f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else "")
