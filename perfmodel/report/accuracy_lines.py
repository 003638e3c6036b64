"""The lines of the accuracy table: which published runs each holds, what it is to reach, and what others reach on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perfmodel.report.judgement import ValidationRow
from perfmodel.report.run_labels import RunLabels

NO_TIMES = ("mcore",)
"""Sources whose step times mean nothing: continuous integration of toy models in deterministic mode, bound by launches. Memory counts."""

_NODE = 8
_TORCH_FSDP = ("titan", "titan24", "titan2506", "ibmfsdp")


Rule = Callable[[RunLabels], bool]
"""Which runs a line holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyLine:
    """counts: its runs are among "all those rows"."""

    title: str
    holds: Rule
    target: str = ""
    others: str = ""
    counts: bool = True


def is_scored(row: ValidationRow) -> bool:
    """A predicted step of a primary source, whose time means something."""
    return row.tier == "primary" and row.group not in NO_TIMES and row.time_error == row.time_error


def _is_of(*sources: str) -> Rule:
    return lambda labels: labels.source in sources


def _is_mpt(chip: str) -> Rule:
    return lambda labels: labels.source == "llmfoundry" and labels.chip.startswith(chip)


def is_narrow(labels: RunLabels) -> bool:
    """Whether its matrix multiplies are in fp8 or narrower."""
    return labels.precision not in ("bf16", "fp16", "fp32", "tf32")


def is_korthikanti(labels: RunLabels) -> bool:
    """The paper's eight rows of one replica."""
    return labels.source == "korthikanti" and "dp" not in labels.form


def is_korthikanti_replicated(labels: RunLabels) -> bool:
    return labels.source == "korthikanti" and "dp" in labels.form


def is_vtrain_node(labels: RunLabels) -> bool:
    return labels.source == "vtrain" and labels.num_chips <= _NODE


def is_vtrain_nodes(labels: RunLabels) -> bool:
    return labels.source == "vtrain" and labels.num_chips > _NODE


def is_torch_fsdp(labels: RunLabels) -> bool:
    """torchtitan's and IBM's runs in bf16."""
    return labels.source in _TORCH_FSDP and not is_narrow(labels)


def is_torch_fsdp_narrow(labels: RunLabels) -> bool:
    return labels.source in _TORCH_FSDP and is_narrow(labels)


is_simumax, is_nanotron, is_megatron_2020, is_llm_c = _is_of("simumax"), _is_of("nanotron"), _is_of("megatron"), _is_of("llmc")
is_mpt_a100, is_mpt_h100 = _is_mpt("a100"), _is_mpt("h100")

LINES: Sequence[AccuracyLine] = (
    AccuracyLine(
        title="Megatron-LM, A100 (Korthikanti et al. 2022)",
        holds=is_korthikanti,
        target="mean 3, max 7",
        others="Calculon 3.65, max 8.87 (fitted to them)",
    ),
    AccuracyLine(title="SimuMax, dense, B200", holds=is_simumax, target="8", others="SimuMax 5.6 (each shape measured there)"),
    AccuracyLine(
        title="vTrain, one node, A100",
        holds=is_vtrain_node,
        target="7",
        others="vTrain 8.4 (operators profiled there)",
    ),
    AccuracyLine(
        title="vTrain, many nodes, A100",
        holds=is_vtrain_nodes,
        target="11",
        others="vTrain 14.7 (operators profiled there)",
    ),
    AccuracyLine(title="MPT with FSDP, A100", holds=is_mpt_a100, target="6", others="one fitted efficiency: 25"),
    AccuracyLine(title="MPT with FSDP, H100", holds=is_mpt_h100, target="9", others="one fitted efficiency: 22"),
    AccuracyLine(title="nanotron, H100, 8-512 chips", holds=is_nanotron, target="10", others="one fitted efficiency: 33"),
    AccuracyLine(
        title="torchtitan and IBM FSDP, bf16",
        holds=is_torch_fsdp,
        target="9",
    ),
    AccuracyLine(title="torchtitan, fp8", holds=is_torch_fsdp_narrow, counts=False),
    AccuracyLine(title="Megatron-LM 2020, V100 and A100", holds=is_megatron_2020, counts=False),
    AccuracyLine(
        title="Korthikanti et al., 8 replicas",
        holds=is_korthikanti_replicated,
        counts=False,
    ),
    AccuracyLine(title="llm.c", holds=is_llm_c, counts=False),
)

#: Why runs are far off, where a source tells: the first that holds. What nobody knows is said to be unknown.
CAUSES: Sequence[tuple[Callable[[ValidationRow], bool], str]] = (
    (lambda row: row.noted_all_reduce < 100e9, "its notes give an all-reduce in the node of a tenth of its neighbours': broken NVLink"),
    (
        lambda row: row.group == "llmc" and "125M" in row.labels.model,
        "contradicts the same author's 124 M run by a factor of two",
    ),
    (
        lambda row: row.group == "llmfoundry" and row.labels.model == "MPT-30b",
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
        lambda row: row.group == "nanotron" and row.labels.num_chips > _NODE and "pp" in row.labels.form and row.time_error > 0.5,
        "its pipeline leaves the node without the slow host of all other such runs (a better fabric, by its notes)",
    ),
    (
        lambda row: row.group == "nanotron" and row.labels.num_chips > _NODE and row.time_error < -0.3,
        "much slower than what the model knows of explains, on several nodes: cause not known",
    ),
)


def cause_of(row: ValidationRow) -> str:
    return next((cause for holds, cause in CAUSES if holds(row)), "not known")
