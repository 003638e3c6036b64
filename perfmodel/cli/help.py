"""Help texts: the overview, grouped commands, and grouped options of a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

#: Heading -> commands under it, in the order of `perfmodel --help`.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "Training": ("predict", "search", "advise", "explain", "compare", "limits", "trace", "report", "export", "web"),
    "Serving": ("serve",),
    "What if": ("explore", "sweep", "chip"),
    "Run and measure": ("demo", "calibrate", "run", "audit", "fit", "validate"),
    "Networks and modules": ("shard", "import", "networks"),
    "Reference data": ("models", "chips", "clusters", "profiles", "engines", "calibrations", "assumptions", "schema", "doctor", "mcp"),
}

#: Commands in the overview, in order.
FIRST = ("search", "predict", "explain", "limits", "serve")

#: Heading -> options under it. "Plan" has the options of `Knobs` and serving plans that are in no other group.
_OPTIONS: Mapping[str, str] = {
    "Job": "model global_batch batch_tokens seq_len precision optimizer train routing capacity_factor tokens network batch size inputs",
    "Load": "input_len output_len concurrency rate prefix_hit draft_tokens acceptance draft_model seed simulated",
    "Limits": "ttft tpot latency limit_headroom price",
    "Cluster": "cluster chip per_node scale_up scale_out chips nodes calibration memory_headroom risk device",
    "Framework": "profile settings cp_form offload gradient_compression engine quantization kv_precision any_framework only_runnable",
    "Plan": "dp fsdp tp pp cp dp_replicate dp_shard ep etp dispatcher zero micro_batch virtual_stages schedule recompute "
    "recompute_modules sequence_parallel rules order attention attention_dp dcp pcp replicas workers max_batch max_tokens",
    "Search": "search objective top ties allow p99 disaggregated time_limit stages microbatches cost max_tp max_pp max_cp "
    "max_dp_replicate max_dp_shard max_ep max_etp max_zero max_micro_batch max_virtual_stages",
    "Exploration": "vary points shares sensitivity start to_precision metric",
    "Trace": "measured named ranks detail",
    "Output": "interval operators verbose wide json format csv plot save out to launcher plots sources template figure help",
    "Server": "port no_browser",
}
_HEADING = {name: heading for heading, names in _OPTIONS.items() for name in names.split()}
_OTHER = "Options"


def overview(commands: Iterable[tuple[str, str]]) -> str:
    """Return the output of `perfmodel` without a command. commands: summary and example of the most common ones"""
    lines = ["perfmodel predicts step time and memory of training and serving large models.", ""]
    for summary, example in commands:
        lines += [summary, *(f"  {line}" for line in shell_lines(f"perfmodel {example}", width=78)), ""]
    lines += ["`perfmodel --help` lists all commands, `perfmodel COMMAND --help` its options."]
    return "\n".join(lines)


def shell_lines(command: str, *, width: int) -> list[str]:
    """Return a shell command as lines to copy, broken before options with a backslash."""
    import re

    lines: list[str] = []
    for part in re.split(r" (?=--?[a-zA-Z])", command):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def with_groups(command: Any) -> Any:
    """Return the command, with its options under headings in its help."""
    command.format_options = lambda context, formatter: _write_sections(formatter, option_groups(command, context))
    return command


def with_command_groups(group: Any) -> Any:
    """Return the command group, with its commands under headings in its help."""
    group.format_commands = partial(_write_commands, group)
    return group


def option_groups(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return heading -> (names, help) of each option of a command, in the order of its help."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            rows.setdefault("Arguments" if is_argument else _HEADING.get(parameter.name, _OTHER), []).append(record)
    return {heading: rows[heading] for heading in ("Arguments", *_OPTIONS, _OTHER) if heading in rows}


def _write_commands(group: Any, context: Any, formatter: Any) -> None:
    summaries = {name: group.get_command(context, name).get_short_help_str(formatter.width) for name in group.list_commands(context)}
    grouped = {heading: [(name, summaries.pop(name)) for name in names] for heading, names in COMMANDS.items()}
    _write_sections(formatter, grouped | ({_OTHER: list(summaries.items())} if summaries else {}))


def _write_sections(formatter: Any, sections: Mapping[str, Iterable[tuple[str, str]]]) -> None:
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl(list(rows))
