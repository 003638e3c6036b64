"""Words are written once: a field of a record is an argument, an option, a key and a name, and no signature repeats long lists."""

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import perfmodel
from perfmodel.cli.words import command, largest_of
from perfmodel.foundation.words import takes, word, words_of
from perfmodel.parallel.knobs import Knobs, bounded_knobs, plan_keys, searched_knobs
from perfmodel.parallel.request import Request
from tests.contracts.sources import PACKAGE, modules, nodes_of, tree_of

MOST = 12


@dataclass(frozen=True, kw_only=True)
class Toy(Knobs):
    """The record with one line more."""

    toys: int | None = word("Toys of a rank", kind=int, aliases=("--ts",), is_searched=True, in_files=1)


def test_a_new_field_is_an_argument():
    @takes(knobs=Toy)
    def verb(*, knobs):
        return knobs

    assert "toys" in inspect.signature(verb).parameters
    assert (verb(toys=3, tp=2).toys, verb(toys=3, tp=2).tp) == (3, 2)
    with pytest.raises(TypeError, match="did you mean 'toys'"):
        verb(toy=3)


def test_a_new_field_is_an_option_and_bounded():
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @command(knobs=Toy, maximum=largest_of(bounded_knobs(Toy)))
    def verb(*, knobs: Toy, maximum: dict) -> None:
        print(knobs.toys, knobs.tp, maximum)

    assert "--toys, --ts N" in CliRunner().invoke(app, ["--help"]).output
    assert "Toys of a rank." in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["--ts", "3", "--tp", "2", "--max-toys", "4"]).output == "3 2 {'toys': 4}\n"


def test_a_new_field_is_a_key_of_plan_files_and_a_knob_of_the_space():
    assert set(plan_keys(Toy)) - set(plan_keys()) == {"toys"}
    assert set(searched_knobs(Toy)) - set(searched_knobs()) == {"toys"}


def parameters(function):
    every = function.args
    return [*every.posonlyargs, *every.args, *every.kwonlyargs, *filter(None, (every.vararg, every.kwarg))]


def test_no_public_function_or_command_spells_more_than_twelve_parameters():
    names = {name for name in perfmodel.__all__ if inspect.isfunction(getattr(perfmodel, name))}
    homes = {Path(inspect.getsourcefile(inspect.unwrap(getattr(perfmodel, name)))) for name in names} | {*(PACKAGE / "cli").glob("*.py")}
    too_long, seen = {}, set()
    for home in homes:
        for node in tree_of(home).body:
            if isinstance(node, ast.FunctionDef):
                seen.add(node.name)
                if len(parameters(node)) > MOST:
                    too_long[node.name] = len(parameters(node))
    assert too_long == {}
    assert {"predict", "find_plans", "search", "limits", "shard_network"} <= seen


def test_no_function_inside_takes_more_than_twelve_parameters():
    too_long = {
        f"{path.relative_to(PACKAGE)}: {node.name}": len(parameters(node))
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(parameters(node)) > MOST
    }
    assert too_long == {}


@pytest.mark.parametrize("name", ["predict", "find_plans", "find_limits"])
def test_a_signature_lists_every_knob(name):
    listed = set(inspect.signature(getattr(perfmodel, name)).parameters)
    left_out = {"find_limits": {"nodes", "batch_tokens"}}.get(name, set())
    assert {*words_of(Knobs), *words_of(Request)} - listed == left_out
