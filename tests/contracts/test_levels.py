"""Imports go down, never up or across; each level has its own third-party packages; the light doors stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.sources import PACKAGE, modules, nodes_of, tree_of

#: ARCHITECTURE.md, "Levels". A package or module that is missing here fails the test: decide on its level first.
LEVEL = {
    "foundation": 0,
    "hardware": 1, "workload": 1,
    "parallel": 2, "frameworks": 2, "configs": 2,
    "cost": 3,
    "search": 4, "planner": 4, "uncertainty": 4,
    "report": 5, "export": 5, "calibrate": 5, "execute": 5, "validation": 5, "fitting": 5,
    "verbs": 6, "cli": 6, "web": 6, "signatures": 6, "__main__": 6, "__init__": 6,
}  # fmt: skip

#: The only imports between two packages of one level. What a framework does concerns plans, which name it and no more; rows of a fit are
#: planned like published runs, and both print tables. Level 6 is one unit.
SIDEWAYS = {
    ("frameworks", "parallel"),
    ("configs", "parallel"),
    ("planner", "search"),
    ("planner", "uncertainty"),
    ("validation", "report"),
    ("fitting", "report"),
    ("fitting", "validation"),
}

THIRD_PARTY_OF_LEVEL = {
    0: {"numpy"},
    1: {"numpy"},
    2: {"numpy"},
    3: {"numpy"},
    4: {"numpy", "scipy"},
    5: {"numpy"},
    6: {"numpy", "typer", "rich"},
}
THIRD_PARTY_OF_PACKAGE = {
    "report": {"pandas", "matplotlib"},
    "calibrate": {"scipy"},
    "validation": {"matplotlib"},
    "execute": {"torch"},
}

#: Packages of the file edge: below the costs, inside a function anywhere, at the head of a module only where files are read or written;
#: at any level in `schemas.py`.
FILE_EDGE = {"yaml", "pydantic", "pydantic_core"}
#: Packages that one module below their level imports, and only inside a function: results of every level return data frames.
LAZY_OF_MODULE = {
    ("foundation", "frames"): {"pandas"},
    ("verbs", "processes"): {"joblib", "distributed"},
    ("cli", "schema"): {"anyio", "mcp", "mcp_types"},
}
EDGE_LEVELS = {0, 1, 2}
EDGE_WORDS = {"reader", "writer", "schema", "schemas", "file", "files", "huggingface"}


def unit_of(path: Path) -> str:
    """The package or module directly below perfmodel/ that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    """Every import as (absolute dotted name, line, whether it runs when the module is loaded)."""
    deferred = {child for node in ast.walk(tree) if _is_function(node) or _is_for_types(node) for child in ast.walk(node)}
    for node in ast.walk(tree):
        on_load = node not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, on_load
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base == "perfmodel":
                for alias in node.names:
                    yield f"perfmodel.{alias.name}", node.lineno, on_load
            else:
                yield base, node.lineno, on_load
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.args[0].value, node.lineno, on_load


def violations(unit: str, source: str, *, package: str = "perfmodel", stem: str = "module") -> list[str]:
    level = LEVEL[unit]
    messages = []
    for name, line, on_load in imports(ast.parse(source), package):
        top, _, rest = name.partition(".")
        if top == "perfmodel":
            target = rest.partition(".")[0]
            if target in ("", unit, "__version__"):
                continue
            if target not in LEVEL:
                messages.append(f"line {line}: {name} is on no level")
            elif LEVEL[target] > level:
                messages.append(f"line {line}: level {level} ({unit}) imports {name} of level {LEVEL[target]}")
            elif LEVEL[target] == level and level not in (0, 6) and (unit, target) not in SIDEWAYS:
                messages.append(f"line {line}: {unit} imports {name} of its own level {level}")
        elif top in FILE_EDGE:
            at_the_edge = level in EDGE_LEVELS and (not on_load or EDGE_WORDS & set(stem.split("_")))
            if not at_the_edge and stem != "schemas":
                messages.append(f"line {line}: {name} belongs to the file edge of levels 0 to 2, and to schemas")
        elif top not in sys.stdlib_module_names:
            allowed = THIRD_PARTY_OF_LEVEL[level] | THIRD_PARTY_OF_PACKAGE.get(unit, set())
            if not on_load:
                allowed = allowed | LAZY_OF_MODULE.get((unit, stem), set())
            if top not in allowed:
                messages.append(f"line {line}: {unit} (level {level}) imports {name}; it may use {', '.join(sorted(allowed))}")
    return messages


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_keeps_to_its_level(path):
    package = ".".join(("perfmodel", *path.relative_to(PACKAGE).parent.parts))
    assert unit_of(path) in LEVEL, f"{unit_of(path)}: give it a level in this test and in ARCHITECTURE.md"
    assert violations(unit_of(path), path.read_text(encoding="utf-8"), package=package, stem=path.stem) == []


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("cost", "import perfmodel.planner"),
        ("cost", "from perfmodel import planner"),
        ("hardware", "from perfmodel.workload.job import TrainingJob"),
        ("search", "from perfmodel.planner import space"),
        ("report", "from perfmodel.execute import run"),
        ("planner", "def f():\n    import torch"),
        ("cost", "import scipy.optimize"),
        ("cost", "import yaml"),
        ("hardware", "import pydantic"),
        ("calibrate", "import torch"),
        ("parallel", "from importlib import import_module\nimport_module('perfmodel.cost.step')"),
        ("parallel", "from ..cost import step"),
        ("verbs", "import pandas"),
    ],
)
def test_a_breach_is_found(unit, source):
    assert violations(unit, source, package=f"perfmodel.{unit}")


@pytest.mark.parametrize(("stem", "source"), [("frames", "import pandas"), ("text", "def f():\n    import pandas")])
def test_pandas_is_imported_by_one_module_of_the_lowest_level_and_not_on_load(stem, source):
    assert violations("foundation", source, stem=stem)


@pytest.mark.parametrize(
    ("unit", "stem", "source"),
    [
        ("planner", "rank", "from perfmodel.search import eliminate"),
        ("execute", "worker", "import torch.distributed as dist"),
        ("hardware", "reader", "import yaml"),
        ("parallel", "profile", "def load():\n    import yaml"),
        ("foundation", "frames", "if TYPE_CHECKING:\n    from pandas import DataFrame\ndef f():\n    import pandas"),
        ("cli", "predict", "from rich.table import Table\nfrom perfmodel.report import plot"),
    ],
)
def test_what_is_allowed_passes(unit, stem, source):
    assert violations(unit, source, package=f"perfmodel.{unit}", stem=stem) == []


def test_every_folder_is_a_package():
    folders = {path.parent for path in modules()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


HEAVY = ("torch", "pandas", "scipy", "matplotlib")


def test_no_two_files_import_each_other():
    """Not even inside functions; the names of types may go both ways."""
    reads: dict[str, set[str]] = {}
    for path in modules():
        types = {child for node in nodes_of(path) if _is_for_types(node) for child in ast.walk(node)}
        imported = {node.module for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module and node not in types}
        reads[".".join(["perfmodel", *path.relative_to(PACKAGE).with_suffix("").parts])] = imported
    circles = {(one, other) for one, others in reads.items() for other in others if one < other and one in reads.get(other, ())}
    assert circles == set()


def loaded_modules(statement: str) -> set[str]:
    script = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_the_command_line_computes_nothing():
    """Verbs do the work of the command line: it neither runs torch, nor fits, nor searches a graph."""
    imported = {name for path in modules() if unit_of(path) == "cli" for name, *_ in imports(tree_of(path), "perfmodel.cli")}
    assert {name for name in imported if name.split(".")[1:2] in (["execute"], ["calibrate"], ["search"])} == set()


def test_import_perfmodel_loads_nothing_heavy():
    assert loaded_modules("import perfmodel") & {*HEAVY, "numpy", "pydantic", "yaml", "typer", "rich"} == set()


@pytest.mark.parametrize("arguments", ["--help", "predict --help", "chips --json"])
def test_the_command_line_loads_nothing_heavy(arguments):
    loaded = loaded_modules(f"from perfmodel.cli import main; sys.argv[1:] = {arguments.split()!r}; main()")
    assert "typer" in loaded
    assert loaded & set(HEAVY) == set()


def test_help_loads_neither_rich_nor_pydantic():
    assert loaded_modules("from perfmodel.cli import main; sys.argv[1:] = ['--help']; main()") & {"rich", "pydantic", "numpy"} == set()


def test_a_prediction_loads_neither_rich_nor_pydantic():
    job = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "8", "--seq-len", "1k"]
    arguments = ["predict", *job, "--tp", "2", "--json"]
    loaded = loaded_modules(f"from perfmodel.cli import main; sys.argv[1:] = {arguments!r}; main()")
    assert {"numpy", "yaml"} <= loaded
    assert loaded & {*HEAVY, "rich", "pydantic", "pydantic_core"} == set()
