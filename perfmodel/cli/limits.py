"""`perfmodel limits`: largest batch, longest sequence and fewest chips that fit, and the limiting factor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, flag
from perfmodel.foundation.plain import picked
from perfmodel.foundation.words import Words
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Notes, Text

if TYPE_CHECKING:
    from perfmodel.verbs.limits import Limits

_WORDS = {
    "micro_batch": "largest micro-batch",
    "global_batch": "largest batch at once",
    "seq_len": "longest sequence",
    "chips": "fewest chips",
}


@command(
    asked=Words(
        Request,
        only="model cluster chips seq_len global_batch precision optimizer train profile settings cp_form offload gradient_compression "
        "calibration memory_headroom risk",
        helps={
            "chips": "Chips to use; the fewest that fit if left out.",
            "global_batch": "Sequences in a step; if left out, a micro-batch for every chip.",
        },
        defaults={"precision": "bf16-mixed", "optimizer": "adamw"},
    ),
    chip=options.ChipWords,
    knobs=Words(Knobs, several=True),
    output=options.output_options("wide json format"),
    after={"precision": "knobs", "optimizer": "precision", "profile": "optimizer", "settings": "profile", "calibration": "settings"},
)
def limits(
    config: Annotated[str, argument("[PLAN|CONFIG]", "The job of a plan, or of a framework's config or launch script.")] = "",
    *,
    asked: Request,
    chip: options.ChipWords,
    knobs: Knobs,
    any_framework: options.AnyFramework = False,
    output: Output,
) -> None:
    """Find the largest micro-batch and global batch, the longest sequence and the fewest chips that fit.

    A knob that is given is held, but in the question that asks for it; others are searched.
    """
    from perfmodel.report.predictions import prediction_object
    from perfmodel.verbs.limits import limits_of, limits_rows

    clusters = options.with_chip([asked.cluster] if asked.cluster else [], chip)
    if config:
        from perfmodel.verbs.configs import job_words, start_from, with_attention

        plan = start_from(config, replace(asked, cluster=clusters), spelled=flag).plan
        asked, knobs = job_words(plan, asked), with_attention(knobs, plan)
        clusters = clusters or [asked.cluster]
    options.require(
        ("--model", asked.model, "a name from `perfmodel models` or a config.json"),
        ("--cluster", len(clusters) or None, "a name from `perfmodel clusters` or a cluster file, or --chip with a chip"),
        ("--seq-len", asked.seq_len, "the tokens of a sequence"),
    )
    with Progress("limits") as progress:
        result = limits_of(
            replace(asked, cluster=options.single_value(clusters, "cluster") or ""),
            knobs,
            any_framework=any_framework,
            progress=progress.share,
        )

    def content() -> dict[str, Any]:
        return {
            **result.setting.described(),
            "global_batch": result.given_batch,
            **picked(result, "memory_usable memory_headroom risk"),
            "limits": {
                limit.name: {
                    **picked(limit, "value limited_by reason memory_class"),
                    "prediction": prediction_object(limit.prediction[0]) if limit.prediction else {},
                }
                for limit in result
            },
        }

    show(Document(content=content, blocks=lambda: _blocks(result), rows=lambda: limits_rows(result)), output)


def _blocks(result: Limits) -> Iterator[Block]:
    from perfmodel.foundation.units import format_bytes, format_count, format_step
    from perfmodel.parallel.prediction import PROBABILITY, probability_cell, trained_text
    from perfmodel.report.predictions import headroom_words, short_plan_text
    from perfmodel.report.table import table_of_rows
    from perfmodel.verbs.setting import tower_note

    setting = result.setting
    job, least = setting.job, " with the least memory" if setting.cluster.pools else ""
    batch = f"{result.given_batch:,} sequences" if result.given_batch else "any number of sequences"
    yield Text("; ".join(f"{_WORDS[limit.name]} {f'{limit.value:,}' if limit.value else 'none'}" for limit in result).capitalize())
    yield Text(
        f"{job.model.name} ({format_count(job.transformer.num_parameters)} parameters), {batch} of {job.seq_len:,} tokens a step, "
        f"{job.precision}, {job.optimizer}{trained_text(job)}, "
        f"on {setting.cluster.num_chips:,} chip{'s' * (setting.cluster.num_chips > 1)} of {setting.reference}; "
        f"framework {setting.estimator.profile.name}"
    )
    yield Text(f"{format_bytes(result.memory_usable)} of a chip{least} usable, {headroom_words(result.memory_headroom, result.risk)}")
    rows = []
    for limit in result:
        best = limit.prediction[0] if limit.prediction else None
        rows.append(
            {
                "what": _WORDS[limit.name],
                "value": f"{limit.value:,}" if limit.value else "none",
                "limited by": limit.limited_by or ("-" if best else ""),
                "memory": format_bytes(best.memory["total"]) if best else "",
                PROBABILITY: probability_cell(best.fits_probability) if best else "",
                "step time": format_step(best.step_time) if best and math.isfinite(best.step_time) else "",
                "plan": short_plan_text(best.plan) if best else "",
            }
        )
    yield table_of_rows(
        "Limits, and the fastest plan at each",
        rows,
        right=("value", "memory", PROBABILITY, "step time"),
        fold=("plan",),
        optional=("memory", "limited by"),
    )
    tower = tower_note(job.transformer)
    yield Notes([*(f"{_WORDS[limit.name]}: {limit.reason}" for limit in result), *([tower] if tower else [])])
