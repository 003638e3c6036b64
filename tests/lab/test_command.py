from __future__ import annotations

import runpy

import pytest

from lab.command import command_parser, exits_on_errors
from perfmodel.foundation.errors import InputError


def test_a_command_has_its_module_and_the_first_line_of_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_parser("fitted", "What the runs say.\n\nMore of it.").parse_args(["--help"])
    out = capsys.readouterr().out
    assert "python -m lab.fitted" in out
    assert "What the runs say." in out
    assert "More of it" not in out


def test_bad_input_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    @exits_on_errors
    def main(value: int) -> None:
        if value:
            raise InputError(f"value={value}: must be 0; use 0")

    assert main(0) == 0
    assert main(1) == 2
    assert capsys.readouterr().err == "value=1: must be 0; use 0\n"


@pytest.mark.parametrize("package", ["left_out", "pase"])
def test_a_package_ends_with_the_exit_code_of_its_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [package, "--graph=none"] if package == "pase" else [package, "none.jsonl"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"lab.{package}", run_name="__main__")
    assert stop.value.code == 2
