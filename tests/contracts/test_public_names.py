"""The names that users import stay, and no public function hides a subpackage."""

import importlib.util
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import perfmodel

VERBS = (
    "predict",
    "find_plans",
    "explain_plan",
    "find_limits",
    "compare_plans",
    "run_plan",
    "audit_plan",
    "calibrate_machine",
    "fit_runs",
    "import_graph",
    "validate_cases",
)


@pytest.mark.parametrize("name", perfmodel.__all__)
def test_every_public_name_resolves(name):
    assert getattr(perfmodel, name) is not None
    assert name in dir(perfmodel)


@pytest.mark.skipif(importlib.util.find_spec("perfmodel.verbs.api") is None, reason="the verbs are not built yet")
@pytest.mark.parametrize("name", VERBS)
def test_the_verbs_are_exported_functions(name):
    assert name in perfmodel.__all__
    assert inspect.isfunction(getattr(perfmodel, name))


def test_no_public_name_is_a_subpackage():
    below = {module.name for module in pkgutil.iter_modules(perfmodel.__path__)}
    assert below & set(perfmodel.__all__) == set()


def test_the_version_is_that_of_the_installed_package():
    assert perfmodel.__version__ == version("perfmodel")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert perfmodel.__version__ == project["version"], "install the checkout again: pip install -e ."


def test_importing_the_package_does_not_read_its_metadata():
    script = "import sys, perfmodel; print('importlib.metadata' in sys.modules, perfmodel.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split() == ["False", perfmodel.__version__]


def test_a_checkout_that_is_not_installed_has_no_known_version():
    root = Path(__file__).parents[2]
    script = f"import sys; sys.path.insert(0, {str(root)!r}); import perfmodel; print(perfmodel.__version__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "0+unknown\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = perfmodel.no_such_name


def test_verbs_have_the_names_of_the_command_line_too():
    pairs = {"audit": "audit_plan", "compare": "compare_plans", "explain": "explain_plan", "run": "run_plan", "validate": "validate_cases"}
    for name, other in (pairs | {"shard": "shard_network"}).items():
        assert getattr(perfmodel, name) is getattr(perfmodel, other)
    assert callable(perfmodel.search.eliminate)  # a package: `find_plans` is the verb
