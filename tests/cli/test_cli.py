"""Behaviour of every verb: exit codes, one sentence on standard error, clean JSON on standard output."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from perfmodel.cli import app as cli
from perfmodel.cli import known
from perfmodel.cli.output import print_facts
from perfmodel.foundation.errors import InputError, RunError
from perfmodel.foundation.resources import resource_dir

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("chips", "clusters", "models", "profiles", "calibrations")


def perfmodel(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perfmodel", *arguments], capture_output=True, text=True, timeout=500, **options)


def one_sentence(text: str) -> bool:
    return text.startswith("perfmodel: ") and text.endswith("\n") and text.count("\n") == 1 and "Traceback" not in text


@pytest.mark.parametrize(
    "arguments",
    [["no-such-verb"], ["chips", "--no-such-flag"], ["chips", "one", "two"], ["chips", "no-such-chip"], ["clusters", "no-such-cluster"]],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, capfd):
    assert cli.run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert one_sentence(err)


@pytest.mark.parametrize(
    ("raised", "code"),
    [(InputError("tp=6: must divide 32;\nuse 4"), 2), (RunError("rank 1 died; see its log"), 1), (KeyboardInterrupt(), 130)],
    ids=["input", "run", "interrupt"],
)
def test_what_a_verb_raises_becomes_a_sentence_and_a_code(raised, code, monkeypatch, capfd):
    def fail(*_):
        raise raised

    monkeypatch.setattr("perfmodel.hardware.reader.list_chips", fail)
    assert cli.run(["chips"]) == code
    assert one_sentence(capfd.readouterr().err)


@pytest.mark.slow
def test_no_arguments_show_five_commands_with_examples_that_run(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run([]) == 0
    out = capfd.readouterr().out
    examples = [line for line in out.replace("\\\n", "").splitlines() if line.startswith("  perfmodel ")]
    assert len(examples) == 5
    assert max(map(len, out.splitlines())) <= 80
    for example in examples:
        assert cli.run(example.split()[1:]) == 0
    capfd.readouterr()


def test_help_has_every_command_and_option_under_a_heading(capfd):
    assert cli.run(["--help"]) == 0
    assert "\nTraining:\n  predict " in capfd.readouterr().out
    for verb in ("predict", "search", "serve", "limits", "shard"):
        assert cli.run([verb, "--help"]) == 0
        headings = [line for line in capfd.readouterr().out.splitlines() if line.endswith(":") and not line.startswith(" ")]
        assert set(headings) >= {"Job:", "Cluster:", "Framework:", "Output:"}


def test_version(capfd):
    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out == f"perfmodel {version('perfmodel')}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_one_object_with_every_name_and_a_source(kind, capfd):
    assert cli.run([kind, "--json"]) == 0
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert err == ""
    assert set(content) == {"schema_version", kind}
    assert all(entry["name"] and entry["source"] for entry in content[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_one_line_for_each_name_that_points_to_its_source(kind, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.run([kind, "--json"]) == 0
    entries = json.loads(capfd.readouterr().out)[kind]
    assert cli.run([kind, "--sources"]) == 0
    out = capfd.readouterr().out
    for entry in entries:
        (line,) = [line for line in out.splitlines() if line.startswith(f"{entry['name']} ")]
        mark = line.split()[-1]
        assert f"{mark} {' '.join(entry['source'].split())}" in " ".join(out.split())


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_shows_its_facts(kind, capfd):
    assert cli.run([kind, "--json"]) == 0
    for entry in json.loads(capfd.readouterr().out)[kind]:
        assert cli.run([kind, entry["name"]]) == 0
        out = capfd.readouterr().out
        assert out.startswith(entry["name"])
        assert "source" in out


def shell(script: str) -> subprocess.CompletedProcess[str]:
    script = script.replace("perfmodel", f"{sys.executable} -m perfmodel")
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("verb", ["chips --json", "chips", "--help", "predict --help", "--version"])
def test_a_closed_pipe_is_quiet_and_ends_as_a_signal_would(verb):
    done = shell(f"perfmodel {verb} | exec 0<&- sleep 0; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["141"]


@pytest.mark.parametrize(("destination", "says"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")])
@pytest.mark.parametrize("verb", ["chips --json", "--version"])
def test_output_that_cannot_be_written_is_a_sentence(verb, destination, says):
    done = shell(f"perfmodel {verb} {destination}")
    assert done.returncode == 1
    assert one_sentence(done.stderr) or verb.endswith("--json")
    assert f"standard output: cannot be written ({says})" in done.stderr


def test_complaints_that_cannot_be_written_change_nothing():
    assert [shell(f"perfmodel no-such-verb {destination}").returncode for destination in ("2>/dev/full", "2>&-")] == [2, 2]
    done = shell("perfmodel --version 2>&-")
    assert (done.returncode, done.stdout[:9]) == (0, "perfmodel")


INTERRUPTED = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv = ["perfmodel", "chips"]
from perfmodel.cli import main
main()
"""


def test_ctrl_c_while_modules_load_is_a_sentence():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (130, "perfmodel: interrupted\n")


def test_a_polite_end_is_a_sentence_and_its_own_code(tmp_path):
    ends = "cli.run = lambda _: signal.raise_signal(getattr(signal, sys.argv[1]))"
    reset = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # whoever starts the tests may ignore it, and children take that over
    code = f"import sys, signal\n{reset}\nfrom perfmodel.cli import app as cli\n{ends}\ncli.main()\n"
    for name, number in (("SIGTERM", 143), ("SIGHUP", 129)):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, timeout=500)
        assert (done.returncode, done.stderr) == (number, f"perfmodel: ended ({name})\n")


def test_modules_of_the_working_folder_are_not_run(tmp_path):
    (tmp_path / "typer.py").write_text("raise SystemExit('run')")
    assert perfmodel("--version", cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0


@pytest.mark.parametrize("columns", ["0", "10"])
def test_no_terminal_is_too_narrow_for_facts(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_facts("a title", [("step time", "12.5 ms")])
    assert re.search(r"a title.*step time +12\.5 ms", capsys.readouterr().out, re.DOTALL)


def test_python_dash_m_is_the_command():
    done = perfmodel("no-such-verb")
    assert done.returncode == 2
    assert one_sentence(done.stderr)


def test_a_recalled_number_has_a_star():
    provenance = {"memory_capacity": "read", "peak_flop_rate": "recalled", "memory_bandwidth": "mixed"}
    assert [known._marked("1", provenance, group) for group in ("memory_capacity", "peak_flop_rate", "memory_bandwidth")] == [
        "1  ",
        "1 *",
        "1 *",
    ]


MANY = "9" * 5000
LLAMA = ["--model", "gpt2", "--cluster", "dgx-h100", "--global-batch", "8", "--seq-len", "128"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", *LLAMA, "--chips", MANY],
        ["predict", *LLAMA, "--chips", "8", "--tp", MANY],
        ["predict", *LLAMA, "--chips", "8", "--profile", "\x1b[31m" + "x" * 5000],
        ["explain", "no-such-plan", "--why-not", f"tp={MANY}"],
        ["shard", "alexnet", "--cluster", "dgx-h100", "--chips", "2", "--size", f"image={MANY}"],
        ["shard", "alexnet", "--cluster", "dgx-h100", "--chips", "2", "--size", "batch=3", "--batch", "4"],
        ["shard", "alexnet", "--cluster", "dgx-h100", "--chips", "2", "--size", "name=4"],
        ["shard", "alexnet", "--cluster", "dgx-h100", "--chips", "2", "--stages", MANY],
        ["import", "torch.nn:Identity", "--inputs", f"float32[{MANY}]"],
        ["profiles", "x" * 300],
        ["profiles", "/dev/zero.yaml"],
    ],
)
def test_values_of_any_length_and_kind_are_one_short_sentence(arguments, capfd):
    assert cli.run(arguments) == cli.EXIT_BAD_INPUT
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("perfmodel: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable()
    assert len(err) < 900


def test_an_ascii_terminal_gets_every_name(tmp_path):
    folder = tmp_path / "modèle"
    folder.mkdir()
    shutil.copy(Path(cli.__file__).parents[1] / "workload" / "models" / "gpt2.json", folder / "config.json")
    command = [sys.executable, "-m", "perfmodel", "models", str(folder)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    text = subprocess.run(command, capture_output=True, env=environment, check=True, cwd=tmp_path)
    assert b"mod\\xe8le" in text.stdout
    process = subprocess.run([*command, "--json"], capture_output=True, env=environment, check=True, cwd=tmp_path)
    assert "modèle" in json.dumps(json.loads(process.stdout), ensure_ascii=False)


def test_what_a_file_holds_does_not_steer_the_terminal(tmp_path, capfd):
    text = (resource_dir("hardware_specs") / "clusters" / "dgx-h100.yaml").read_text(encoding="utf-8")
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("Vendors", r"\e[31mVendors"), encoding="utf-8")
    assert cli.run(["clusters", str(path)]) == 0
    out = capfd.readouterr().out
    assert "[31mVendors" in out
    assert "\x1b" not in out
