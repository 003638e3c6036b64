"""The wheel, installed alone outside the repository, works from an empty folder and without torch."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_IN_A_PLAIN_INSTALL = ("torch", "functorch", "perfmodel", "_perfmodel")

pytestmark = pytest.mark.slow


def call(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    return subprocess.run([str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """bin/ of a fresh environment that has the wheel and its base dependencies, lent from this one by links, but not torch."""
    home = tmp_path_factory.mktemp("installed")
    lent = home / "lent"
    lent.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(NOT_IN_A_PLAIN_INSTALL) and entry.suffix != ".pth":
            (lent / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "env"], check=True, timeout=500)
    python = home / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=500)
    purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=home).stdout.strip()
    (Path(purelib) / "lent.pth").write_text(f"{lent}\n")
    return python.parent


@pytest.fixture
def empty(tmp_path) -> Path:
    return tmp_path


def test_the_wheel_holds_every_data_file_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("perfmodel-")}
    shipped = {
        f"perfmodel/_data/{path.relative_to(ROOT).as_posix()}"
        for folder in ("hardware_specs", "strategies")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    assert {name for name in inside if name.startswith("perfmodel/_data/")} == shipped
    assert {name.partition("/")[0] for name in inside} == {"perfmodel"}
    assert not [name for name in inside if name.endswith((".pyc", ".tmp"))]


def test_it_runs_from_the_wheel_without_torch(installed, empty):
    done = call(installed / "python", "-c", "import perfmodel, sys; print(perfmodel.__file__); import torch", folder=empty)
    assert str(installed.parent) in done.stdout
    assert "No module named 'torch'" in done.stderr


def test_the_version_is_that_of_the_wheel(installed, empty, wheel):
    done = call(installed / "perfmodel", "--version", folder=empty)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"perfmodel {wheel.name.split('-')[1]}\n", "")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("models --json", "models"),
        ("profiles --json", "profiles"),
        ("predict --model llama-3-8b --cluster dgx-h100 --chips 64 --global-batch 512 --seq-len 8192 --tp 2 --json", "step_time"),
        ("predict megatron-175b --json", "fits"),
        ("search --model gpt2 --cluster dgx-h100 --chips 8 --global-batch 16 --seq-len 512 --json", "plans"),
    ],
)
def test_commands_work_in_an_empty_folder(installed, empty, arguments, key):
    done = call(installed / "perfmodel", *arguments.split(), folder=empty)
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout)[key]
    assert list(empty.iterdir()) == []


def test_what_needs_torch_says_so(installed, empty):
    done = call(installed / "perfmodel", "run", "ddp", folder=empty)
    assert done.returncode == 2
    assert done.stderr == "perfmodel: torch: is needed to run a plan; install perfmodel[torch]\n"


def test_tables_are_printed_too(installed, empty):
    done = call(installed / "perfmodel", "chips", folder=empty)
    assert (done.returncode, done.stderr) == (0, "")
    assert "source" in done.stdout
