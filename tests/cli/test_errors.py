"""Errors on standard error: a sentence, or with --json one object with code, field, value, message and suggestions."""

import json
import re

import pytest

from perfmodel.cli import app as cli
from tests.cli.conftest import JOB, with_flags

#: Command, exit code, and fields of the object.
ERRORS = {
    "unknown name": (
        ["predict", *with_flags(JOB, "--model", "lama-3-8b")],
        dict(code="unknown_name", field="model", value="lama-3-8b", suggestions=["llama-3-8b", "llama-3.1-8b", "llama-3-70b"]),
    ),
    "rule": (
        ["predict", *with_flags(JOB, "--chips", "48"), "--tp", "6"],
        dict(code="bad_input", field="tp", value="6", suggestions=["1", "2", "4", "8", "16", "32"]),
    ),
    "no number": (["search", *JOB, "--top", "ten"], dict(code="bad_input", field="top", value="ten")),
    "no whole number": (["predict", *JOB, "--zero", "three"], dict(code="bad_input", field="zero", value="three")),
    "unknown flag": (["predict", *JOB, "--batch-size", "8"], dict(code="unknown_option", field="batch_size", value=None)),
    "missing": (
        ["predict", *JOB[2:]],
        dict(code="missing", field="model", suggestions=["--model: give a name from `perfmodel models` or the path of a config.json"]),
    ),
    "unknown verb": (["predit"], dict(code="unknown_option", field="predit")),
    "nothing fits": (
        ["search", *with_flags(JOB, "--model", "llama-3-70b", "--chips", "8"), "--tp", "8", "--micro-batch", "1"],
        dict(code="nothing_fits"),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_with_json_an_error_is_one_object(case, call):
    arguments, expected = ERRORS[case]
    code, _, err = call(*arguments, "--json")
    assert code == 2
    error = json.loads(err)
    assert list(error) == ["code", "field", "value", "message", "suggestions"]
    assert {name: error[name] for name in expected} == expected
    assert error["message"] in call(*arguments)[2]


@pytest.mark.parametrize("flags", [["--dp", "three"], ["--micro-batch", "many"], ["--pp", "1.5"]])
def test_messages_are_ours_and_not_a_librarys(flags, call):
    err = call("predict", *JOB, *flags)[2]
    name = flags[0].lstrip("-").replace("-", "_")
    assert f"{name}={flags[1]}: must be a whole number" in err.replace("micro-batch", "micro_batch")
    assert "Input should be" not in err


def test_every_fault_is_in_json_and_the_sentence_is_short(call, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: mine\n" + "".join(f"unknown_{index}: 1\n" for index in range(40)))
    arguments = ["predict", *with_flags(JOB, "--cluster", str(path))]
    code, _, err = call(*arguments, "--json")
    error = json.loads(err)
    assert code == 2
    message = error["message"].replace(str(path), "")
    assert len(message) <= 4 * 200
    assert all(len(fault) <= 200 for fault in re.split(r"faults: |; (?=\(\d+\) )", message))
    assert error["message"] in call(*arguments)[2]
    assert "chip, num_chips, chips_per_node, tiers: required field is missing" in error["details"]


def test_a_shell_completes_verbs_and_flags(capfd, monkeypatch):
    monkeypatch.setenv("_PERFMODEL_COMPLETE", "complete_bash")
    completions = []
    for words, index in (("perfmodel pred", "1"), ("perfmodel predict --micro", "2")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", index)
        with pytest.raises(SystemExit, match="0"):
            cli.run([])
        completions.append(capfd.readouterr().out.split())
    assert completions == [["predict"], ["--micro-batch"]]
