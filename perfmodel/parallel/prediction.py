"""Prediction of a plan: step time and its parts, utilisation, memory, traffic, and the basis of each number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from perfmodel.foundation.dtypes import itemsize
from perfmodel.foundation.frames import data_frame
from perfmodel.foundation.memory_headroom import Verdict
from perfmodel.foundation.text import columns_text, facts_text, flop_rate_text, html_table
from perfmodel.foundation.units import format_bytes, format_count, format_step
from perfmodel.parallel.choices import CHUNKED_LOSS, FUSED_LOSS, WHOLE_LOSS
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan, expert_words
from perfmodel.parallel.rows import table_rows, without_total
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.routing import BALANCED
from perfmodel.workload.training import FULL_TRAINING, num_trained_parameters
from perfmodel.workload.truncation import layers_text

if TYPE_CHECKING:
    from perfmodel.foundation.frames import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """A requested combination that cannot be predicted, and the reason."""

    asked: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(f'{name} {value}' for name, value in self.asked.items())}: {self.reason}"


def first_reasons(failures: Iterable[NotPredicted]) -> str:
    """Return why nothing could be predicted, in one sentence: the first three distinct reasons."""
    return "; ".join(list(dict.fromkeys(failure.reason for failure in failures))[:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a prediction: of the chip, of its host and of the framework.

    peak_dtype      dtype of most FLOPs, of which the peak is
    price_per_hour  of one chip; 0: not known   [USD/h]
    host_memory     host memory per chip of offloaded activations, weights and optimizer states   [byte]
    calibration     calibration of the prediction, as a plan file may name it; the plan names one only if the user did
    small_loss      of a plan whose logits do not fit: a form of the loss with few logits that the framework has; "": none
    """

    peak_dtype: str
    price_per_hour: float = 0.0
    host_memory: float = 0.0
    calibration: str = ""
    small_loss: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prediction:
    """Prediction of one training step of a plan.

    parts           exposed seconds on the critical rank by part; they add up to step_time
    memory          peak memory of the fullest chip by class, and their "total"   [byte]
    memory_moment   moment of the step with the peak
    memory_capacity, memory_usable   of a chip as its driver reports it, and the part that the runtime can use   [byte]
    memory_low, memory_high   80 % prediction interval of the total: the memory of temporary tensors is uncertain   [byte]
    fits_probability  probability that the total is at most the usable memory
    verdict         whether the total fits in the usable memory, with the requested headroom or at the requested risk
    mfu_palm        model FLOPs (6 N + 12 L H Q S per token, attention on the full square) over the peak
    mfu_causal      the same with attention counted once below the diagonal
    hfu             executed FLOPs, with recomputation, over the peak
    peak_flop_rate  of one chip, dense, in the compute dtype
    rests_on        part -> spec sheet, prior, partial calibration or calibrated, with the name of the calibration
    not_runnable    why the assumed framework cannot run the plan; "" if it can
    warnings        sentences about extrapolations and omissions of this prediction
    """

    plan: Plan
    step_time: float
    parts: Mapping[str, float]
    tokens_per_second_per_chip: float
    mfu_palm: float
    mfu_causal: float
    hfu: float
    peak_flop_rate: float
    memory: Mapping[str, float]
    memory_moment: str
    memory_capacity: float
    memory_usable: float
    memory_low: float
    memory_high: float
    fits_probability: float
    verdict: Verdict
    rests_on: Mapping[str, str]
    conditions: Conditions
    warnings: tuple[str, ...] = ()
    not_runnable: str = ""

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def memory_spare(self) -> float:
        """Usable bytes that stay free, headroom included; negative if the plan does not fit."""
        return self.memory_usable - self.memory["total"]

    @property
    def largest_memory_class(self) -> str:
        return max(classes := without_total(self.memory), key=classes.__getitem__)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_second_per_chip * self.plan.num_chips

    @property
    def tflops_per_chip(self) -> float:
        """Model TFLOP/s of one chip, in the convention of mfu_palm, as in most papers."""
        return self.mfu_palm * self.peak_flop_rate / 1e12

    def __str__(self) -> str:
        return facts_text(summary(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table([], summary(self))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predictions(Sequence[Prediction]):
    """Predictions of the requested combinations, in order; `not_predicted` are those that cannot be predicted."""

    predictions: tuple[Prediction, ...]
    not_predicted: tuple[NotPredicted, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prediction, ...]: ...
    def __getitem__(self, index: int | slice) -> Prediction | tuple[Prediction, ...]:
        return self.predictions[index]

    def __len__(self) -> int:
        return len(self.predictions)

    def to_frame(self) -> DataFrame:
        """Return the table of `predict --csv`, in SI units: a row for each prediction, then one for each of `not_predicted`.

        A combination that cannot be predicted has a `reason`. The columns that `--interval` adds are left out.
        """
        return data_frame(table_rows(self.predictions, self.not_predicted))

    def __str__(self) -> str:
        return "\n".join([predictions_text(self), *(f"not predicted: {failure}" for failure in self.not_predicted)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return predictions_html(self)


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """Return a table with one line for each prediction."""
    return columns_text([_HEADERS, *(_cells(prediction) for prediction in predictions)])


def predictions_html(predictions: Sequence[Prediction]) -> str:
    return html_table(_HEADERS, [_cells(prediction) for prediction in predictions])


def summary(prediction: Prediction) -> list[tuple[str, str]]:
    """Return the rows of the summary: job, plan, step time, utilisation, memory, basis and notes."""
    plan, job = prediction.plan, prediction.plan.job
    zero = f"; ZeRO {int(plan.zero)}" if int(plan.zero) else ""
    knobs = f"{_degrees(plan)}{zero}; micro-batch {plan.micro_batch}; recompute {plan.recompute}"
    return [
        ("job", f"{job.model.name}, {batch_text(job)}, {job.precision}, {job.optimizer}{trained_text(job)}{routed_text(job)}"),
        *layers_row(job),
        ("plan", f"{plan.num_chips:,} chip{'s' * (plan.num_chips > 1)} of {plan.cluster}: {knobs}"),
        ("step time", f"{format_step(prediction.step_time)}; {prediction.tokens_per_second_per_chip:,.0f} {job.unit}/s a chip"),
        ("utilisation", f"{flop_rate_text(prediction.tflops_per_chip)} TFLOP/s a chip, MFU {prediction.mfu_palm:.1%}"),
        ("memory", _memory_text(prediction)),
        ("based on", f"{prediction.rests_on['forward']}; framework {plan.profile}"),
        *(("note", warning) for warning in notes(prediction)),
    ]


def notes(prediction: Prediction) -> list[str]:
    """Return the notes on a prediction."""
    unable = [f"not a plan for this framework: {prediction.not_runnable}"] if prediction.not_runnable else []
    return [*prediction.warnings, *unable, *logits_note(prediction), *paging_note(prediction)]


#: The moment of the peak at which the logits are live (`cost/memory/moments.py`).
LOSS_MOMENT = "loss"
_SMALL_LOSSES = {
    CHUNKED_LOSS: "; a loss in chunks keeps few of them (--setting loss=chunked)",
    FUSED_LOSS: "; a fused loss keeps few of them (--setting loss=fused)",
}
_FEW_LOGITS = 0.02  # share of the memory; gradients of the last layer may put the peak there too


def logits_note(prediction: Prediction) -> list[str]:
    """Return a note if a plan does not fit because of its logits: small models have the same number of logits as large ones."""
    job, plan = prediction.plan.job, prediction.plan
    at_loss = prediction.verdict is Verdict.DOES_NOT_FIT and prediction.memory_moment == LOSS_MOMENT
    if not at_loss or isinstance(job.model, NetworkModel) or plan.framework.settings.get("loss", WHOLE_LOSS) != WHOLE_LOSS:
        return []
    vocabulary, tokens = job.transformer.vocab_size, plan.micro_batch * job.seq_len / plan.layout.cp
    half = tokens * vocabulary / plan.layout.tp * 2.0
    if half < _FEW_LOGITS * prediction.memory["total"]:
        return []
    return [
        f"memory peaks at the loss: {tokens:,.0f} tokens by a vocabulary of {vocabulary:,} are {format_bytes(half)} of logits in 16 bits, "
        f"copies aside{_SMALL_LOSSES.get(prediction.conditions.small_loss, '')}"
    ]


def paging_note(prediction: Prediction) -> list[str]:
    """Return a note if states of a paged optimizer do not fit next to the peak; the step time has no transfers over the host link.

    Bytes E = max(M + S - usable, 0), at most S: the states of a chip, which are no part of the memory M. They are moved out and back once
    per step.
    Source: bitsandbytes, docs/source/explanations/optimizers.mdx: no overhead where all fits, else half the PCIe bandwidth or less.
    """
    plan, job = prediction.plan, prediction.plan.job
    if not job.optimizer.is_paged or isinstance(job.model, NetworkModel):
        return []
    shards = plan.layout.dp_shard * plan.layout.cp if plan.zero else 1
    elements = num_trained_parameters(job.transformer, job.train) / (plan.layout.tp * plan.layout.pp * shards)
    states = elements * job.optimizer.state_bytes(itemsize(job.policy.optimizer_state))
    moved = min(prediction.memory["total"] + states - prediction.memory_usable, states)
    if moved <= 0:
        return []
    return [
        f"{format_bytes(moved)} of paged optimizer states do not fit next to the peak; the time of moving them there and back is missing"
    ]


def batch_text(job: TrainingJob) -> str:
    """Return the batch of a step as text."""
    if isinstance(job.model, NetworkModel):
        return f"{job.global_batch:,} {job.unit}"
    return f"{job.global_batch:,} sequence{'s' * (job.global_batch > 1)} of {job.seq_len:,} tokens"


def trained_text(job: TrainingJob) -> str:
    """Return the trained part of the model, if it is not all of it: `, lora:16 (40.0M of 6.78G parameters trained)`."""
    if job.train.is_full:
        return "" if job.train == FULL_TRAINING else f", {job.train}"
    trained = num_trained_parameters(job.transformer, job.train)
    return f", {job.train} ({format_count(trained)} of {format_count(job.transformer.num_parameters + trained)} parameters trained)"


def layers_row(job: TrainingJob) -> list[tuple[str, str]]:
    """Return the row of layers by kind, of a model with and without experts in its layers."""
    text = "" if isinstance(job.model, NetworkModel) else layers_text(job.transformer)
    return [("layers", text)] if text else []


def routed_text(job: TrainingJob) -> str:
    """Return the routing as text, if tokens are not spread evenly over experts: `, routing skew:1.3, capacity 1.25`."""
    if job.routing == BALANCED:
        return ""
    capacity = f", capacity {job.routing.capacity_factor:g}" if job.routing.capacity_factor else ""
    return f", routing {job.routing}{capacity}"


def _degrees(plan: Plan) -> str:
    layout = plan.layout
    if plan.assignment is not None:
        return plan.assignment.described()
    axes = [f"{axis} {layout.degree(axis)}" for axis in reversed(DEFAULT_ORDER) if layout.degree(axis) > 1]
    return ", ".join([*axes, *expert_words(plan)]) or "one chip"


#: The header of the column of `probability_cell`.
PROBABILITY = "P(fits)"


def probability_cell(probability: float) -> str:
    """Return the probability of fitting as a cell, never 0 or 100 %."""
    return ">99 %" if probability > 0.99 else "<1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


_HEADERS = ("model", "cluster", "chips", "batch", "seq_len", "framework", "step time", "TFLOP/s/chip", "MFU", "memory", PROBABILITY, "plan")


def _cells(prediction: Prediction) -> tuple[str, ...]:
    plan = prediction.plan
    train = plan.job.train
    return (
        plan.job.model.name if train == FULL_TRAINING else f"{plan.job.model.name}, {train}",
        plan.cluster,
        f"{plan.num_chips}",
        f"{plan.job.global_batch}",
        f"{plan.job.seq_len}",
        plan.profile,
        format_step(prediction.step_time),
        flop_rate_text(prediction.tflops_per_chip),
        f"{prediction.mfu_palm:.1%}",
        _memory_text(prediction),
        probability_cell(prediction.fits_probability),
        _degrees(plan),
    )


def _memory_text(prediction: Prediction) -> str:
    return f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)} usable: {prediction.verdict}"
