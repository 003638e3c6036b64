"""The `perfmodel` command: dispatch to a verb, error messages and exit codes.

Only the module of the given verb is imported, and each verb imports its dependencies when it is called. `perfmodel --help` and
`perfmodel predict` therefore start quickly. This module imports almost nothing, so that Ctrl-C is caught from the start.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from importlib import import_module
from itertools import pairwise
from keyword import iskeyword
from os import environ
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from perfmodel.cli.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SIGNAL, EXIT_UNREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import typer

_COMPLETION = "_PERFMODEL_COMPLETE"  # set by the script that `perfmodel --install-completion` writes

#: verb -> (module of perfmodel.cli, what it does)
VERBS = {
    "predict": ("predict", "Predict step time, memory and utilization of a plan."),
    "search": ("search", "Search the fastest parallel plans of a training job."),
    "serve": ("serve", "Predict latency and throughput of a service, or search its best plan."),
    "limits": ("limits", "Find the largest batch, the longest sequence and the fewest chips."),
    "explore": ("explore", "Vary hardware, technology, model, job or plan; rank what matters."),
    "sweep": ("sweep", "Compute a study: a verb over combinations of values; resumable, parallel."),
    "explain": ("explain", "Explain where a plan's time goes, and why not another plan."),
    "advise": ("configs", "Advise what to change in a framework's configuration or a plan."),
    "compare": ("explain", "Compare plans side by side."),
    "export": ("configs", "Write a plan as a framework's configuration and launch script."),
    "trace": ("configs", "Write the predicted step of a plan as a trace, for Perfetto."),
    "report": ("configs", "Write a prediction as one HTML page."),
    "web": ("web", "Open a local page: predict, search and compare in the browser."),
    "run": ("run", "Run a plan with torch and compare it with its prediction."),
    "audit": ("audit", "Count a plan's FLOPs, traffic and bytes with torch, without a GPU."),
    "calibrate": ("run", "Measure this machine, for predictions of localhost."),
    "validate": ("validate", "Predict published runs and show the errors."),
    "fit": ("fit", "Fit an execution profile to your own measured runs."),
    "demo": ("run", "Calibrate, search, run and compare on this machine, in five minutes."),
    "shard": ("shard", "Search the best sharding of every operator of a network."),
    "import": ("import_", "Read any torch module as a graph of operators."),
    "chips": ("known", "List chips: FLOP rates and memory, with sources."),
    "chip": ("known", "Make a chip from technology and budgets."),
    "clusters": ("known", "List clusters: chip, node and network."),
    "models": ("known", "List models: shape and number of parameters."),
    "networks": ("shard", "List the built-in networks of `shard`."),
    "profiles": ("known", "List execution profiles: what each framework does with a plan."),
    "engines": ("engines", "List serving engines and what each release runs."),
    "assumptions": ("assumptions", "List constants of a whole training run, with sources."),
    "schema": ("schema", "Print the fields of a kind of input file or a command, or their JSON Schema."),
    "mcp": ("schema", "Answer the tool calls of an agent (Model Context Protocol)."),
    "doctor": ("doctor", "Show the installation, this machine, and what would improve predictions."),
    "calibrations": ("known", "List calibrations: what was measured and how well it fits."),
}

_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Terminated(BaseException):
    """Termination of the process by SIGTERM, or by SIGHUP after its terminal was closed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def make_app(*, with_options: bool = False) -> typer.Typer:
    """Return the command line with all verbs and their summaries.

    with_options   load the options of the verbs, for shell completion
    """
    import typer

    app = _empty_app(add_completion=True)

    def print_version(wanted: bool) -> None:
        if wanted:
            from perfmodel import __version__

            typer.echo(f"perfmodel {__version__}")
            raise typer.Exit

    def root(version: bool = typer.Option(False, "--version", callback=print_version, is_eager=True, help="Print the version.")) -> None:
        """Options before the verb."""

    app.callback()(root)
    for name, (module, summary) in VERBS.items():
        function = _function(module, name) if with_options else _placeholder(name)
        app.command(name, short_help=summary)(function)
    return app


def _function(module: str, verb: str) -> Any:
    name = verb.replace("-", "_")
    return getattr(import_module(f"perfmodel.cli.{module}"), f"{name}_" if iskeyword(name) else name)


def command_of(verb: str) -> Any:
    """Return the command of one verb, as `perfmodel VERB` calls it. Other verbs are neither loaded nor parsed."""
    import typer

    from perfmodel.cli.examples import epilog
    from perfmodel.cli.help import with_groups

    module, summary = VERBS[verb]
    function = _function(module, verb)
    app = _empty_app()
    app.command(verb, short_help=summary, epilog=epilog(verb), context_settings=_SETTINGS)(function)
    command = typer.main.get_command(app)
    for parameter in command.get_params(command.context_class(command, **_SETTINGS)):
        parameter.process_value = _fast_converter(parameter)  # type: ignore[method-assign, assignment]
    return with_groups(command)


def _fast_converter(parameter: Any) -> Callable[[Any, Any], Any]:
    """Return a fast conversion of an option's value: text stays text, digits become a number, a missing value is not checked.

    typer checks all other values, including invalid ones. It needs pydantic, whose import takes as long as a prediction.
    """
    checked, annotation = parameter.process_value, parameter.type_descriptor.annotation
    takes_many = parameter.multiple or parameter.nargs == -1

    def process_value(context: Any, value: Any) -> Any:
        if parameter.required and not value:
            return checked(context, value)
        if value is None:
            value = () if takes_many else None
        elif takes_many and annotation == list[str] and all(type(item) is str for item in value):
            value = list(value)
        elif annotation in _NUMBERS and type(value) is str:
            value = _number(value, parameter.opts[0], annotation)
        elif takes_many or annotation is not str or type(value) is not str:
            return checked(context, value)
        return value if parameter.callback is None else parameter.callback(context, parameter, value)

    return process_value


_NUMBERS: dict[Any, tuple[str, str]] = {int: (r"-?[0-9]{1,18}", "a whole number"), float: (r"-?[0-9.]+([eE]-?[0-9]{1,3})?", "a number")}


def _number(text: str, name: str, kind: Any) -> Any:
    """Return the number in a text. Raise InputError with our own message, not that of pydantic, if it is not a number."""
    import re

    from perfmodel.foundation.errors import bad_field

    pattern, rule = _NUMBERS[kind]
    if re.fullmatch(pattern, text.strip()):
        try:
            return kind(text)
        except ValueError:
            pass
    raise bad_field(name, text, f"must be {rule}", f"write {name} 8")


def _empty_app(*, add_completion: bool = False) -> typer.Typer:
    import typer

    return typer.Typer(
        name="perfmodel",
        help="Predict step time and memory of training and serving large models.",
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )


def _placeholder(name: str) -> Callable[[], Any]:
    def stand_in() -> None:
        from perfmodel.foundation.errors import PerfModelError

        raise PerfModelError(f"{name}: was not loaded; give the verb first, as in perfmodel {name} --help")

    return stand_in


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether errors are printed as JSON objects."""
    return "--json" in arguments or "--format=json" in arguments or ("--format", "json") in pairwise(arguments)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    verb = arguments[0] if arguments and arguments[0] in VERBS else ""
    as_json = wants_json(arguments)
    parameters: Sequence[Any] = ()
    try:
        import typer
        from typer.exceptions import TyperException

        from perfmodel.cli.output import print_error
        from perfmodel.cli.streams import OutputError, abandon_output
        from perfmodel.foundation.error_objects import ErrorCode
        from perfmodel.foundation.errors import InputError, PerfModelError, presentable, shortened
    except KeyboardInterrupt:
        return _interrupted()
    print_error = partial(print_error, as_json=as_json)
    try:
        if _COMPLETION in environ:  # request of shell completion
            return int(typer.main.get_command(make_app(with_options=True))(arguments, prog_name="perfmodel", standalone_mode=False) or 0)
        if verb:
            command = command_of(verb)
            parameters = command.params
            _refuse_repeats(arguments, parameters)
            code = command(arguments[1:], prog_name=f"perfmodel {verb}", standalone_mode=False)
        else:
            from perfmodel.cli.help import FIRST, overview, with_command_groups

            if not arguments:
                from perfmodel.cli.examples import EXAMPLES

                print(overview([(VERBS[name][1], EXAMPLES[name][0]) for name in FIRST]))
                return 0
            command = with_command_groups(typer.main.get_command(make_app()))
            code = command(arguments, prog_name="perfmodel", standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            print_error("interrupted", code=ErrorCode.INTERRUPTED)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except OutputError as error:
        abandon_output()
        if error.is_unread:
            return EXIT_UNREAD
        print_error(str(error), code=ErrorCode.FAILED)
        return EXIT_FAILED
    except TyperException as error:
        sentence = _flag_remedy(error, verb, parameters) if verb else ""
        sentence = sentence or error.format_message().rstrip(".")
        sentence = shortened(presentable(sentence))
        print_error(f"{sentence}; see perfmodel{f' {verb}' if verb else ''} --help", code=ErrorCode.BAD_INPUT)
        return EXIT_BAD_INPUT
    except InputError as error:
        print_error(str(error), code=ErrorCode.BAD_INPUT, full=error.full)
        return EXIT_BAD_INPUT
    except PerfModelError as error:
        print_error(str(error), code=ErrorCode.FAILED)
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):  # typer converts Ctrl-C to an exit code only after the verb lookup
        return _interrupted()


def _refuse_repeats(arguments: list[str], parameters: Iterable[Any]) -> None:
    """Raise InputError for a repeated single-value flag; otherwise the last value would win silently."""
    from perfmodel.foundation.errors import InputError

    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    for parameter in parameters:
        names = [*parameter.opts, *parameter.secondary_opts]
        uses = [name for name in given if name in names]
        if len(uses) > 1 and not parameter.multiple and not (parameter.is_flag and len(set(uses)) == 1):
            raise InputError(f"{' and '.join(dict.fromkeys(uses))}: takes one value and is given {len(uses)} times; give it once")


#: Flag names of other tools whose nearest spelling in perfmodel has another meaning.
_OTHER_SPELLINGS = {
    "--batch": ("--global-batch", "--micro-batch", "--batch-tokens"),
    "--batch-size": ("--global-batch", "--micro-batch", "--batch-tokens", "--batch"),
    "--context-length": ("--seq-len",),
    "--sequence-length": ("--seq-len",),
    "--seq-length": ("--seq-len",),
    "--devices": ("--chips",),
    "--num-gpus": ("--chips",),
    "--world-size": ("--chips",),
    "--gpu": ("--gpus", "--chip"),
    "--ddp": ("--dp", "--dp-replicate"),
    "--lora": ("--train lora:RANK",),
    "--lora-rank": ("--train lora:RANK",),
    "--qlora": ("--train qlora:RANK",),
    "--load-in-4bit": ("--train qlora:RANK", "--quantization"),
    "--method": ("--train",),
    "--quantization": ("--train qlora:RANK",),
}


def _flag_remedy(error: Exception, verb: str, parameters: Sequence[Any]) -> str:
    """Return the remedy for an unknown flag: its name in perfmodel, or how to write a plan file with its value."""
    option = getattr(error, "option_name", "")
    known = {name for parameter in parameters for name in parameter.opts}
    spellings = [name for name in _OTHER_SPELLINGS.get(option, ()) if name.partition(" ")[0] in known]
    if spellings:
        return f"No such option: {option} (here it is {' or '.join(spellings)})"
    takes_plan = any(parameter.name in ("plan", "plans") and parameter.required for parameter in parameters)
    if not takes_plan:
        return ""
    from perfmodel.cli.options import ChipWords
    from perfmodel.foundation.words import words_of
    from perfmodel.parallel.knobs import Knobs
    from perfmodel.parallel.request import Request

    # contents of a plan file: job, cluster and knobs
    plan_words = {name for record in (ChipWords, Request, Knobs) for name in words_of(record)} - {"calibration", "memory_headroom"}
    if any(parameter.name in plan_words and option in parameter.opts for parameter in command_of("predict").params):
        written = f"perfmodel predict {option} ... --save plan.yaml"
        return f"No such option: {option} ({verb} reads it from a plan file; write one with `{written}` or `perfmodel search`)"
    return ""


def _interrupted() -> int:
    _report("interrupted", was_stopped=True)
    return EXIT_INTERRUPTED


def _report(sentence: str, *, was_stopped: bool = False) -> None:
    """Print an error raised outside a verb."""
    from perfmodel.cli.output import print_error
    from perfmodel.foundation.error_objects import ErrorCode

    print_error(sentence, code=ErrorCode.INTERRUPTED if was_stopped else ErrorCode.FAILED, as_json=wants_json(sys.argv))


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process without clean-up
    raise Terminated(number)


def main() -> NoReturn:
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # keep SIGHUP ignored under nohup
                signal.signal(number, _terminate)
        from perfmodel.cli.streams import OutputError, abandon_output, guard_streams

        code = 0
        try:
            guard_streams()
            code = run(sys.argv[1:])
            sys.stdout.flush()
        except OutputError as error:
            abandon_output()
            if not code:
                _report(str(error))
                code = EXIT_FAILED
    except KeyboardInterrupt:
        code = _interrupted()
    except Terminated as ended:
        _report(f"ended ({signal.Signals(ended.number).name})", was_stopped=True)
        code = EXIT_SIGNAL + ended.number
    sys.exit(code)
