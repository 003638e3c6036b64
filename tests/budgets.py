"""Measure what the budgets of `contracts/budgets.yaml` limit: `python -m tests.budgets` prints each measure and its budget."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import yaml

from tests.contracts.sources import PACKAGE, modules, tree_of

BUDGETS = Path(__file__).parent / "contracts" / "budgets.yaml"

#: A prediction whose functions and files are counted: a model of each prediction path, once everything is imported.
_PROFILED = """
import json, sys
import perfmodel
job = dict(cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=2, pp=2)
perfmodel.predict(model="llama-3-8b", **job)
seen = set()
def look(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and "perfmodel" in name:
        seen.add((name, frame.f_code.co_qualname))
sys.setprofile(look)
perfmodel.predict(model="llama-3-70b", **job)
sys.setprofile(None)
print(json.dumps([len(seen), len({name for name, _ in seen})]))
"""


#: Torch functions that compute a layer kind of the executor.
_KERNELS = {
    "attention": {
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "norm": {"rms_norm", "layer_norm", "rsqrt", "rsqrt_"},
    "rotary": {"cos", "sin", "polar"},
    "recurrence": {"conv1d", "softplus"},
    "experts": {"topk", "index_add_"},
    "embedding": {"embedding", "embedding_bag", "embedding_dense_backward"},
    "loss": {"cross_entropy", "scatter_add_"},
    "dropout": {"dropout", "rand_like"},
    "convolution": {"conv2d"},
}
#: What calls them to time them, to be independent of them, or to read users' modules.
_NO_LAYERS = ("measure/", "importer/", "per_operator/microbenchmarks.py", "uniform/gradient_check.py")

#: Files that start from users' own files and show answers as files: configurations, advice, traces, pages, sweeps, schemas.
_OWN_FILES = (
    *("configs/*.py", "web/*.py", "cost/trace.py", "parallel/measured.py", "fitting/measured_trace.py", "fitting/memory*.py"),
    *(f"cli/{name}.py" for name in ("configs", "doctor", "schema", "sweep", "web")),
    *(f"report/{name}.py" for name in ("advice", "html", "page", "trace")),
    *(f"verbs/{name}.py" for name in ("advice", "configs", "doctor", "exporting", "objects", "reporting", "schemas", "study", "sweep")),
    *("verbs/processes.py", "verbs/tracing.py"),
)


def layer_files() -> dict[str, set[str]]:
    """Layer kind -> files of execute/ that call its kernels."""
    files: dict[str, set[str]] = {kind: set() for kind in _KERNELS}
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("execute/") or name.removeprefix("execute/").startswith(_NO_LAYERS):
            continue
        functions = (node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
        called = {node.attr for node in functions if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"}
        for kind, kernels in _KERNELS.items():
            if called & kernels:
                files[kind].add(name)
    return files


def measures() -> dict[str, int]:
    """Measure -> its value today. Lines are those of .py files; a package is a folder directly below perfmodel/."""
    lines = {f"lines of {name}/": count for name, count in sorted(_lines_by_package().items())}
    functions, files = _run_through()
    return {
        "lines of the package": sum(lines.values()),
        **lines,
        "lines of configurations, advice, traces, pages and sweeps": sum(_num_lines(path) for path in _own_files()),
        "lines of the largest file": max(_num_lines(path) for path in modules()),
        "fields of the largest record": max(_record_sizes(), default=0),
        "implementations of a layer kind": max(map(len, layer_files().values())),
        "files that only serving uses": len(serving_files()),
        "private functions with one caller": sum(_one_caller(tree_of(path)) for path in modules()),
        "functions of one prediction": functions,
        "files of one prediction": files,
    }


def _own_files() -> list[Path]:
    paths = [path for pattern in _OWN_FILES for path in sorted(PACKAGE.glob(pattern))]
    assert all(any(PACKAGE.glob(pattern)) for pattern in _OWN_FILES), "a file was renamed"
    return paths


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _lines_by_package() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        counts[parts[0] if len(parts) > 1 else "."] += _num_lines(path)
    return counts


def _record_sizes() -> Iterator[int]:
    """Fields of each dataclass that needs no torch to be imported."""
    for path in modules():
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "execute" in parts or parts[-1] == "__main__":
            continue
        for _, member in inspect.getmembers(import_module(".".join(parts)), inspect.isclass):
            if is_dataclass(member):
                yield len(fields(member))


def serving_files() -> set[str]:
    """Files on a path with `serv`, and those that only such files import or name (a process imports what an audit names)."""
    importers: dict[str, set[str]] = {}
    known = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    for name, path in known.items():
        for node in ast.walk(tree_of(path)):
            targets = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            if isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for target in targets:
                if target in known:
                    importers.setdefault(target, set()).add(name)
    serving = {name for name in known if "serv" in name}
    while True:
        more = {name for name, users in importers.items() if name not in serving and users <= serving}
        if not more:
            return serving
        serving |= more


def _one_caller(tree: ast.Module) -> int:
    """Count the private functions and methods of a file that are named once outside their definition."""
    uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    private = (
        statement.name for body in bodies for statement in body if isinstance(statement, ast.FunctionDef) and statement.name.startswith("_")
    )
    return sum(uses[name] == 1 for name in private if not name.startswith("__"))


def _run_through() -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", _PROFILED], capture_output=True, text=True, check=True, timeout=120)
    functions, files = json.loads(done.stdout)
    return functions, files


def budgets() -> dict[str, int]:
    """Measure -> its budget."""
    content: dict[str, int] = yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))
    return content


def main() -> None:
    limits = budgets() if BUDGETS.exists() else {}
    for name, value in measures().items():
        print(f"{name}: {value:,} of {limits.get(name, 0):,}")


if __name__ == "__main__":
    main()
