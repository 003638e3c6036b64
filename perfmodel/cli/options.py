"""The flags of the verbs that predict, once for all of them (DESIGN.md section 7), and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.foundation import memory_room
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.resources import check_can_be_written

Model = Annotated[str, typer.Option("--model", metavar="NAME|PATH", help="A model's name (`perfmodel models`) or a config.json.")]
Chip = Annotated[
    str,
    typer.Option("--chip", metavar="NAME|PATH", help="In place of --cluster: a chip (`perfmodel chips`) with its usual node and links."),
]
PerNode = Annotated[str, typer.Option("--per-node", metavar="N", help="With --chip: chips of a node.")]
ScaleUp = Annotated[
    str, typer.Option("--scale-up", metavar="RATE", help="With --chip: what a chip sends inside a node, one direction, such as 450GB/s.")
]
ScaleOut = Annotated[
    str, typer.Option("--scale-out", metavar="RATE", help="With --chip: what a chip sends between nodes, one direction, such as 400Gbit/s.")
]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="fp32, bf16-mixed, fp16-mixed or bf16.")]
Optimizer = Annotated[str, typer.Option("--optimizer", metavar="NAME", help="sgd, momentum, adam or adamw.")]

# Those of which several give one table, one line for each combination: `--seq-len 4k,8k`, or the flag again.
Models = Annotated[
    list[str], typer.Option("--model", metavar="NAME|PATH", help="A model's name (`perfmodel models`) or a config.json. [*]")
]
Clusters = Annotated[list[str], typer.Option("--cluster", metavar="NAME|PATH", help="A cluster's name (`perfmodel clusters`) or file. [*]")]
ChipCounts = Annotated[list[str], typer.Option("--chips", "--gpus", metavar="N", help="Chips to use. [*]")]
Nodes = Annotated[list[str], typer.Option("--nodes", metavar="N", help="In place of --chips: nodes of the cluster. [*]")]
GlobalBatches = Annotated[
    list[str], typer.Option("--global-batch", "--gbs", metavar="N", help="Sequences in a step, on all chips together. [*]")
]
BatchTokens = Annotated[
    list[str], typer.Option("--batch-tokens", metavar="N", help="In place of --global-batch: tokens in a step, such as 4M (4194304). [*]")
]
SeqLens = Annotated[list[str], typer.Option("--seq-len", "--seq", metavar="N", help="Tokens in a sequence, such as 8k (8192). [*]")]
Precisions = Annotated[
    list[str], typer.Option("--precision", metavar="NAME", help="fp32, bf16-mixed, fp16-mixed or bf16; bf16-mixed if left out. [*]")
]
Optimizers = Annotated[list[str], typer.Option("--optimizer", metavar="NAME", help="sgd, momentum, adam or adamw; adamw if left out. [*]")]
Profiles = Annotated[
    list[str],
    typer.Option(
        "--profile",
        metavar="NAME|PATH",
        help="The framework that is assumed (`perfmodel profiles`); by the chip's maker if left out: megatron on NVIDIA's. [*]",
    ),
]

Dp = Annotated[
    int | None,
    typer.Option("--dp", metavar="N", help="The whole data-parallel degree: dp-shard under ZeRO 1 to 3, else dp-replicate."),
]
Fsdp = Annotated[int | None, typer.Option("--fsdp", metavar="N", help="--dp-shard N --zero 3.")]
Tp = Annotated[int | None, typer.Option("--tp", metavar="N", help="Tensor-parallel degree.")]
Pp = Annotated[int | None, typer.Option("--pp", metavar="N", help="Pipeline-parallel degree.")]
Cp = Annotated[int | None, typer.Option("--cp", metavar="N", help="Context-parallel degree.")]
DpReplicate = Annotated[int | None, typer.Option("--dp-replicate", metavar="N", help="Data-parallel replicas.")]
DpShard = Annotated[int | None, typer.Option("--dp-shard", metavar="N", help="Data-parallel ranks that shard (FSDP; see --zero).")]
Zero = Annotated[int | None, typer.Option("--zero", metavar="0-3", help="ZeRO stage; 3 is FSDP.")]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", "--mbs", metavar="N", help="Sequences of a rank in one pass.")]
VirtualStages = Annotated[int | None, typer.Option("--virtual-stages", metavar="N", help="Model chunks of a pipeline rank (interleaved).")]
Schedule = Annotated[str | None, typer.Option("--schedule", metavar="NAME", help="gpipe, 1f1b or interleaved.")]
Recompute = Annotated[str | None, typer.Option("--recompute", metavar="NAME", help="none, selective or full.")]
SequenceParallel = Annotated[
    bool | None, typer.Option("--sequence-parallel/--no-sequence-parallel", help="Shard the residual stream over tp.", show_default=False)
]
Rules = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="NAME|FILE",
        help="How operators are cut by the axes (docs/rules.md); megatron, or megatron-sp with tp, if left out.",
    ),
]
SearchedRules = Annotated[
    list[str],
    typer.Option(
        "--rules",
        metavar="NAME|FILE",
        help="Rule sets to try (docs/rules.md), several again and again; megatron and megatron-sp if left out.",
    ),
]
Attention = Annotated[str | None, typer.Option("--attention", metavar="NAME", help="flash or unfused; the profile's if left out.")]
Order = Annotated[
    str | None, typer.Option("--order", metavar="AXES", help="Axes on the network, innermost first: tp-cp-dp_shard-dp_replicate-pp.")
]

Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|PATH",
        help="The framework that is assumed (`perfmodel profiles`); by the chip's maker if left out: megatron on NVIDIA's.",
    ),
]
PlanProfile = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME|PATH", help="The framework that is assumed (`perfmodel profiles`); the plan's own if left out."
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="NAME|PATH",
        help="A calibration, spec-sheet for none, prior for its maker's other chips; the best known if left out.",
    ),
]
DEFAULT_HEADROOM = f"{memory_room.DEFAULT_HEADROOM:.0%}"
MemoryHeadroom = Annotated[
    str,
    typer.Option("--memory-headroom", metavar="SHARE", help="Share of the usable memory that a plan that fits leaves free; 0: none."),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit", metavar="SECONDS", help="End after it with the best so far, and say so; else work decides and load changes nothing."
    ),
]
Tokens = Annotated[str, typer.Option("--tokens", metavar="COUNT", help="Tokens to train on, such as 15T: adds days and chip-hours.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, SI units.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw a figure (PNG, SVG or PDF).")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE.csv", help="Also write one line for each prediction; - for standard output alone.")
]
Save = Annotated[Path | None, typer.Option("--save", metavar="PLAN.yaml", help="Write the plan (of a search: the best) to a file.")]


def with_chip(clusters: list[str], chip: str, *, per_node: str, scale_up: str, scale_out: str) -> list[str]:
    """The clusters that were named and the one that --chip and its companions describe."""
    from perfmodel.hardware.chip_cluster import state_chip_cluster
    from perfmodel.hardware.reader import load_chip

    stated = {"per_node": per_node, "scale_up": scale_up, "scale_out": scale_out}
    given = {name: value for name, value in stated.items() if value}
    if not chip:
        for name in given:
            raise InputError(f"--{name.replace('_', '-')}: goes with --chip NAME, in place of --cluster; see `perfmodel chips`")
        return clusters
    load_chip(chip)  # the name of a cluster is none of a chip
    return [*clusters, state_chip_cluster(chip, **given).text]


def flag(field: str) -> str:
    """How the command line spells a field."""
    return "--" + field.replace("_", "-")


def parse_fraction(text: str, field: str) -> float:
    from perfmodel.foundation.values import share

    return share(text, field) if text else 0.0


def parse_tokens(text: str) -> float:
    from perfmodel.foundation.values import token_count

    return token_count(text) if text else 0.0


def only_one(values: list[str], field: str) -> str | None:
    """The value of a flag that takes several where there can be one only."""
    if len(values) > 1:
        raise InputError(f"{flag(field)}: is given {len(values)} times and can be one only; give one")
    return values[0] if values else None


def needed(*given: tuple[str, int | str | None, str]) -> None:
    """Flags that a verb cannot do without, their values and what each means: those that are missing are refused all at once."""
    absent = [f"{flag}: is missing; give {meaning}" for flag, value, meaning in given if not value and value != 0]
    if absent:
        raise InputError("; ".join(absent))


def check_csv(path: Path | None, *, json: bool) -> None:
    if path is None:
        return
    if str(path) == "-":
        if json:
            raise InputError("--csv -: both it and --json want standard output; name a file for one of them")
        return
    if path.suffix.lower() != ".csv":
        raise bad_field("csv", path, "must end in .csv, or be -", "write --csv table.csv")
    check_can_be_written(path, "csv")


def check_figure(path: Path | None) -> None:
    """Refuse a figure that could not be written before the work is done."""
    if path is not None and path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise bad_field("plot", path, "must end in .png, .svg or .pdf", "write --plot plan.png")
    if path is not None:
        check_can_be_written(path, "plot")


def check_plan_path(path: Path | None) -> None:
    if path is not None and path.suffix.lower() not in (".yaml", ".yml"):
        raise bad_field("save", path, "must end in .yaml", "write --save plan.yaml")
    if path is not None:
        check_can_be_written(path, "save")


def write_csv(text: str, path: Path) -> None:
    """To the file at once and whole, or to standard output."""
    if str(path) == "-":
        print(text, end="")
        return
    from perfmodel.foundation.resources import write_atomically

    write_atomically(path, text)
