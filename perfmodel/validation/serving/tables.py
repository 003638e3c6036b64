"""Tables of the errors of serving predictions."""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.parallel.interval import METRICS
from perfmodel.report.table import Table
from perfmodel.validation.serving.judgement import ServingErrors, ServingResult
from perfmodel.validation.statistics import ErrorStatistics
from perfmodel.validation.tables import reason_table, share_text

WORDS = {"ttft": "TTFT", "tpot": "TPOT", "request_latency": "latency", "tokens_per_second": "tokens/s"}


def serving_headline(result: ServingResult) -> str:
    scored = result.overall
    parts = [
        f"{WORDS[metric]} {share_text(statistics.median)} ({share_text(statistics.p90)} at the 90th percentile, {statistics.count:,} runs)"
        for metric, statistics in scored.metrics.items()
        if statistics.count
    ]
    lines = [f"{result.num_predicted:,} of {result.num_rows:,} cases of serving predicted."]
    if parts:
        lines.append(f"Median errors of the {scored.num_rows:,} scored runs (primary, nothing suspect): {'; '.join(parts)}.")
        ran = f"{scored.num_out:,} of them are predicted not to fit" if scored.num_out else "all of them are predicted to fit"
        lines.append(f"They all ran: {ran}.")
    if result.num_suspect:
        lines.append(f"{result.num_suspect:,} runs that the data mark as suspect are predicted and not scored.")
    return "\n".join(lines)


def serving_tables(result: ServingResult) -> list[Table]:
    tables = [
        serving_error_table(f"Errors of serving by {field}, scored runs", field, summaries, result.overall)
        for field, summaries in result.by.items()
    ]
    rest = [errors for errors in (result.secondary, result.second_hand) if errors.num_rows]
    if rest:
        tables.append(serving_error_table("Errors of serving, not scored", "runs", rest))
    if result.reasons:
        tables.append(reason_table(result.reasons))
    return tables


def serving_error_table(title: str, field: str, summaries: Sequence[ServingErrors], overall: ServingErrors | None = None) -> Table:
    """Return a table of errors by metric: count, median, 90th percentile and bias."""

    def cells(errors: ErrorStatistics) -> tuple[str, ...]:
        if not errors.count:
            return ("", "", "", "")
        return (f"{errors.count:,}", *map(share_text, (errors.median, errors.p90, errors.bias)))

    every = [*summaries, *([] if overall is None or len(summaries) < 2 else [overall])]
    metrics = [metric for metric in METRICS if any(errors.metrics[metric].count for errors in every)]
    headers = [field, "cases", *(f"{WORDS[metric]}: {word}" for metric in metrics for word in ("runs", "median", "p90", "bias")), "no fit"]
    rows = tuple(
        (
            errors.name,
            f"{errors.num_rows:,}",
            *(cell for metric in metrics for cell in cells(errors.metrics[metric])),
            str(errors.num_out or ""),
        )
        for errors in every
    )
    return Table(title=title, headers=tuple(headers), rows=rows, right=tuple(headers[1:]))
