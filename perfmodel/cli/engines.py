"""`perfmodel engines`: known serving engines, their features and the sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.known import Sources, table_with_sources
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.foundation.plain import to_plain
from perfmodel.report.document import Block, Document, Facts

if TYPE_CHECKING:
    from perfmodel.frameworks.engine import Engine


#: Fields of an engine's file that are printed in words (`supported`) or not at all.
_NO_FACTS = {"formats", "versions", "notes", "name", "has_chunks", "attention_dp", "expert_parallel", "has_decode_context", "has_graphs"}


@command(output=options.PLAIN_OUTPUT)
def engines(
    name: Annotated[
        str, typer.Argument(help="An engine, or the path of an engine file; all engines if left out.", show_default=False)
    ] = "",
    *,
    output: Output,
    sources: Sources = False,
) -> None:
    """List serving engines: releases, what each runs, and the sources."""
    from perfmodel.frameworks.engine import list_engines, load_engine

    known = [load_engine(engine_name) for engine_name in ([name] if name else list_engines())]

    def blocks() -> Iterator[Block]:
        if name:
            engine = known[0]
            facts = [(name.replace("_", " "), _text(value)) for name, value in supported(engine).items() if name != "formats"]
            for kernel_format in engine.kernels.formats:  # the chips that run it, and the format in which it runs
                runs_as = f"as {kernel_format.runs_as} " if kernel_format.runs_as else ""
                chips = f"{', '.join(kernel_format.vendors)} chips" if kernel_format.vendors else "chips"
                units = f" with {', '.join(kernel_format.units)} units" if kernel_format.units else ""
                facts.append((f"format {kernel_format.format}", f"{runs_as}on {chips}{units}"))
            plain = {"version": engine.version, "source": engine.source, **engine.options}
            facts += [(name.replace("_", " "), _text(value)) for name, value in plain.items() if name not in _NO_FACTS]
            yield Facts(engine.name, [(name, text) for name, text in facts if text])
        else:
            yield from table_with_sources(
                ("engine", "releases", "sequences", "tokens", "prompts", "runs", "start", "source"),
                [(*_row(engine), engine.source) for engine in known],
                title=f"Known engines: {len(known)}. sequences, tokens: of a step, at most; start: `serve` prints the command.",
                right=("sequences", "tokens"),
                sources=sources,
            )

    show(Document(content=lambda: {"engines": [engine_object(engine) for engine in known]}, blocks=blocks), output)


def supported(engine: Engine) -> dict[str, Any]:
    """Return the features of an engine, besides tensor and pipeline parallelism, which all engines have."""
    from perfmodel.frameworks.engine_launch import can_launch

    return {
        "chunked_prefill": engine.scheduling.has_chunks,
        "attention_dp": engine.runs.attention_dp,
        "expert_parallel": engine.runs.expert_parallel,
        "decode_context_parallel": engine.runs.has_decode_context,
        "prefill_context_parallel": engine.runs.prefill_context,
        "cuda_graphs": engine.host.has_graphs,
        "launch_command": can_launch(engine),
        "formats": list(dict.fromkeys(kernel_format.format for kernel_format in engine.kernels.formats)) or None,
    }


def engine_object(engine: Engine) -> dict[str, Any]:
    """Return an engine as the `--json` object: features and all numbers of its file, in SI units."""
    plain: dict[str, Any] = {name: to_plain(value) for name, value in engine.options.items()}
    plain |= {"versions": to_plain(engine.versions), "notes": dict(engine.notes)}
    return {"name": engine.name, "version": engine.version, "source": engine.source, "supports": supported(engine), **plain}


def _row(engine: Engine) -> tuple[str, ...]:
    features = supported(engine)
    words = {"attention_dp": "attn dp", "expert_parallel": "ep"}
    runs = [f"{word} ({features[name]})" if features[name] == "whole" else word for name, word in words.items() if features[name] != "none"]
    runs += ["dcp"] if features["decode_context_parallel"] else []
    runs += ["pcp"] if features["prefill_context_parallel"] != "none" else []
    prompts = "chunks" if engine.scheduling.has_chunks else "first"
    start = "yes" if features["launch_command"] else ""
    return (
        engine.name,
        engine.version.split(",")[0],
        f"{engine.scheduling.max_batch:,}",
        f"{engine.scheduling.max_tokens:,}",
        prompts,
        ", ".join(runs),
        start,
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"{item:,}" if isinstance(item, int) else str(item) for item in value)
    return f"{value:,g}" if isinstance(value, float) else str(value)
