"""`perfmodel shard | networks`: the best sharding of every operator of any network."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.errors import InputError, bad_field, whole_number
from perfmodel.foundation.plain import picked
from perfmodel.foundation.values import optional_share, read_integer
from perfmodel.foundation.words import Words, given_words, word, words_of
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Command, Document, Facts, Text
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.planner.per_operator.pipeline import PipelineSearch
    from perfmodel.verbs.networks import ShardResult

OWN, PASE = "own", "pase"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWords:
    """Options of a network: sizes of a built-in network, or inputs of a user module."""

    batch: int | None = word("Samples of a step; the network's default if left out", kind=int)
    size: Sequence[str] | None = word(
        "A size of a built-in network", several_help="A size of a built-in network: layers=2; may be given several times.",
        metavar="NAME=N[,N...]", several=True,
    )  # fmt: skip
    inputs: Sequence[str] | None = word(
        "An argument of forward", several_help="An argument of forward of an imported module: x=float32[8,3,224,224].",
        metavar="NAME=TYPE[SIZES]", several=True,
    )  # fmt: skip


@command(
    asked=Words(
        Request, only="cluster chips precision optimizer profile settings calibration memory_headroom",
        helps={"precision": "fp32, bf16-mixed, fp16-mixed or bf16; by the chip if left out."}, defaults={"optimizer": "adamw"},
    ),
    chip=options.ChipWords,
    built=Words(NetworkWords, several=True),
    knobs=Words(Knobs, only="zero"),
    files=Words(options.Files, only="save"),
    output=options.PLAIN_OUTPUT,
    after={"precision": "knobs", "optimizer": "precision", "profile": "optimizer", "settings": "profile", "calibration": "settings"},
)  # fmt: skip
def shard(
    network: Annotated[str, argument("NETWORK", "A name (`perfmodel networks`), or module:factory of any torch module with --inputs.")],
    *,
    asked: Request,
    chip: options.ChipWords,
    built: NetworkWords,
    cost: Annotated[str, option("NAME", "own: this tool's model; pase: the paper's, in FLOP.")] = OWN,
    stages: Annotated[str, option("N[,N...]|auto", "Pipeline stages to try around the search; none if left out.")] = "",
    microbatches: Annotated[str, option("N[,N...]", "Microbatches of a step.")] = "",
    knobs: Knobs,
    time_limit: options.TimeLimit = None,
    files: options.Files,
    output: Output,
) -> None:
    """Search the best sharding of every operator of a network, with a proof of optimality, within the chip's memory.

    Networks are built in, or any torch.nn.Module. A dim cut "b 4x8" is cut 4 ways across nodes and 8 ways within one.
    """
    files.check(output)
    batch = None if built.batch is None else words_of(NetworkWords)["batch"].value(built.batch, "batch")
    save = files.save
    if cost not in (OWN, PASE):
        raise bad_field("cost", cost, "is not known", f"use {OWN} or {PASE}")
    sizes = parse_sizes(built.size or ())
    if cost == PASE:
        others = {"stages": stages, "microbatches": microbatches, "zero": knobs.zero, "save": save}
        _by_pase_cost(network, built, asked.chips, others, output)
        return
    clusters = options.with_chip([asked.cluster] if asked.cluster else [], chip)
    if len(clusters) > 1:
        raise InputError("--chip: stands in place of --cluster; give one of the two")
    cluster = clusters[0] if clusters else ""
    may_have_chips = bool(cluster)  # localhost and cluster files include a chip count
    options.require(
        ("--cluster", cluster, "a name from `perfmodel clusters` or the path of a cluster file, or --chip with a chip"),
        ("--chips", may_have_chips or asked.chips, "how many chips the job runs on, for example 64"),
    )
    given: dict[str, Any] = given_words(asked) | {"cluster": cluster, "sizes": sizes, "zero": knobs.zero, "time_limit": time_limit}
    given["memory_headroom"] = optional_share(asked.memory_headroom, "memory_headroom")
    if stages:
        _with_pipeline(network, batch, stages, microbatches, given, files=files, output=output)
        return
    from perfmodel.verbs.networks import shard_network

    counts = _counts(microbatches, "microbatches") or [1]
    if len(counts) > 1:
        raise bad_field("microbatches", microbatches, "several are tried with a pipeline only", "give one, or --stages")
    if batch is not None and batch % counts[0]:
        raise bad_field("microbatches", counts[0], f"must divide the batch of {batch}", "use a divisor")
    with Progress("shard") as progress:
        result = shard_network(
            network,
            inputs=list(built.inputs or ()),
            batch=(batch or 0) // counts[0],
            microbatches=counts[0],
            progress=progress.step,
            **given,
        )
    files.save_plan(result.best.plan)
    code = f" --network {shlex.quote(network)}" if ":" in network else ""
    saved: list[Block] = (
        [Text(f"plan: {save}; run it here with:", apart=True), Command(f"perfmodel run {save}{code}")] if save is not None else []
    )
    show(Document(content=lambda: _as_object(result), blocks=lambda: chain(_blocks(result, cluster), saved)), output)


_FLAGS = {"true": True, "false": False}


def parse_sizes(given: Sequence[str]) -> dict[str, int | tuple[int, ...]]:
    """Return the parsed sizes, such as `layers=2`, `filters=4,8,8`, `fused_attention=false`."""
    sizes: dict[str, int | tuple[int, ...]] = {}
    for item in given:
        name, _, value = item.partition("=")
        if name and value in _FLAGS:
            sizes[name] = _FLAGS[value]
            continue
        numbers = tuple(number for number in map(whole_number, value.split(",")) if number is not None)
        if not name or len(numbers) != len(value.split(",")):
            raise bad_field("size", item, "must be a name and whole numbers, or true or false", "write --size layers=2")
        sizes[name] = numbers[0] if len(numbers) == 1 else numbers
    return sizes


def _counts(text: str, name: str) -> list[int]:
    counts = []
    for item in text.split(",") if text else []:
        count = whole_number(item)
        if not count:
            raise bad_field(name, text, "must be whole numbers of at least 1, separated by commas", "write 4 or 4,8")
        counts.append(count)
    return counts


def _as_object(result: ShardResult) -> dict[str, Any]:
    from perfmodel.report.predictions import prediction_object

    search = result.search
    return {
        "network": result.network.name,
        "num_operators": len(result.network.operators),
        **picked(result.network, "num_parameters flops"),
        "zero": result.zero,
        "best": prediction_object(result.best),
        "zero_searched": list(result.searches),
        **picked(result, "lower_bound is_proved gap cut_off"),
        **picked(search, "price has_equal_layers most_dims num_configurations table_time search_time"),
        "strategies": {name: prediction_object(prediction) for name, prediction in result.strategies.items()},
        "treatments": result.treatments,
    }


def _blocks(result: ShardResult, cluster: str) -> Iterator[Block]:
    from perfmodel.foundation.units import format_count, format_time
    from perfmodel.report.networks import memory_line, operators_table, parts_table, price_line, strategies_table
    from perfmodel.report.predictions import basis_lines, short_verdict

    network, search, best = result.network, result.search, result.best
    counts = search.num_configurations
    proof = "each search proved" if result.is_proved else f"each search within {result.gap:.2%} of its best"
    proof += f", cut off by the {result.cut_off}" if result.cut_off else ""
    tables = sum(one_search.table_time for one_search in result.searches.values())
    spent = sum(one_search.search_time for one_search in result.searches.values())
    alike = "; equal layers choose alike" if search.has_equal_layers else ""
    claim = "no plan with equal layers alike" if alike else "no plan"
    others = f", best of {', '.join(map(str, result.searches))}" if len(result.searches) > 1 else ""
    batch = network.batch * best.plan.num_microbatches
    if search.most_dims:
        alike += f"; within a node an operator cuts at most {search.most_dims} dims"
    facts = [
        (
            "network",
            f"{network.name}, batch {batch}: {len(network.operators):,} operators, {network.num_parameters:,} parameters, "
            f"{format_count(network.flops)} FLOP forward",
        ),
        ("cluster", f"{cluster}, {best.plan.cuts.described()}"),
        (
            "searched",
            f"up to {max(counts):,} configurations an operator ({sum(counts) / len(counts):,.0f} on average); "
            f"tables {format_time(tables)}, search {format_time(spent)}; {proof}{alike}",
        ),
        ("step time", f"{format_time(best.step_time)} for a batch of {batch:,}; {claim} can take less than "
                      f"{format_time(result.lower_bound)}"),
        ("ZeRO", f"{result.zero}{others}; " + price_line(search.price)),
        ("memory", memory_line(best.memory, best.memory_usable, best.verdict)),
        ("based on", "; ".join(basis_lines(best))),
    ]  # fmt: skip
    yield Facts(short_verdict(best), facts)
    yield strategies_table(best, result.strategies)
    yield parts_table(best.parts, best.step_time)
    yield operators_table(network, best.plan)
    if result.treatments:
        yield Text("Not sharded:", apart=True)
        yield from (Text(f"  {sentence}") for sentence in result.treatments[:12])
        if len(result.treatments) > 12:
            yield Text(f"  and {len(result.treatments) - 12} more")


def _with_pipeline(
    network: str, batch: int | None, stages: str, microbatches: str, given: dict[str, Any], *, files: options.Files, output: Output
) -> None:
    from perfmodel.report.networks import pipeline_object
    from perfmodel.verbs.networks import shard_pipeline

    options.require(("--batch", batch, "the samples of a step"))
    with Progress("shard") as progress:
        best = shard_pipeline(
            network,
            global_batch=batch or 0,
            stages=[] if stages == "auto" else _counts(stages, "stages"),
            microbatches=_counts(microbatches, "microbatches"),
            progress=progress.step,
            **given,
        )
    files.save_plan(best.best.plan)
    document = Document(
        content=lambda: {"network": network, "zero": int(best.best.plan.zero), **pipeline_object(best)},
        blocks=lambda: _pipeline_blocks(network, batch or 0, best, given),
    )
    files.finish(document, output)


def _pipeline_blocks(network: str, batch: int, search: PipelineSearch, given: dict[str, Any]) -> Iterator[Block]:
    from perfmodel.foundation.units import format_time
    from perfmodel.report.networks import memory_line, operators_table, parts_table, price_line, stages_table
    from perfmodel.report.predictions import short_verdict
    from perfmodel.verbs.networks import network_of_plan

    best, plan = search.best, search.best.plan
    cut_off = f"; cut off by the {search.cut_off}" if search.cut_off else ""
    facts = [
        ("network", f"{network}, batch {batch}, on {plan.num_chips} chip{'s' * (plan.num_chips > 1)} of {given['cluster']}"),
        ("plan", f"{plan.cuts.described()}, {plan.num_microbatches} microbatches of {plan.micro_batch}; ZeRO {int(plan.zero)}"),
        ("searched", f"{search.num_candidates} pairs of stages and microbatches in {format_time(search.search_time)}{cut_off}"),
        (
            "step time",
            f"{format_time(best.step_time)}; no plan with these stages, microbatches and ZeRO {int(plan.zero)} can take less than "
            f"{format_time(search.lower_bound)} "
            f"(gap {search.gap:.1%})",
        ),
        (
            "memory",
            f"fullest chip {memory_line(best.memory, best.memory_usable, best.verdict)}; "
            f"{price_line(search.price * plan.num_microbatches)}",
        ),
    ]
    yield Facts(short_verdict(best), facts)
    yield from (stages_table(search.stages), parts_table(best.parts, best.step_time), operators_table(network_of_plan(plan), plan))


def _by_pase_cost(network: str, built: NetworkWords, chips: Any, others: Mapping[str, Any], output: Output) -> None:
    """Search the paper's space by the paper's cost, for one of its layer graphs or an imported module.

    built, others   flags, some without meaning for the paper's graphs and cost
    """
    for name in ("size", "batch", *(() if ":" in network else ("inputs",))):
        if value := getattr(built, name):
            text = ",".join(value) if isinstance(value, list) else value
            raise bad_field(name, text, "the paper's graphs have the paper's sizes", "leave it out, or use --cost own")
    for name, value in others.items():
        if value:
            raise bad_field(name, value, "the paper's cost knows no pipelines and no memory, its plans no place", "use --cost own")
    num_devices = 2 if chips is None else read_integer(chips, "chips")
    if ":" in network:
        from perfmodel.cli.import_ import strategy_blocks, strategy_object
        from perfmodel.planner.pase.imported import search_imported
        from perfmodel.verbs.importing import import_graph

        graph = import_graph(network, list(built.inputs or ()))
        searched = search_imported(graph, num_devices)
        content = {"network": graph.name, **strategy_object(graph, searched)}
        show(Document(content=lambda: content, blocks=lambda: strategy_blocks(graph, searched)), output)
        return
    from perfmodel.planner.pase.graph import load_pase_graph
    from perfmodel.planner.pase.search import run_pase
    from perfmodel.report.pase import run_object, search_times_table, strategies_table

    run = run_pase(load_pase_graph(network), num_devices)
    show(Document(content=lambda: run_object(run), blocks=lambda: [search_times_table([run]), strategies_table([run])]), output)


@command(output=options.PLAIN_OUTPUT)
def networks(*, output: Output) -> None:
    """List the built-in networks: operators, parameters, and the sizes that `--size` sets."""
    from perfmodel.foundation.units import format_count
    from perfmodel.workload.models import list_models
    from perfmodel.workload.networks import list_networks, load_network, network_sizes

    models = set(list_models())
    rows, objects = [], []
    for name in list_networks():
        sizes = network_sizes(name)
        if name in models:
            continue
        built = load_network(name)
        objects.append(
            {
                "name": name,
                "batch": built.batch,
                "num_operators": len(built.operators),
                **picked(built, "num_parameters flops"),
                "sizes": sizes,
                "source": built.source,
            }
        )
        shown = " ".join(key for key in sizes if key != "batch")
        rows.append((name, str(built.batch), f"{len(built.operators):,}", f"{built.num_parameters:,}", format_count(built.flops), shown))
    headers = ("network", "batch", "operators", "parameters", "FLOP forward", "sizes")
    blocks: list[Block] = [
        Table(title="Built-in networks", headers=headers, rows=tuple(rows), right=headers[1:5], fold=("sizes",)),
        Text(f"and every model of `perfmodel models` ({len(models)}), with sizes {' '.join(network_sizes('gpt2'))}", apart=True),
    ]
    show(Document(content=lambda: {"networks": objects, "models": sorted(models)}, blocks=lambda: blocks), output)
