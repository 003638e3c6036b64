"""`perfmodel chips | clusters | models | profiles | calibrations`: what is known, with its sources.

One name, or a file, shows everything about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.commands.output import cite, print_facts, print_json, print_sources, print_table, to_plain
from perfmodel.dtypes import Dtype

if TYPE_CHECKING:
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.parallel.profile import ExecutionProfile
    from perfmodel.workload.config import TransformerConfig

_HEADLINE_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP32)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, SI units.")]


def chips(
    name: Annotated[str, typer.Argument(help="A chip, or the path of a chip file; all chips if left out.", show_default=False)] = "",
    json: Json = False,
) -> None:
    """Known chips: dense FLOP rates, memory, and where each number came from."""
    from perfmodel.hardware.reader import list_chips, load_chip

    known = [load_chip(each) for each in ([name] if name else list_chips())]
    if json:
        print_json({"chips": known})
    elif name:
        print_facts(known[0].name, _chip_facts(known[0]))
    else:
        marks = cite(each.source for each in known)
        print_table(
            ("chip", "year", "FLOP rate  ", "memory  ", "bandwidth  ", "source"),
            [(*_chip_row(chip), marks[chip.source]) for chip in known],
            title=f"Known chips: {len(known)}. FLOP rates are dense. * = recalled, not read.",
            right=("year", "FLOP rate  ", "memory  ", "bandwidth  "),
        )
        print_sources(marks)


def _chip_row(chip: Chip) -> tuple[str, ...]:
    from perfmodel.units import format_bandwidth, format_bytes, format_flop_rate

    dtype = next((dtype for dtype in _HEADLINE_DTYPES if dtype in chip.peak_flop_rate), next(iter(chip.peak_flop_rate)))
    return (
        chip.name,
        str(chip.launch_year),
        _marked(f"{format_flop_rate(chip.flop_rate(dtype))} {dtype}", chip.provenance, "peak_flop_rate"),
        _marked(format_bytes(chip.memory.capacity), chip.provenance, "memory_capacity"),
        _marked(format_bandwidth(chip.memory.bandwidth), chip.provenance, "memory_bandwidth"),
    )


def _marked(text: str, provenance: Mapping[str, str], group: str) -> str:
    """`text` with a star where the numbers of `group` were, in part at least, not read anywhere; a blank keeps the columns straight."""
    return text + (" *" if provenance.get(group) in ("recalled", "mixed") else "  ")


def _chip_facts(chip: Chip) -> list[tuple[str, str]]:
    from perfmodel.units import format_bandwidth, format_bytes, format_flop_rate, format_power

    facts = [("vendor", chip.vendor), ("launched", str(chip.launch_year))]
    facts += [(f"peak {dtype}", f"{format_flop_rate(rate)} dense") for dtype, rate in chip.peak_flop_rate.items()]
    facts += [
        ("memory", f"{format_bytes(chip.memory.capacity)} {chip.memory.name}, {format_bandwidth(chip.memory.bandwidth)}"),
        ("usable memory", f"{format_bytes(chip.memory.usable_capacity)}, what the runtime offers a program"),
        ("on chip", format_bytes(chip.on_chip_bytes) if chip.on_chip_bytes else "unknown"),
        ("compute units", f"{chip.compute_units} {chip.unit_kind}" if chip.compute_units else "unknown"),
        ("devices per chip", str(chip.devices_per_chip)),
        ("power", format_power(chip.tdp_watts) if chip.tdp_watts else "unknown"),
        ("price", f"{chip.price_per_hour:g} per hour" if chip.price_per_hour else "unknown"),
    ]
    facts += [(f"provenance of {group}", word) for group, word in chip.provenance.items()]
    facts += [("source", chip.source), ("notes", chip.notes)]
    return [(name, value) for name, value in facts if value]


def clusters(
    name: Annotated[
        str, typer.Argument(help="A cluster, or the path of a cluster file; all clusters if left out.", show_default=False)
    ] = "",
    json: Json = False,
) -> None:
    """Known clusters: chip, node and network tiers, with their sources."""
    from perfmodel.hardware.reader import list_clusters, load_cluster

    known = [load_cluster(each) for each in ([name] if name else list_clusters())]
    if json:
        print_json({"clusters": known})
    elif name:
        print_facts(known[0].name, _cluster_facts(known[0]))
    else:
        marks = cite(each.source for each in known)
        print_table(
            ("cluster", "chip", "chips", "per node", "network tiers, innermost first", "source"),
            [(*_cluster_row(cluster), marks[cluster.source]) for cluster in known],
            title=f"Known clusters: {len(known)}. Link bandwidth is one direction of one chip.",
            right=("chips", "per node"),
            fold=("network tiers, innermost first",),
        )
        print_sources(marks)


def _cluster_row(cluster: Cluster) -> tuple[str, ...]:
    from perfmodel.units import format_bandwidth

    tiers = ", ".join(f"{tier.name} {tier.size} x {format_bandwidth(tier.link.bandwidth)}" for tier in cluster.tiers)
    return (cluster.name, cluster.chip.name, str(cluster.num_chips), str(cluster.chips_per_node), tiers)


def _cluster_facts(cluster: Cluster) -> list[tuple[str, str]]:
    from perfmodel.units import format_bandwidth, format_time

    facts = [
        ("chip", cluster.chip.name),
        ("chips", str(cluster.num_chips)),
        ("chips per node", str(cluster.chips_per_node)),
    ]
    for tier in cluster.tiers:
        link = tier.link
        parts = [
            f"{tier.topology} of {tier.size}",
            f"{format_bandwidth(link.bandwidth)} to all peers",
            f"{format_bandwidth(link.pair_bandwidth)} to one",
            f"latency {format_time(link.latency)}",
        ]
        if tier.torus_shape:
            parts.append("torus " + " x ".join(str(size) for size in tier.torus_shape))
        if tier.oversubscription != 1:
            parts.append(f"oversubscribed {tier.oversubscription:g} to 1")
        if not tier.peer_to_peer:
            parts.append("no peer-to-peer")
        facts += [(f"tier {tier.name}", ", ".join(parts)), ("  source", tier.source)]
    facts += [("source", cluster.source), ("notes", cluster.notes)]
    return [(name, value) for name, value in facts if value]


def models(
    name: Annotated[str, typer.Argument(help="A model, or the path of a config.json; all models if left out.", show_default=False)] = "",
    json: Json = False,
) -> None:
    """Known models: shape and exact parameter count, with their sources."""
    from perfmodel.workload.models import list_models, load_model

    known = [load_model(each) for each in ([name] if name else list_models())]
    if json:
        print_json({"models": [_model_object(model) for model in known]})
    elif name:
        print_facts(known[0].name, [(key, str(value)) for key, value in _model_object(known[0]).items() if key != "name"])
    else:
        marks = cite(each.source for each in known)
        print_table(
            ("model", "parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "positions", "source"),
            [(*_model_row(model), marks[model.source]) for model in known],
            title=f"Known models: {len(known)}.",
            right=("parameters", "layers", "hidden", "heads", "kv heads", "ffn", "vocabulary", "positions"),
        )
        print_sources(marks)


def _model_row(model: TransformerConfig) -> tuple[str, ...]:
    from perfmodel.units import format_count

    sizes = (
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.intermediate_size,
        model.vocab_size,
        model.max_position_embeddings,
    )
    return (model.name, format_count(model.num_parameters), *(str(size) for size in sizes))


def _model_object(model: TransformerConfig) -> dict[str, Any]:
    fields: dict[str, Any] = to_plain(model)
    return {"name": model.name, "num_parameters": model.num_parameters, **fields}


def profiles(
    name: Annotated[
        str, typer.Argument(help="A profile, or the path of a profile file; all profiles if left out.", show_default=False)
    ] = "",
    json: Json = False,
) -> None:
    """Known execution profiles: what a framework does with a plan, with their sources."""
    from perfmodel.parallel.profile import list_profiles, load_profile

    known = [load_profile(each) for each in ([name] if name else list_profiles())]
    if json:
        print_json({"profiles": known})
    elif name:
        facts = [(field.name.replace("_", " "), _profile_value(field.name, getattr(known[0], field.name))) for field in fields(known[0])]
        print_facts(known[0].name, facts[1:])
    else:
        marks = cite(each.source for each in known)
        print_table(
            ("profile", "attention", "gradients", "ZeRO-2 stores", "overlaps gradients", "host a layer", "a step", "source"),
            [(*_profile_row(profile), marks[profile.source]) for profile in known],
            title=f"Known execution profiles: {len(known)}. One name shows everything about it.",
            right=("host a layer", "a step"),
        )
        print_sources(marks)


def _profile_row(profile: ExecutionProfile) -> tuple[str, ...]:
    from perfmodel.units import format_time

    return (
        profile.name,
        profile.default_attention,
        f"{profile.accumulate_dtype}, reduced in {profile.reduce_dtype}",
        "shards" if profile.zero2_stores_shards else "whole copies",
        "yes" if profile.overlaps_gradients else "no",
        format_time(profile.host_layer_time) if profile.host_layer_time else "-",
        format_time(profile.step_time_constant) if profile.step_time_constant else "-",
    )


def _profile_value(name: str, value: object) -> str:
    from perfmodel.units import format_time, format_traffic

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and (name.endswith(("_time", "_constant")) or "_time_per_" in name):
        return format_time(value) if value else "0"
    if isinstance(value, float) and name.endswith("_bytes"):
        return format_traffic(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def calibrations(
    name: Annotated[
        str, typer.Argument(help="A calibration, or the path of its file; all calibrations if left out.", show_default=False)
    ] = "",
    json: Json = False,
) -> None:
    """Known calibrations, the user's own first: what was measured, how well it fits, and its source."""
    from perfmodel.cost.resolve import user_folders
    from perfmodel.hardware.reader import list_calibrations, load_calibration

    folders = user_folders()
    known = [load_calibration(each, folders) for each in ([name] if name else list_calibrations(folders))]
    if json:
        print_json({"calibrations": known})
    elif name:
        print_facts(known[0].name, calibration_facts(known[0]))
    else:
        marks = cite(each.source for each in known)
        print_table(
            ("calibration", "date", "measured on", "lent to", "source"),
            [(*_calibration_row(calibration), marks[calibration.source]) for calibration in known],
            title=f"Known calibrations: {len(known)}. The user's own are in {', '.join(str(folder) for folder in folders) or 'no folder'}.",
            fold=("lent to",),
        )
        print_sources(marks)


def _calibration_row(calibration: Calibration) -> tuple[str, ...]:
    return (calibration.name, calibration.date, ", ".join(calibration.chips), ", ".join(calibration.relatives) or "-")


def calibration_facts(calibration: Calibration) -> list[tuple[str, str]]:
    facts = [
        ("measured on", ", ".join(calibration.chips)),
        ("lent to", ", ".join(calibration.relatives)),
        ("software", calibration.software),
        ("date", calibration.date),
    ]
    for part, points in calibration.points.items():
        error = f", median error {calibration.errors[part]:.1%}" if part in calibration.errors else ""
        facts.append((part, f"{points} points{error}"))
    facts += [(part, f"median error {error:.1%}") for part, error in calibration.errors.items() if part not in calibration.points]
    facts += [("source", calibration.source), ("notes", calibration.notes)]
    return [(fact, value) for fact, value in facts if value]
