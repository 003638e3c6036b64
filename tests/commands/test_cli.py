"""What every verb has in common: exit codes, one sentence on standard error, clean JSON on standard output."""

import json
import subprocess
import sys

import pytest

from perfmodel import cli
from perfmodel.commands import known
from perfmodel.errors import InputError, RunError

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


def test_no_arguments_show_the_help(capfd):
    assert cli.run([]) == 0
    assert "Commands:" in capfd.readouterr().out


def test_version(capfd):
    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("perfmodel 0.")


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_one_object_with_every_name_and_a_source(kind, capfd):
    assert cli.run([kind, "--json"]) == 0
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert err == ""
    assert set(content) == {"schema_version", kind}
    assert all(entry["name"] and entry["source"] for entry in content[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_one_line_for_each_name_that_points_to_its_source(kind, capfd):
    assert cli.run([kind, "--json"]) == 0
    entries = json.loads(capfd.readouterr().out)[kind]
    assert cli.run([kind]) == 0
    lines = capfd.readouterr().out.splitlines()
    for entry in entries:
        (line,) = [line for line in lines if line.startswith(f"{entry['name']} ")]
        mark = line.split()[-1]
        assert f"{mark} {' '.join(entry['source'].split())}" in lines


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_shows_its_facts(kind, capfd):
    assert cli.run([kind, "--json"]) == 0
    for entry in json.loads(capfd.readouterr().out)[kind]:
        assert cli.run([kind, entry["name"]]) == 0
        out = capfd.readouterr().out
        assert out.startswith(entry["name"])
        assert "source" in out


def test_a_closed_pipe_is_no_error():
    script = f"{sys.executable} -m perfmodel chips --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=500)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "{"


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
