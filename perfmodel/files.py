"""The edge of the program: YAML files become plain data that is known to have the right shape, or an `InputError`.

A shape is a pydantic-core schema in which every mapping forbids fields that it does not know. The classes of full pydantic would say the
same and cost 80 ms of every command; nothing here is imported before the first file is read.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import InputError, bad_field, one_line, suggest

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

MAX_FILE_BYTES = 8 * 2**20
MAX_DEPTH = 64


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML (or JSON) file holds. Repeated keys, other tags and anything that is not a mapping are refused."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{path}: cannot be read ({reason}); give the path of a YAML file") from error
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; this is not one of our files")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """As `read_yaml`, from the text itself; `where` names it in messages."""
    import yaml

    if _depth(text) > MAX_DEPTH:
        raise InputError(f"{where}: brackets or dashes nested more than {MAX_DEPTH} deep; this is not one of our files")
    try:
        loader = _loader(yaml)(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{where}: {line}not valid YAML ({one_line(error.problem)}); correct that line") from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        summary = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{where}: not valid YAML ({one_line(summary, 120)}); correct the file") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: must hold a mapping of fields at the top; write lines such as 'name: my-cluster'")
    return data


def _depth(text: str) -> int:
    """An upper bound of how deep the flow brackets and block dashes nest; the parser recurses once per level, in C."""
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


def _loader(yaml: Any) -> Any:
    """The C loader where PyYAML has it (10 times faster), refusing a key that is given twice."""
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

    return StrictLoader


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back as equal data; fields keep their order."""
    import yaml

    return str(yaml.dump(dict(data), Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, allow_unicode=True, width=120))


def record(required: Mapping[str, "CoreSchema"], optional: Mapping[str, "CoreSchema"] | None = None) -> "CoreSchema":
    """The shape of a mapping with exactly these fields."""
    from pydantic_core import core_schema

    fields = {name: core_schema.typed_dict_field(schema, required=True) for name, schema in required.items()}
    fields |= {name: core_schema.typed_dict_field(schema, required=False) for name, schema in (optional or {}).items()}
    return core_schema.typed_dict_schema(fields, extra_behavior="forbid", strict=True)


def check_shape(data: object, schema: "CoreSchema", *, where: str) -> Any:
    """`data` if it has the shape; else an `InputError` that names file, field, value, rule and the nearest known field."""
    from pydantic_core import SchemaValidator, ValidationError

    try:
        return SchemaValidator(schema).validate_python(data, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")  # a misspelt field before the one that it should be
    location = list(first["loc"])
    field = ".".join(one_line(part, 60) for part in location)
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "missing":
        raise InputError(f"{where}: {field}: required field is missing; add it{others}")
    if first["type"] in ("extra_forbidden", "invalid_key"):
        raise InputError(f"{where}: {field}: unknown field{suggest(location[-1], _known_fields(schema, location[:-1]))}{others}")
    rule = first["msg"][:1].lower() + first["msg"][1:]
    raise InputError(f"{where}: {bad_field(field or 'file', _short(first['input']), rule)}{others}")


def _known_fields(schema: Any, location: Iterable[int | str]) -> list[str]:
    """The fields that the mapping at `location` may have."""
    for part in location:
        if schema["type"] == "typed-dict":
            schema = schema["fields"][part]["schema"]
        elif schema["type"] == "list":
            schema = schema["items_schema"]
        elif schema["type"] == "dict":
            schema = schema["values_schema"]
    return list(schema.get("fields", ()))


def _short(value: object) -> str:
    import reprlib

    return reprlib.repr(value)
