"""The `perfmodel` command: registers the verbs, and turns what they raise into one sentence and an exit code.

Only typer is loaded here. Each verb imports what it needs when it is called, so that `perfmodel --help` stays instant.
"""

import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from perfmodel import __version__
from perfmodel.commands import known
from perfmodel.errors import InputError, PerfModelError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="perfmodel",
    help="Step time and memory of distributed training, for every parallel plan.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perfmodel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the verb."""


app.command("chips")(known.chips)
app.command("clusters")(known.clusters)
app.command("models")(known.models)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(arguments or ["--help"], prog_name="perfmodel", standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            _complain("interrupted")
        return code if isinstance(code, int) else 0
    except TyperException as error:
        _complain(f"{error.format_message().rstrip('.')}; see perfmodel --help")
        return EXIT_BAD_INPUT
    except InputError as error:
        _complain(str(error))
        return EXIT_BAD_INPUT
    except PerfModelError as error:
        _complain(str(error))
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):  # typer hands Ctrl-C on as its exit code, but not before the verb is looked up
        _complain("interrupted")
        return EXIT_INTERRUPTED


def _complain(sentence: str) -> None:
    print(f"perfmodel: {' '.join(sentence.split())}", file=sys.stderr)


def main() -> NoReturn:
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has gone. Close the pipe quietly, or the interpreter complains about it on its way out.
        sys.stderr.close()
    sys.exit(code)
