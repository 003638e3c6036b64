"""Lines of the accuracy table: the published runs of each, and the errors of other models on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perfmodel.validation.plan_choice import BROKEN_NVLINK
from perfmodel.validation.rows import TrainingRow
from perfmodel.validation.run_labels import RunLabels
from perfmodel.validation.statistics import error_statistics

_NODE = 8
_TORCH_FSDP = ("titan", "titan24", "titan2506", "ibmfsdp")

Rule = Callable[[RunLabels], bool]
"""Predicate of the runs of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyLine:
    """A line of the table.

    others   published errors of other models on these runs
    counts   the line enters the overall figures; the title of one that does not stands in brackets
    """

    title: str
    holds: Rule
    others: str = ""
    counts: bool = True

    def __post_init__(self) -> None:
        if self.counts == self.title.startswith("("):
            raise ValueError(f"{self.title}: brackets mark the lines that do not count")


def _is_of(*sources: str, where: Rule = lambda labels: True) -> Rule:
    return lambda labels: labels.source in sources and where(labels)


def is_narrow(labels: RunLabels) -> bool:
    """Return whether the matrix multiplies are in fp8 or narrower."""
    return labels.precision not in ("bf16", "fp16", "fp32", "tf32")


#: The paper's eight rows with one replica.
is_korthikanti = _is_of("korthikanti", where=lambda labels: "dp" not in labels.form)
is_korthikanti_replicated = _is_of("korthikanti", where=lambda labels: "dp" in labels.form)
is_vtrain_node = _is_of("vtrain", where=lambda labels: labels.num_chips <= _NODE)
is_vtrain_nodes = _is_of("vtrain", where=lambda labels: labels.num_chips > _NODE)
#: Runs of torchtitan and of IBM.
is_torch_fsdp = _is_of(*_TORCH_FSDP, where=lambda labels: not is_narrow(labels))
is_torch_fsdp_narrow = _is_of(*_TORCH_FSDP, where=is_narrow)
is_simumax, is_nanotron, is_megatron_2020, is_llm_c = map(_is_of, ("simumax", "nanotron", "megatron", "llmc"))
is_mpt_a100 = _is_of("llmfoundry", where=lambda labels: labels.chip.startswith("a100"))
is_mpt_h100 = _is_of("llmfoundry", where=lambda labels: labels.chip.startswith("h100"))

LINES: Sequence[AccuracyLine] = (
    AccuracyLine(
        title="Megatron-LM on A100, Korthikanti",
        holds=is_korthikanti,
        others="Calculon 3.65 %, max 8.87 % (fitted to them); Kundu 4.7 %, max 9.3 %",
    ),
    AccuracyLine(title="SimuMax, dense, B200", holds=is_simumax, others="SimuMax 5.6 % (each shape measured there)"),
    AccuracyLine(title="vTrain, one node", holds=is_vtrain_node, others="vTrain 8.4 % (operators profiled there)"),
    AccuracyLine(title="vTrain, many nodes", holds=is_vtrain_nodes, others="vTrain 14.7 % (operators profiled there)"),
    AccuracyLine(title="MPT with FSDP, A100", holds=is_mpt_a100, others="one fitted efficiency: 25 %"),
    AccuracyLine(title="MPT with FSDP, H100", holds=is_mpt_h100, others="one fitted efficiency: 22 %"),
    AccuracyLine(title="nanotron, H100, 8-512", holds=is_nanotron, others="one fitted efficiency: 33 %"),
    AccuracyLine(title="torchtitan and IBM FSDP, bf16", holds=is_torch_fsdp),
    AccuracyLine(title="(torchtitan, fp8)", holds=is_torch_fsdp_narrow, counts=False),
    AccuracyLine(title="(Megatron-LM 2020, V100 and A100)", holds=is_megatron_2020, counts=False),
    AccuracyLine(title="(Korthikanti, 8 replicas)", holds=is_korthikanti_replicated, counts=False),
    AccuracyLine(title="(llm.c)", holds=is_llm_c, counts=False),
)

EVERY = AccuracyLine(title="all but those in brackets", holds=lambda labels: any(line.holds(labels) for line in LINES if line.counts))


def errors_by_line(errors: Iterable[tuple[RunLabels, float]], lines: Sequence[AccuracyLine] = LINES) -> dict[AccuracyLine, list[float]]:
    """Return the errors of each line that has runs, and those of all lines that count."""
    errors = list(errors)
    every = {line: [error for labels, error in errors if line.holds(labels)] for line in (*lines, EVERY)}
    return {line: members for line, members in every.items() if members}


def median_of_means(errors: Mapping[AccuracyLine, Sequence[float]]) -> float:
    """Return the median of the mean errors of the lines that count."""
    means = [error_statistics(members).mean for line, members in errors.items() if line.counts and line is not EVERY]
    return median(means) if means else math.nan


_SMALL = 0.25e9


def _possible(holds: Rule) -> Rule:
    """Return the rule without the runs that are faster than the peak rate of their chips."""
    return lambda labels: holds(labels) and not labels.peak_share > 1.0


#: Small jobs, which may be host-bound: GPT-2's size, or one chip. A run may belong to two.
SMALL: Sequence[tuple[str, Rule]] = (
    ("llm.c, 124M and 350M on 8 chips", _possible(is_llm_c)),
    ("vTrain, its smallest (0.2 B) on 2 to 8 chips", _possible(lambda labels: is_vtrain_node(labels) and labels.parameters < _SMALL)),
    ("MPT of 125M on 8 to 64 chips", _possible(lambda labels: labels.source == "llmfoundry" and labels.parameters < _SMALL)),
    ("one chip", _possible(lambda labels: labels.num_chips == 1)),
)

#: Causes of large errors that a source documents: the first that holds. No rule reads the error itself. Otherwise: "not known".
CAUSES: Sequence[tuple[Callable[[TrainingRow], bool], str]] = (
    (
        lambda row: row.case.noted_all_reduce < BROKEN_NVLINK,
        "its notes give an all-reduce in the node of a tenth of its neighbours': broken NVLink",
    ),
    (
        lambda row: row.group == "llmc" and "125M" in row.labels.model,
        "faster than its chips can multiply; contradicts the same author's 124 M run by a factor of two",
    ),
    (
        lambda row: row.group == "llmfoundry" and row.labels.model == "MPT-30b" and row.labels.num_chips <= _NODE,
        "30 B on few chips is 20-25 % slower than all its neighbours: most likely the allocator thrashes",
    ),
    (
        lambda row: is_vtrain_nodes(row.labels) and row.labels.degrees.endswith("tp 2"),
        "tp=2 of the 39.1 B model is slower than the other degrees, and not monotonic in the micro-batch: cause not known",
    ),
    (
        lambda row: is_torch_fsdp_narrow(row.labels),
        "the fp8 recipe (per tensor, per row, which casts) is only partly an input",
    ),
    (
        lambda row: row.id == "nanotron-14102875",
        "its pipeline leaves the node without the slow host of all other such runs (a better fabric, by its notes)",
    ),
)


def cause_of(row: TrainingRow) -> str:
    return next((cause for holds, cause in CAUSES if holds(row)), "not known")
