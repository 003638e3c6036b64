"""The Python examples of README.md and docs/ pass `mypy --strict`, run outside of the package as a user runs it."""

import re
import subprocess
import sys

import pytest

from tests.documents import PAGES, ROOT, examples

#: Mistakes of a user's program, and the message of the type checker.
MISTAKES = {
    "perfmodel.predictt()": "Module has no attribute",
    "perfmodel.predict(modle='llama-3-8b')": 'Unexpected keyword argument "modle"',
    "perfmodel.predict(model='llama-3-8b', seq_len=1.5)": 'No overload variant of "predict"',
    "perfmodel.serve(model='llama-3-8b')": "Missing named argument",
}
JOB = "model='llama-3-8b', cluster='dgx-h100', chips=64, global_batch=512, seq_len='8k'"
SEARCH = "SearchResult[Prediction, Prediction, Objective, MemoryBudget]"
#: The type of a result for single values and for lists, without its modules.
REVEALED = {
    f"perfmodel.predict({JOB})": "Prediction",
    f"perfmodel.predict({JOB}, tp=[2, 4])": "Predictions",
    f"perfmodel.find_plans({JOB})": SEARCH,
    f"perfmodel.find_plans({JOB.replace('64', '[64]')})": f"tuple[{SEARCH}, ...]",
    f"perfmodel.predict({JOB}).step_time": "float",
}

#: Half of mypy's time is torch, of which no signature of the package has a type.
NOT_READ = (
    "[mypy]\n[mypy-torch.*,scipy.*,matplotlib.*,psutil.*,joblib.*,distributed.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
)


def programs(page):
    """Return the Python blocks of a page, which share their names."""
    return [example.block.text for example in examples((ROOT / page).read_text(encoding="utf-8")) if example.block.info == "python"]


def checked(folder):
    """Return the lines that mypy prints about the programs in a folder. The cache of the package stays from run to run."""
    (folder / "mypy.ini").write_text(NOT_READ, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".mypy_cache" / "examples"), "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_examples_and_results_have_types(tmp_path):
    for page in PAGES:
        if program := programs(page):
            (tmp_path / re.sub(r"[/-]", "_", page).replace(".md", ".py")).write_text("\n".join(program), encoding="utf-8")
    wrong = "import perfmodel\n" + "\n".join(MISTAKES)
    (tmp_path / "mistakes.py").write_text(wrong, encoding="utf-8")
    types = "import perfmodel\n" + "\n".join(f"reveal_type({expression})" for expression in REVEALED)
    (tmp_path / "result_types.py").write_text(types, encoding="utf-8")
    printed = checked(tmp_path)
    mistakes = [line for line in printed if line.startswith("mistakes.py:") and "error:" in line]
    for line, message in enumerate(MISTAKES.values(), 2):
        assert any(mistake.startswith(f"mistakes.py:{line}:") and message in mistake for mistake in mistakes), (line, mistakes)
    revealed = [re.sub(r"\w+\.", "", line.split('"')[1]) for line in printed if line.startswith("result_types.py:")]
    assert revealed == list(REVEALED.values())
    assert not [line for line in printed if not line.startswith(("mistakes.py:", "result_types.py:"))]
