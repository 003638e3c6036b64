"""Results that calls share are stored in a session; caches of the process hold constants of the package. All are bounded."""

import ast

import pytest

from perfmodel.foundation.session import session_cache
from tests.contracts.sources import PACKAGE, modules, tree_of

#: Cached for the process although they have arguments: each result is a constant of shipped data or of the code.
CONSTANTS = {
    "cli/schema.py: command_schema": "schemas of a command",
    "configs/tables.py: _content": "shipped table by name",
    "foundation/files.py: _loader": "class that reads YAML",
    "foundation/records.py: _hints": "types of the fields of a class",
    "foundation/resources.py: resource_dir": "shipped folder by name",
    "foundation/schema.py: model_of": "model of the files of a class",
    "foundation/words.py: part_of_word": "parts of a class by word",
    "foundation/words.py: parts_of": "parts of a class",
    "frameworks/profile.py: _shipped_profile": "shipped profile by name",
    "frameworks/releases.py: load_releases": "shipped recipes by framework",
    "frameworks/schemas.py: profile_model": "model of the files of a class",
    "frameworks/shipped.py: with_bases": "shipped frameworks by name",
    "hardware/reader.py: _is_shipped": "whether a shipped file has the name",
    "hardware/reader.py: _shipped_for": "shipped calibrations by chip",
    "hardware/reader.py: _shipped_prices": "shipped prices",
    "parallel/algebra/rules.py: _shipped": "shipped rule set by name",
    "parallel/interval.py: interval_factors": "shipped factors by their basis",
    "web/site.py: page": "text of the page",
    "workload/models.py: parts_of_family": "entries of the shipped table by family",
    "workload/models.py: _shipped_model": "shipped model by name",
    "workload/models.py: _hub_ids": "hub ids of shipped models",
}
MOST = 65536
CONTAINERS = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "deque",
    "OrderedDict",
    "Counter",
    "WeakKeyDictionary",
    "WeakSet",
    "WeakValueDictionary",
}


def statements(body):
    """Yield the statements of modules and classes, not those of functions: a cache in a function ends with its call."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from statements(getattr(statement, field, ()))


def called(node):
    """Return the name of a function without its module: of a decorator, or of the decorator that a call makes."""
    while isinstance(node, ast.Call):
        node = node.func
    return ast.unparse(node).rpartition(".")[2]


def cached(tree):
    """Yield (name, cache, whether the function has no argument) of every cached function outside of functions."""
    caches = ("cache", "lru_cache", "session_cache")
    for statement in statements(tree.body):
        if isinstance(statement, ast.FunctionDef):
            arguments = statement.args
            is_constant = not (arguments.args or arguments.kwonlyargs or arguments.posonlyargs or arguments.vararg or arguments.kwarg)
            yield from ((statement.name, cache, is_constant) for cache in statement.decorator_list if called(cache) in caches)
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call) and called(statement.value) in caches:
            yield ast.unparse(statement.targets[0]), statement.value.func, False


def faults(tree, where):
    """Return what breaks the rules in a module."""
    broken = []
    constants = {
        target.id: ast.literal_eval(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for name, cache, is_constant in cached(tree):
        bounds = [word.value for word in cache.keywords if word.arg == "maxsize"] if isinstance(cache, ast.Call) else []
        bound = constants.get(ast.unparse(bounds[0]), getattr(bounds[0], "value", None)) if bounds else None
        if called(cache) != "session_cache" and not is_constant and f"{where}: {name}" not in CONSTANTS:
            broken.append(f"{where}: {name}: depends on its arguments; store it in the session (`session_cache`)")
        if not (is_constant and called(cache) == "cache") and not (isinstance(bound, int) and 0 < bound <= MOST):
            broken.append(f"{where}: {name}: give the cache a bound")
    for statement in statements(tree.body):
        value = getattr(statement, "value", None)
        is_empty = (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)
        is_container = isinstance(value, ast.Call) and called(value) in CONTAINERS and not (value.args or value.keywords)
        if is_empty or is_container:
            broken.append(f"{where}: {ast.unparse(statement)}: state of the module; store it in the session")
    return broken


def test_what_calls_share_is_in_the_session():
    assert [fault for path in modules() for fault in faults(tree_of(path), str(path.relative_to(PACKAGE)))] == []


ADDED = """
from functools import cache, lru_cache
_HELD: dict[str, int] = {}

@lru_cache(maxsize=8)
def of_a_plan(plan): ...

@cache
def of_a_model(model): ...

@lru_cache
def shipped(): ...

@session_cache(maxsize=10**9)
def of_a_job(job): ...

class Record:
    @staticmethod
    @lru_cache(maxsize=None)
    def read(text): ...

_compiled = lru_cache(maxsize=8)(compile)

@cache
def constant(): ...

def local(plan):
    @cache
    def of_layer(layer): ...
    seen = {}
"""


def test_a_cache_elsewhere_is_found():
    names = [fault.partition(": ")[2].partition(":")[0] for fault in faults(ast.parse(ADDED), "cost/step.py")]
    assert sorted(names) == sorted(["_HELD", "of_a_plan", "of_a_model", "of_a_model", "shipped", "of_a_job", "read", "read", "_compiled"])


def test_the_list_of_constants_is_current():
    names = {f"{path.relative_to(PACKAGE)}: {name}" for path in modules() for name, cache, _ in cached(tree_of(path))}
    assert [entry for entry in CONSTANTS if entry not in names] == []


def test_every_session_cache_states_its_bound():
    with pytest.raises(TypeError, match="maxsize"):
        session_cache()
