"""Verbs run in a home folder and a working folder of their own."""

import json

import pytest

from perfmodel.cli import app as cli

#: It fits without any flag: looking for remedies takes longer than the prediction.
JOB = ["--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--chips", "64", "--global-batch", "512", "--seq-len", "8192"]


def with_flags(job: list[str], *flags: object) -> list[str]:
    """The job with these flags in place of its own: a flag given twice is two values."""
    words = [str(flag) for flag in flags]
    kept = [(name, value) for name, value in zip(job[::2], job[1::2], strict=True) if name not in words]
    return [*(word for pair in kept for word in pair), *words]


def joined(text: str) -> str:
    """Join printed text into one line: a report breaks its lines at the width of the page."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def call(capfd):
    """Run one command line: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def call_json(call):
    """Run one command line with --json: the object that it prints, alone."""

    def run(*arguments: object) -> dict:
        code, out, err = call(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run
