"""Reports fit 100 columns, or the 80 of a narrow terminal, and end with at most five notes."""

import os
import re
import subprocess
import sys

import pytest

from perfmodel.cli.output import print_command, print_table
from perfmodel.report.document import MOST_NOTES
from tests.cli.conftest import JOB, with_flags
from tests.marks import mostly_nightly

SERVED = ["--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "8", "--input-len", "1k", "--output-len", "1k"]
EXPERTS = ["--model", "deepseek-v3", "--cluster", "dgx-h100", "--chips", "2048", "--global-batch", "15360", "--seq-len", "4k"]
REPORTS = {
    "predict": ["predict", *JOB, "--tp", "2", "--zero", "1", "--profile", "megatron"],
    "predict, does not fit": ["predict", *with_flags(JOB, "--model", "llama-3-8b"), "--interval"],
    "predict, experts": ["predict", *EXPERTS, "--ep", "64", "--pp", "16", "--zero", "1", "--profile", "megatron"],
    "predict, several": ["predict", *JOB[:2], *JOB[4:], "--cluster", "dgx-h100,dgx-b200,dgx-a100", "--chips", "64,128", "--tokens", "15T"],
    "search": ["search", *JOB],
    "search, framework": ["search", *JOB, "--profile", "megatron", "--tokens", "15T"],
    "search, several": ["search", *JOB[:2], *JOB[4:], "--cluster", "dgx-h100,dgx-a100", "--profile", "megatron"],
    "explain": ["explain", "llama-3.1-405b", "--why-not", "tp=16"],
    "explain, trust": ["explain", "fsdp", "--trust"],
    "compare": ["compare", "ddp", "fsdp", "llama-3.1-405b", "megatron-22b", "megatron-175b", "megatron-530b", "megatron-1t"],
    "limits": ["limits", "--model", "gpt2", "--cluster", "dgx-h100", "--chips", "2", "--seq-len", "1k"],
    "serve": ["serve", *SERVED, "--concurrency", "64", "--ttft", "1s"],
    "serve, several": ["serve", *SERVED, "--concurrency", "16,64,256"],
    "serve, operators": ["serve", *SERVED, "--concurrency", "64", "--operators"],
    "serve, search": ["serve", "--search", *SERVED, "--ttft", "1s", "--tpot", "30ms"],
    "models": ["models"],
    "clusters": ["clusters"],
    "chips": ["chips"],
    "chips, one": ["chips", "h100-sxm-80gb"],
    "profiles": ["profiles"],
    "profiles, one": ["profiles", "megatron"],
    "engines": ["engines"],
    "networks": ["networks"],
    "calibrations": ["calibrations"],
}


#: The examples of the pages (tests/test_documents.py) have 100 columns in `make test`; no report is wider than that.
PAGES = [(name, columns) for columns in (80, 100, 200) for name in REPORTS]
KEPT = [(name, 80) for name in REPORTS] + [(name, 200) for name in ("predict", "search, framework", "serve", "models")]


@pytest.mark.parametrize("name, columns", mostly_nightly(PAGES, KEPT))
@pytest.mark.slow
def test_no_line_is_wider_than_the_page(name, columns, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = call(*REPORTS[name])
    wide = [line for line in out.splitlines() if len(line) > min(columns, 100) and not re.search(r"\S{60}", line)]
    assert wide == []
    assert len(re.findall("^note: ", out, re.MULTILINE)) <= MOST_NOTES


def test_verbose_adds_notes_and_wide_adds_columns(call):
    short, verbose, wide = (
        call("search", *with_flags(JOB, "--model", "llama-3-8b"), "--profile", "megatron", *flags)[1]
        for flags in ((), ("--verbose",), ("--wide",))
    )
    assert re.search(r"^\d+ more notes: --verbose$", short, re.MULTILINE)
    assert len(re.findall("^note: ", verbose, re.MULTILINE)) > len(re.findall("^note: ", short, re.MULTILINE))
    assert "Rejected plans" in verbose
    assert "columns not shown: " in short
    assert "TFLOP/s" in wide
    assert "columns not shown" not in wide


def test_a_table_too_wide_for_the_page_is_printed_in_blocks_with_its_first_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_table(["name", *(f"column {number}" for number in range(20))], [["a", *(f"value {number}" for number in range(20))]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"value {number}" in out for number in range(20))
    assert out.count("name") == len([line for line in out.splitlines() if line.startswith("a ")]) > 1


def test_a_long_command_breaks_before_an_option_so_that_a_shell_reads_it(capsys):
    import shlex

    command = "vllm serve MODEL " + " ".join(f"--option-{number} '{{\"key\": {number}}}'" for number in range(12))
    print_command(command)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert shlex.split(printed.replace("\\\n", "")) == shlex.split(command)


@pytest.mark.slow
def test_a_report_on_a_terminal_has_its_width():
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-m", "perfmodel", "predict", *JOB]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, env=environment) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the other end is closed
            pass
        assert process.wait(timeout=100) == 0
    os.close(ours)
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in text.decode().splitlines()]
    assert 70 < max(map(len, lines)) <= 80
