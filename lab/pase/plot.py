"""Figure 6 of the PaSE paper as a table, counts and a chart: measured and predicted speedups over data parallelism.

Source of the measured ones: Elango, PaSE, IPDPS 2021 (arXiv 2407.04001), figure 6, read from its bars to +-0.02.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.pase.figure import FIGURE_CLUSTERS, FIGURE_DEVICES, FIGURE_NETWORKS, FITTED, FigurePoint, predicted_time
from lab.pase.strategies import recurrent_parts
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_time
from perfmodel.report.figures import new_figure, write_figure
from perfmodel.report.pase import PUBLISHED_STRATEGIES, TABLE_2_DEVICES
from perfmodel.report.table import Table
from perfmodel.workload.graph import Graph, Operator
from perfmodel.workload.networks import load_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERT, PASE = "expert", "PaSE"

#: Cluster -> network -> strategy -> speedup over data parallelism at p = 4, 8, 16, 32, 64.
PUBLISHED_SPEEDUPS: Mapping[str, Mapping[str, Mapping[str, tuple[float, ...]]]] = {
    "pase-1080ti": {
        "alexnet": {EXPERT: (1.53, 1.56, 1.47, 0.97, 0.84), PASE: (1.66, 1.75, 1.86, 1.45, 1.42)},
        "inception3": {EXPERT: (1.00, 1.01, 1.00, 0.99, 1.00), PASE: (1.03, 1.08, 1.07, 1.09, 1.12)},
        "rnnlm": {EXPERT: (1.61, 1.36, 0.77, 0.98, 0.91), PASE: (1.85, 1.76, 1.45, 1.41, 1.36)},
        "transformer": {EXPERT: (1.00, 0.91, 1.41, 1.39, 1.43), PASE: (1.03, 1.02, 1.55, 1.50, 1.43)},
    },
    "pase-2080ti": {
        "alexnet": {EXPERT: (2.95, 3.51, 3.36, 1.79, 0.90), PASE: (3.54, 4.00, 3.99, 2.78, 1.76)},
        "inception3": {EXPERT: (1.00, 1.02, 1.02, 0.99, 1.00), PASE: (1.00, 1.09, 1.11, 1.12, 1.18)},
        "rnnlm": {EXPERT: (1.61, 1.25, 0.93, 1.10, 1.20), PASE: (2.03, 2.41, 1.68, 1.62, 1.33)},
        "transformer": {EXPERT: (0.97, 0.78, 1.26, 1.27, 2.71), PASE: (1.00, 1.83, 1.75, 1.60, 2.71)},
    },
}
#: Measured gains and losses up to this size have no sign.
SMALLEST_GAIN = 0.05

_COLOURS = {EXPERT: "#56B4E9", PASE: "#0072B2"}
_MARKS = {EXPERT: "o", PASE: "D"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of the figure, and its prediction."""

    strategy: str
    point: FigurePoint
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1.0

    @property
    def has_sign(self) -> bool:
        return abs(self.published - 1.0) > SMALLEST_GAIN + 1e-9  # bars are read to two digits: 1.05 has none

    @property
    def is_sign_right(self) -> bool:
        return (self.published > 1.0) == (self.predicted > 1.0)


def figure_bars(points: Sequence[FigurePoint]) -> tuple[Bar, ...]:
    """Return two bars for each point: the expert's strategy and PaSE's."""
    bars = []
    for point in points:
        index = FIGURE_DEVICES.index(point.num_devices)
        for strategy, predicted in ((EXPERT, point.expert_speedup), (PASE, point.pase_speedup)):
            published = PUBLISHED_SPEEDUPS[point.cluster][point.network][strategy][index]
            bars.append(Bar(strategy=strategy, point=point, published=published, predicted=predicted))
    return tuple(bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureScore:
    """Accuracy of the predictions: signs of the expert's gains, and the median of |error| for each strategy."""

    num_signs: int
    num_signs_right: int
    median_error: Mapping[str, float]


def figure_score(bars: Sequence[Bar]) -> FigureScore:
    signs = [bar.is_sign_right for bar in bars if bar.strategy == EXPERT and bar.has_sign]
    errors = {strategy: [abs(bar.error) for bar in bars if bar.strategy == strategy] for strategy in (EXPERT, PASE)}
    return FigureScore(
        num_signs=len(signs),
        num_signs_right=sum(signs),
        median_error={strategy: median(values) for strategy, values in errors.items() if values},
    )


def figure_table(bars: Sequence[Bar]) -> Table:
    """Return one row for each point: predicted and published, expert then PaSE."""
    by_point: dict[FigurePoint, dict[str, Bar]] = {}
    for bar in bars:
        by_point.setdefault(bar.point, {})[bar.strategy] = bar
    rows = []
    for point in sorted(by_point, key=_place):
        cells = [point.cluster, point.network, str(point.num_devices), format_time(point.data_parallel)]
        for strategy in (EXPERT, PASE):
            bar = by_point[point][strategy]
            is_wrong = strategy == EXPERT and bar.has_sign and not bar.is_sign_right
            cells += [f"{bar.predicted:.2f}", f"{bar.published:.2f}", f"{100 * bar.error:+.0f} %{' !' if is_wrong else ''}"]
        rows.append(tuple(cells))
    headers = ("cluster", "network", "p", "data parallel", "expert", "measured", "error", "PaSE", "measured ", "error ")
    return Table(
        title="Figure 6: speedup over data parallelism, predicted and measured (!: gain taken for loss, or loss for gain)",
        headers=headers,
        rows=tuple(rows),
        right=headers[2:],
    )


def _place(point: FigurePoint) -> tuple[int, int, int]:
    return FIGURE_CLUSTERS.index(point.cluster), FIGURE_NETWORKS.index(point.network), point.num_devices


def score_table(bars: Sequence[Bar]) -> Table:
    """Return the median errors by network and overall, and the counts of signs."""
    rows = []
    for name in (*dict.fromkeys(bar.point.network for bar in bars), ""):
        score = figure_score([bar for bar in bars if name in ("", bar.point.network)])
        signs = f"{score.num_signs_right} of {score.num_signs}" if score.num_signs else "-"
        rows.append((name or "all", *(percent(score.median_error[strategy]) for strategy in (EXPERT, PASE)), signs))
    return Table(
        title=f"Median errors, and signs of the expert's gains of more than {SMALLEST_GAIN:g}",
        headers=("network", "expert", "PaSE", "signs right"),
        rows=tuple(rows),
        right=("expert", "PaSE", "signs right"),
    )


def printed_parts(network: Graph) -> tuple[dict[str, dict[str, int]], int]:
    """Return Table II as the paper prints it, for our operators, and the number of LSTM layers that run concurrently."""
    parts: dict[str, dict[str, int]] = {}
    apart = 1
    for label, dims, configuration in PUBLISHED_STRATEGIES[network.name]:
        split = dict(zip(dims.split(), map(int, configuration.split()), strict=True))
        apart = max(apart, split.get("l", 1))
        if label == "LSTM":
            parts |= recurrent_parts(network, split)
            continue
        for operator in network.operators:
            if _TABLE_2_LAYERS[label](operator):
                degrees = split | {"t": split.get("s", 1)}
                parts[operator.name] = {dim: degrees.get(dim, 1) for dim in operator.dims if dim not in operator.roles.unsplit}
    return parts, apart


def _last(operator: Operator) -> str:
    return operator.name.rpartition(".")[2]


#: Operators of each row of Table II.
_TABLE_2_LAYERS: Mapping[str, Callable[[Operator], bool]] = {
    "conv 1-4": lambda operator: operator.kind == "convolution" and operator.name != "conv5",
    "conv 5": lambda operator: operator.name == "conv5",
    "FC 1, FC 3": lambda operator: operator.name in ("fc6", "fc8"),
    "FC 2": lambda operator: operator.name == "fc7",
    "modules A-D": lambda operator: operator.kind == "convolution" and not operator.layer.startswith("mixed_e"),
    "module E": lambda operator: operator.kind == "convolution" and operator.layer.startswith("mixed_e"),
    "FC": lambda operator: operator.name in ("fc", "projection"),
    "softmax": lambda operator: operator.kind == "cross_entropy",
    "embedding": lambda operator: operator.kind == "embedding",
    "multi-head attention": lambda operator: _last(operator) in ("q_proj", "k_proj", "v_proj", "scores", "softmax", "context", "o_proj"),
    "feed forward": lambda operator: _last(operator) in ("up_proj", "up_proj_bias", "relu", "down_proj"),
}


def printed_table(bars: Sequence[Bar]) -> Table:
    """Return the speedups at p = 32 of the strategy that the search finds and of the one that the paper prints."""
    rows = []
    for bar in bars:
        point = bar.point
        if bar.strategy == PASE and point.num_devices == TABLE_2_DEVICES:
            network = load_network(point.network)
            parts, apart = printed_parts(network)
            time = predicted_time(network, cluster=point.cluster, num_devices=TABLE_2_DEVICES, parts=parts, apart=apart)
            printed = point.data_parallel / time
            rows.append((point.cluster, point.network, f"{bar.predicted:.2f}", f"{printed:.2f}", f"{bar.published:.2f}"))
    headers = ("cluster", "network", "found here", "as printed", "measured")
    return Table(
        title=f"p = {TABLE_2_DEVICES}: speedups of PaSE's strategies, as found here and as Table II prints them",
        headers=headers,
        rows=tuple(sorted(rows)),
        right=headers[2:],
    )


def figure_object(bars: Sequence[Bar], source: str) -> dict[str, Any]:
    """Return the figure as a JSON object."""
    score = figure_score(bars)
    points = []
    for bar in bars:
        times = {EXPERT: bar.point.expert, PASE: bar.point.pase}
        points.append(
            {
                **picked(bar.point, "cluster network num_devices"),
                "strategy": bar.strategy,
                "step_time": times[bar.strategy],
                "data_parallel_step_time": bar.point.data_parallel,
                "predicted_speedup": bar.predicted,
                "published_speedup": bar.published,
                "error": bar.error,
            }
        )
    return {
        "source": source,
        "fitted": asdict(FITTED),
        "signs": score.num_signs,
        "signs_right": score.num_signs_right,
        "median_error": dict(score.median_error),
        "points": points,
    }


def plot_figure(bars: Sequence[Bar], path: Path) -> None:
    """Write the chart in the format of the file extension."""
    write_figure(pase_chart(bars), path)


def pase_chart(bars: Sequence[Bar]) -> Figure:
    """Return the chart: a panel for each cluster and network, bars as published, marks as predicted."""
    clusters = [name for name in FIGURE_CLUSTERS if any(bar.point.cluster == name for bar in bars)]
    networks = [name for name in FIGURE_NETWORKS if any(bar.point.network == name for bar in bars)]
    figure = new_figure(width=max(6.5, 2.65 * len(networks)), height=0.8 + 2.6 * len(clusters))
    panels = figure.subplots(len(clusters), len(networks), squeeze=False)
    for row, cluster in zip(panels, clusters, strict=True):
        for axes, network in zip(row, networks, strict=True):
            shown = [bar for bar in bars if (bar.point.cluster, bar.point.network) == (cluster, network)]
            counts = sorted({bar.point.num_devices for bar in shown})
            for shift, strategy in ((-0.2, EXPERT), (0.2, PASE)):
                mine = [bar for bar in shown if bar.strategy == strategy]
                places = [counts.index(bar.point.num_devices) + shift for bar in mine]
                axes.bar(places, [bar.published for bar in mine], 0.4, color=_COLOURS[strategy], label=f"{strategy}, measured")
                axes.plot(
                    places,
                    [bar.predicted for bar in mine],
                    _MARKS[strategy],
                    color="#D55E00",
                    markeredgecolor="white",
                    markersize=6,
                    label=f"{strategy}, predicted",
                )
            axes.axhline(1.0, color="#555555", linewidth=0.8)
            axes.set_xticks(range(len(counts)), [str(count) for count in counts])
            axes.set_title(f"{network}, {cluster.removeprefix('pase-')}", fontsize=10)
            axes.set_xlabel("devices")
    for row in panels:
        row[0].set_ylabel("speedup over data parallelism")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
