"""`perfmodel mcp`: agents list the commands as tools and call them."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from perfmodel.cli.app import VERBS
from perfmodel.cli.schema import TOOLS, command_line, make_server, tool_schema
from perfmodel.foundation.errors import InputError

JOB = {"model": "gpt2", "cluster": "dgx-h100", "chips": 8, "global-batch": 8, "seq-len": "1k"}


def ask(question: Callable[[Client], Awaitable[Any]], server: Any = None) -> Any:
    async def answer() -> Any:
        with anyio.fail_after(60):
            async with Client(server or make_server()) as client:
                return await question(client)

    return anyio.run(answer)


def call_tool(tool: str, **arguments: Any) -> Any:
    return ask(lambda client: client.call_tool(tool, arguments))


@pytest.mark.slow
def test_an_agent_that_starts_the_command_gets_a_prediction_over_its_streams():
    async def question(client: Client) -> Any:
        listed = await client.list_tools()
        return listed, await client.call_tool("predict", {**JOB, "format": "json"})

    listed, answer = ask(question, stdio_client(StdioServerParameters(command=sys.executable, args=["-P", "-m", "perfmodel", "mcp"])))
    assert [tool.name for tool in listed.tools] == list(TOOLS)
    assert not answer.is_error
    assert answer.structured_content["fits"] is True
    assert answer.structured_content["step_time"] > 0


def test_a_result_is_markdown_unless_another_form_is_given():
    answer = call_tool("models", name="gpt2")
    assert not answer.is_error
    assert answer.structured_content is None
    assert "gpt2" in answer.content[0].text


@pytest.mark.slow
def test_an_answer_of_no_plan_is_a_result_and_bad_input_an_error():
    nothing_fits = {"model": "llama-3-70b", "cluster": "dgx-h100", "chips": 1, "global-batch": 1, "seq-len": "8k"}
    answer = call_tool("predict", **nothing_fits)
    assert not answer.is_error
    assert "DOES NOT FIT" in answer.content[0].text
    answer = call_tool("predict", **JOB, tp=3)
    assert answer.is_error
    assert "tp=3" in answer.content[0].text


def test_unknown_arguments_are_answered_with_the_known_ones():
    answer = call_tool("predict", modle="gpt2")
    assert answer.is_error
    assert "did you mean 'model'" in answer.content[0].text


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_are_commands_and_their_arguments_options(tool):
    content = tool_schema(tool)
    assert tool in VERBS
    assert content["input"]["properties"]["format"]["enum"] == ["markdown", "json", "csv"]
    assert not {"json", "wide"} & set(content["input"]["properties"])


@pytest.mark.parametrize(
    ("tool", "given", "expected"),
    [
        ("predict", {"tp": 2, "model": ["a", "b"]}, ["--format=markdown", "--tp=2", "--model=a", "--model=b", "--"]),
        ("predict", {"plan": "--help", "verbose": True}, ["--format=markdown", "--verbose", "--", "--help"]),
        ("predict", {"sequence-parallel": False, "verbose": False}, ["--format=markdown", "--no-sequence-parallel", "--"]),
        ("predict", {"sequence-parallel": True, "tp": None}, ["--format=markdown", "--sequence-parallel", "--"]),
        ("compare", {"plans": ["a.yaml", "b.yaml"], "format": "json"}, ["--format=json", "--", "a.yaml", "b.yaml"]),
    ],
)
def test_arguments_become_a_command_line(tool, given, expected):
    assert command_line(tool, given) == [tool, *expected]


@pytest.mark.parametrize(
    ("tool", "given", "sentence"),
    [
        ("run", {}, "tool=run: is not known"),
        ("explain", {}, "plan: explain needs it"),
        ("predict", {"json": True}, "argument=json: predict has none of this name"),
        ("predict", {"tp": {"a": 1}}, "must be text, a number, true or a list of these"),
    ],
)
def test_calls_that_cannot_be_made_are_refused(tool, given, sentence):
    with pytest.raises(InputError, match=sentence):
        command_line(tool, given)


def test_a_missing_package_is_named(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    code, out, err = call("mcp")
    assert (code, out) == (2, "")
    assert "install perfmodel[mcp]" in err
