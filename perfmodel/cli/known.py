"""`perfmodel chips | clusters | models | profiles | calibrations`: reference data and its sources.

A name or a file as the argument prints all fields of one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command, option
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.plain import to_plain
from perfmodel.foundation.text import percent
from perfmodel.report.document import Block, Document, Facts, Text
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.workload.config import TransformerConfig

_TRAINING_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP32)

Sources = Annotated[bool, typer.Option("--sources", help="Also where each line comes from; one name shows its own.")]
Template = Annotated[bool, typer.Option("--template", help="Print an annotated file to start from; it is valid as it is.")]


@command(output=options.PLAIN_OUTPUT)
def chips(
    name: Annotated[str, typer.Argument(help="A chip, or the path of a chip file; all chips if left out.", show_default=False)] = "",
    *,
    output: Output,
    sources: Sources = False,
    template: Template = False,
) -> None:
    """List chips: dense FLOP rates, memory, and where each number came from."""
    if template:
        print(read_template("chip.yaml"), end="")
        return
    from perfmodel.foundation.units import format_bandwidth, format_bytes, format_flop_rate
    from perfmodel.hardware.reader import list_chips, load_chip

    known = [load_chip(chip_name) for chip_name in ([name] if name else list_chips())]

    def blocks() -> Iterator[Block]:
        if name:
            yield Facts(known[0].name, _chip_facts(known[0]))
        else:
            rows = []
            for chip in known:
                dtype = _training_dtype(chip)
                numbers = (
                    _marked(f"{format_flop_rate(chip.flop_rate(dtype))} {dtype}", chip.provenance, "peak_flop_rate"),
                    _marked(format_bytes(chip.memory.capacity), chip.provenance, "memory_capacity"),
                    _marked(format_bandwidth(chip.memory.bandwidth), chip.provenance, "memory_bandwidth"),
                )
                rows.append((chip.name, str(chip.launch_year), *numbers, chip.source))
            yield from table_with_sources(
                ("chip", "year", "FLOP rate  ", "memory  ", "bandwidth  ", "source"),
                rows,
                title=f"Known chips: {len(known)}. FLOP rates are dense. * = recalled, not read.",
                right=("year", "FLOP rate  ", "memory  ", "bandwidth  "),
                sources=sources,
            )

    show(Document(content=lambda: {"chips": known}, blocks=blocks), output)


@command(output=options.PLAIN_OUTPUT)
def chip(
    *,
    spec: Annotated[
        str, typer.Option("--from", metavar="NAME|PATH", help="A specification: technology and budgets; shipped: a100-spec.")
    ] = "",
    save: Annotated[str, option("CHIP.yaml", "Write the chip to a file, for --chip.")] = "",
    output: Output,
) -> None:
    """Make a chip from technology and budgets: logic node, area, power, units, stacks of memory and links.

    The result is an ordinary chip. What limits its units is printed with it: area, power, or the edge of the die.
    """
    from perfmodel.hardware.construct import construct_chip
    from perfmodel.hardware.technology import list_chip_specs, load_chip_spec, technology_of
    from perfmodel.hardware.writer import save_chip

    options.require(("--from", spec or None, f"a specification: {', '.join(list_chip_specs())}, or the path of a file"))
    chip_spec = load_chip_spec(spec)
    construction = construct_chip(chip_spec, technology_of(chip_spec))
    if save:
        save_chip(construction.chip, save)

    def blocks() -> Iterator[Block]:
        stacks = f"{construction.stacks} of {chip_spec.memory.stacks} stacks"
        if construction.stacks >= chip_spec.memory.stacks:
            stacks = f"{chip_spec.memory.stacks} stacks; the die edge has room for {construction.stacks_by_edge:.1f}"
        limits = [
            ("limited by", construction.binding),
            ("units", f"{construction.units_by_area:.1f} by area, {construction.units_by_power:.1f} by power"),
            ("memory stacks", stacks),
        ]
        yield Facts(construction.chip.name, [*_chip_facts(construction.chip), *limits])
        for title, unit, scale, parts in (("Area", "mm2", 1e6, construction.areas), ("Power", "W", 1.0, construction.powers)):
            total = sum(parts.values())
            rows = tuple((name, f"{part * scale:.4g} {unit}", percent(part / total)) for name, part in parts.items())
            yield Table(title=title, headers=("part", "taken", "share"), rows=rows, right=("taken", "share"))
        if save:
            yield Text(f"chip: {save}", apart=True)

    content = {"chip": construction.chip, **{name: getattr(construction, name) for name in _CONSTRUCTION_FIELDS}}
    show(Document(content=lambda: content, blocks=blocks), output)


_CONSTRUCTION_FIELDS = ("binding", "units_by_area", "units_by_power", "stacks", "stacks_by_edge", "areas", "powers", "spec")


def read_template(name: str) -> str:
    """Return an annotated, valid example of a file format."""
    from perfmodel.foundation.resources import resource_dir

    return (resource_dir("hardware_specs") / "templates" / name).read_text(encoding="utf-8")


def table_with_sources(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    sources: bool,
    title: str,
    right: Sequence[str] = (),
    fold: Sequence[str] = (),
    named: bool = True,
) -> Iterator[Block]:
    """Yield a table without its last column, the source; with `--sources`, numbered references and the list of sources."""
    marks = {source: f"[{number}]" for number, source in enumerate(dict.fromkeys(row[-1] for row in rows), 1)}
    shown = [(*row[:-1], marks[row[-1]]) if sources else tuple(row[:-1]) for row in rows]
    yield Table(title=title, headers=tuple(headers if sources else headers[:-1]), rows=tuple(shown), right=tuple(right), fold=tuple(fold))
    if sources:
        yield Text("\n".join(["sources", *(f"{mark} {' '.join(source.split())}" for source, mark in marks.items())]), apart=True)
    else:
        yield Text("--sources prints the sources" + (", a name everything about one" if named else ""), apart=True)


def _training_dtype(chip: Chip) -> Dtype:
    """Return the training dtype: the fastest of bf16, fp16 and fp32 (a GTX 1080 Ti has fp16 at 1/64 of its fp32 rate)."""
    dtypes = [dtype for dtype in _TRAINING_DTYPES if dtype in chip.peak_flop_rate] or list(chip.peak_flop_rate)
    return max(dtypes, key=chip.flop_rate)


def _marked(text: str, provenance: Mapping[str, str], group: str) -> str:
    """Return `text` with a star if numbers of `group` were recalled, not read from a source; else with blanks for alignment."""
    return text + (" *" if provenance.get(group) in ("recalled", "mixed") else "  ")


def _chip_facts(chip: Chip) -> list[tuple[str, str]]:
    from perfmodel.foundation.units import format_bandwidth, format_bytes, format_flop_rate, format_power
    from perfmodel.hardware.reader import load_prices

    price = "unknown"
    if chip.price_per_hour:
        known = load_prices().get(chip.name)
        price = f"{chip.price_per_hour:g} USD per hour" + (f", indicative, {known.date}: {known.source}" if known else "")
    facts = [("vendor", chip.vendor), ("launched", str(chip.launch_year))]
    facts += [(f"peak {dtype}", f"{format_flop_rate(rate)} dense") for dtype, rate in chip.peak_flop_rate.items()]
    facts += [
        ("memory", f"{format_bytes(chip.memory.capacity)} {chip.memory.name}, {format_bandwidth(chip.memory.bandwidth)}"),
        ("usable memory", f"{format_bytes(chip.memory.usable_capacity)}, what the runtime offers a program"),
        ("on chip", format_bytes(chip.on_chip_bytes) if chip.on_chip_bytes else "unknown"),
        ("compute units", f"{chip.units.compute_units} {chip.units.unit_kind}" if chip.units.compute_units else "unknown"),
        ("devices per chip", str(chip.units.devices_per_chip)),
        ("power", format_power(chip.tdp_watts) if chip.tdp_watts else "unknown"),
        ("price", price),
    ]
    facts += [(f"provenance of {group}", word) for group, word in chip.provenance.items()]
    facts += [("source", chip.source), ("notes", chip.notes)]
    return [(name, value) for name, value in facts if value]


@command(output=options.PLAIN_OUTPUT)
def clusters(
    name: Annotated[
        str, typer.Argument(help="A cluster, or the path of a cluster file; all clusters if left out.", show_default=False)
    ] = "",
    *,
    output: Output,
    sources: Sources = False,
    template: Template = False,
) -> None:
    """List clusters: chip, node and network tiers, with their sources."""
    if template:
        print(read_template("cluster.yaml"), end="")
        return
    from perfmodel.foundation.units import format_bandwidth
    from perfmodel.hardware.reader import list_clusters, load_cluster

    known = [load_cluster(cluster_name) for cluster_name in ([name] if name else list_clusters())]

    def blocks() -> Iterator[Block]:
        if name:
            for cluster in known[0].pools or known:
                yield Facts(cluster.name, _cluster_facts(cluster))
        else:
            rows = []
            for cluster in known:
                tiers = ", ".join(f"{tier.name} {tier.size} x {format_bandwidth(tier.link.bandwidth)}" for tier in cluster.tiers)
                sizes = (str(cluster.num_chips), str(cluster.chips_per_node))
                rows.append((cluster.name, cluster.chip.name, *sizes, tiers, cluster.source))
            yield from table_with_sources(
                ("cluster", "chip", "chips", "per node", "network tiers, innermost first", "source"),
                rows,
                title=f"Known clusters: {len(known)}. Link bandwidth is one direction of one chip.",
                right=("chips", "per node"),
                fold=("network tiers, innermost first",),
                sources=sources,
            )

    show(Document(content=lambda: {"clusters": known}, blocks=blocks), output)


def _cluster_facts(cluster: Cluster) -> list[tuple[str, str]]:
    from perfmodel.cost.link_rates import LINK_ROWS, tier_kind
    from perfmodel.cost.machine import resolve_machine
    from perfmodel.cost.resolve import choose_calibration
    from perfmodel.foundation.collectives import CollectiveKind
    from perfmodel.foundation.units import format_bandwidth, format_time
    from perfmodel.hardware.calibration import COLLECTIVE_CODE

    facts = [
        ("chip", cluster.chip.name),
        ("chips", str(cluster.num_chips)),
        ("chips per node", str(cluster.chips_per_node)),
        ("largest job", f"{cluster.largest_job:,} chips" if cluster.largest_job else ""),
    ]
    machine = resolve_machine(cluster, choose_calibration(cluster.chip), dtype=_training_dtype(cluster.chip))
    hops = machine.links.table[LINK_ROWS.index("hop")][:, COLLECTIVE_CODE[CollectiveKind.ALL_GATHER]]
    for tier, hop in zip(cluster.tiers, hops, strict=True):
        link = tier.link
        is_as_stated = abs(hop / link.latency - 1) < 1e-6
        predicted = "" if is_as_stated else f" ({format_time(hop)} a hop of a ring; {machine.basis.parts[tier_kind(cluster, tier)]})"
        parts = [
            f"{tier.topology} of {tier.size}",
            f"{format_bandwidth(link.bandwidth)} to all peers",
            f"{format_bandwidth(link.pair_bandwidth)} to one",
            f"latency {format_time(link.latency)}{predicted}",
        ]
        if tier.torus_shape:
            parts.append("torus " + " x ".join(str(size) for size in tier.torus_shape))
        if tier.oversubscription != 1:
            parts.append(f"oversubscribed {tier.oversubscription:g} to 1")
        if not tier.peer_to_peer:
            parts.append("no peer-to-peer")
        if tier.nics_per_node:
            parts.append(f"{tier.nics_per_node} NIC{'s' if tier.nics_per_node > 1 else ''} a node, shared by its chips")
        facts += [(f"tier {tier.name}", ", ".join(parts)), ("  source", tier.source)]
    facts += [("source", cluster.source), ("notes", cluster.notes)]
    return [(name, value) for name, value in facts if value]


@command(output=options.PLAIN_OUTPUT)
def models(
    name: Annotated[str, typer.Argument(help="A model, or the path of a config.json; all models if left out.", show_default=False)] = "",
    *,
    output: Output,
    sources: Sources = False,
) -> None:
    """List models: shape, and exact numbers of parameters, total and active per token, with their sources."""
    from perfmodel.foundation.units import format_count
    from perfmodel.workload.models import list_models, load_model

    known = [load_model(model_name) for model_name in ([name] if name else list_models())]

    def blocks() -> Iterator[Block]:
        if name:
            yield Facts(known[0].name, [(key, _fact(value)) for key, value in _model_object(known[0]).items() if key != "name"])
        else:
            rows = []
            for model in known:
                active = format_count(model.num_active_parameters) if model.parts.experts else "all"
                sizes = (str(model.num_hidden_layers), str(model.hidden_size), f"{model.num_attention_heads}/{model.num_key_value_heads}")
                positions = str(model.positions.max_position_embeddings)
                rows.append((model.name, format_count(model.num_parameters), active, *sizes, positions, model.origin.source))
            yield from table_with_sources(
                ("model", "params", "active", "layers", "hidden", "heads/kv", "positions", "source"),
                rows,
                title=f"Known models: {len(known)}. `perfmodel models NAME` prints all sizes.",
                right=("params", "active", "layers", "hidden", "heads/kv", "positions"),
                sources=sources,
            )

    show(Document(content=lambda: {"models": [_model_object(model) for model in known]}, blocks=blocks), output)


def _model_object(model: TransformerConfig) -> dict[str, Any]:
    fields: dict[str, Any] = to_plain(model.values)
    counts = ("num_parameters", "num_active_parameters", "num_active_parameters_without_embedding", "num_mtp_parameters")
    return {"name": model.name, **{count: getattr(model, count) for count in counts}, **fields}


def _fact(value: object) -> str:
    """Return a record in one line."""
    if isinstance(value, list):
        return "; ".join(map(_fact, value))
    return ", ".join(f"{key} {inner}" for key, inner in value.items()) if isinstance(value, dict) else str(value)


@command(output=options.PLAIN_OUTPUT)
def profiles(
    name: Annotated[
        str, typer.Argument(help="A profile, or the path of a profile file; all profiles if left out.", show_default=False)
    ] = "",
    *,
    output: Output,
    sources: Sources = False,
) -> None:
    """List execution profiles: what a framework does with a plan, with their sources."""
    from perfmodel.foundation.units import format_time
    from perfmodel.frameworks.profile import list_profiles, load_profile, profile_fields
    from perfmodel.parallel.choices import ZERO_STAGES
    from perfmodel.parallel.framework_ref import SETTING_NAMES

    known = [load_profile(profile_name) for profile_name in ([name] if name else list_profiles())]

    def blocks() -> Iterator[Block]:
        if name:
            facts = [fact for name, value in profile_fields(known[0]).items() for fact in _profile_facts(name, value)]
            yield Facts(known[0].name, facts[1:])
        else:
            rows = []
            for profile in known:
                stages = profile.communication.overlaps_gradients
                overlap = "yes" if stages == ZERO_STAGES else f"ZeRO {', '.join(map(str, stages))} alone" if stages else "no"
                gradients = f"{profile.state.accumulate_dtype}, reduced in {profile.communication.reduce_dtype}"
                zero2 = "shards" if profile.state.zero2_stores_shards else "whole copies"
                times = (profile.timing.host_launch_time, profile.timing.step_time_constant)
                host = (format_time(time) if time else "-" for time in times)
                rows.append((profile.name, profile.kernels.default_attention, gradients, zero2, overlap, *host, profile.source))
            yield from table_with_sources(
                ("profile", "attention", "gradients", "ZeRO-2", "overlap", "host/kernel", "host/step", "source"),
                rows,
                title=f"Known execution profiles: {len(known)}. `perfmodel profiles NAME` prints everything about one.",
                right=("host/kernel", "host/step"),
                fold=("gradients",),
                sources=sources,
            )
            yield Text(f"Settings of any of them (--setting, docs/settings.md): {', '.join(SETTING_NAMES)}.", apart=True)

    show(Document(content=lambda: {"profiles": [profile_fields(profile) for profile in known]}, blocks=blocks), output)


def _profile_facts(name: str, value: object) -> list[tuple[str, str]]:
    """Return the lines of a profile field: one, or one per feature that the framework runs."""
    from perfmodel.frameworks.fitted import FittedTo
    from perfmodel.frameworks.runnable import ANYTHING

    if isinstance(value, FittedTo):
        from_base = f"of your own, {value.date}, starting from {value.base}"
        times = [f"{value.num_runs} runs {from_base}; off by {value.left_out_error:.1%} left out"] if value.num_runs else []
        peaks = [f"{value.num_memory_runs} peaks of memory {from_base}"] if value.num_memory_runs else []
        return [("" if index else "fitted to", text) for index, text in enumerate(times + peaks)]
    if not isinstance(value, dict):
        return [(name.replace("_", " "), _profile_value(name, value))]
    if value == ANYTHING.features:
        return [("runs", "any plan: no limits are known")]
    return [(f"runs {feature.replace('_', ' ')}", _profile_value(feature, item)) for feature, item in value.items()]


def _profile_value(name: str, value: object) -> str:
    from perfmodel.foundation.units import format_time, format_traffic

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float) and (name.endswith(("_time", "_constant")) or "_time_per_" in name):
        return format_time(value) if value else "0"
    if isinstance(value, float) and name.endswith("_bytes"):
        return format_traffic(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@command(output=options.PLAIN_OUTPUT)
def calibrations(
    name: Annotated[
        str, typer.Argument(help="A calibration, or the path of its file; all calibrations if left out.", show_default=False)
    ] = "",
    *,
    output: Output,
    sources: Sources = False,
) -> None:
    """List calibrations, the user's first: what was measured, how well it fits, and its source."""
    from perfmodel.cost.resolve import user_folders
    from perfmodel.hardware.reader import list_calibrations, load_calibration

    folders = user_folders()
    known = [load_calibration(calibration_name, folders) for calibration_name in ([name] if name else list_calibrations(folders))]
    places = ", ".join(map(str, folders)) or "no folder"

    def blocks() -> Iterator[Block]:
        if name:
            yield Facts(known[0].name, calibration_facts(known[0]))
        else:
            yield from table_with_sources(
                ("calibration", "date", "measured on", "lent to", "source"),
                [(one.name, one.date, ", ".join(one.chips), ", ".join(one.relatives) or "-", one.source) for one in known],
                title=f"Known calibrations: {len(known)}. The user's own are in {places}.",
                fold=("lent to",),
                sources=sources,
            )

    show(Document(content=lambda: {"calibrations": known}, blocks=blocks), output)


def calibration_facts(calibration: Calibration) -> list[tuple[str, str]]:
    facts = [
        ("measured on", ", ".join(calibration.chips)),
        ("lent to", ", ".join(calibration.relatives)),
        ("software", calibration.software),
        ("date", calibration.date),
    ]
    for part, points in calibration.fit.points.items():
        error = f", median error {calibration.fit.errors[part]:.1%}" if part in calibration.fit.errors else ""
        facts.append((part, f"{points} points{error}"))
    facts += [(part, f"median error {error:.1%}") for part, error in calibration.fit.errors.items() if part not in calibration.fit.points]
    facts += [("source", calibration.source), ("notes", calibration.notes)]
    return [(fact, value) for fact, value in facts if value]
