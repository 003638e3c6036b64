"""`run_served`: measured steps of a served model on this machine, next to the predictions of the machine's calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.execute.runner import pick_device
from perfmodel.execute.serving.run import REPEATS, ROUNDS, not_served_reason, run_serving
from perfmodel.execute.shrink import runnable_model
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.words import read_words
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.local import local_cluster
from perfmodel.parallel.request import Service
from perfmodel.parallel.results import ServedComparison, StepShape
from perfmodel.verbs.own_calibration import own_calibration
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import load_model

if TYPE_CHECKING:
    from perfmodel.execute.launch.launch import WorkerGroup

DEFAULT_MODEL = "llama-3-8b"
#: Fields of `serve` that apply to a run on this machine.
_RUN_WORDS = ("model", "input_len", "output_len", "concurrency", "tp")
#: Defaults of a run: tokens of a prompt, of an answer, and concurrent sequences.
INPUT_LEN, OUTPUT_LEN, SEQUENCES = 256, 256, 8


def usual_shapes(*, input_len: int = INPUT_LEN, output_len: int = OUTPUT_LEN, sequences: int = SEQUENCES) -> tuple[StepShape, ...]:
    """Return decode steps of one sequence and of all of them, halfway through their answers; a full prefill, and its second half."""
    halfway = input_len + output_len // 2
    half = max(input_len // 2, 1)
    shapes = (
        StepShape(sequences=1, cached=halfway, new=1),
        StepShape(sequences=sequences, cached=halfway, new=1),
        StepShape(sequences=1, cached=0, new=input_len),
        StepShape(sequences=1, cached=input_len - half, new=half),
    )
    return tuple(dict.fromkeys(shapes))


def run_served(
    model: str | Path | TransformerConfig = DEFAULT_MODEL,
    shapes: Sequence[StepShape] = (),
    *,
    tp: int = 1,
    device: str = "auto",
    calibration: Calibration | str | Path | None = None,
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    group: WorkerGroup | None = None,
    progress: Callable[[str], None] | None = None,
) -> ServedComparison:
    """Run prefill and decode steps of a model with torch on this machine, check their logits, and compare times with the prediction.

    model        a model too large to be checked here is replaced by a small one of the same architecture
    shapes       of steps; none: `usual_shapes()`
    tp           ranks that share every layer; steps of one rank on a CPU are predicted
    calibration  None: the machine's own (`perfmodel calibrate`), else it is measured, which takes a minute
    group        a running WorkerGroup of `tp` ranks to use
    """
    config = runnable_model(model if isinstance(model, TransformerConfig) else load_model(model))
    wanted = tuple(shapes) or usual_shapes()
    reason = not_served_reason(config, tp)
    if reason:
        raise InputError(reason)
    target = group.device if group is not None else pick_device(device, tp)
    note = progress or (lambda what: None)
    predicts = tp == 1 and target == "cpu"
    from perfmodel.cost.serving.executor import anchor_times, lacks_states, predicted_parts
    from perfmodel.execute.launch.launch import WorkerGroup

    def suffices(known: Calibration) -> bool:
        return bool(known.kernels.decode_attention) and not lacks_states(config, known)

    scope = nullcontext(group) if group is not None else WorkerGroup(tp, device=target, hang_timeout=60.0, on_progress=note)
    with scope as workers:
        machine_calibration = own_calibration(calibration, ranks=1, suffices=suffices, group=workers, progress=note) if predicts else None
        measured = run_serving(config, wanted, tp=tp, rounds=rounds, repeats=repeats, group=workers)
    if machine_calibration is None:
        return ServedComparison(measurement=measured, parts={}, calibration="")
    cluster, dtype = local_cluster(num_chips=1), Dtype(measured.dtype)
    parts = {step.shape: predicted_parts(config, cluster, machine_calibration, step.shape, dtype=dtype) for step in measured.steps}
    calibrated = anchor_times(cluster, machine_calibration, dtype=dtype)
    drifts = {name: time / calibrated[name] for name, time in measured.anchors.items()}
    return ServedComparison(measurement=measured, parts=parts, calibration=machine_calibration.name, drifts=drifts)


def run_served_asked(service: Service, progress: Callable[[str], None] | None = None) -> ServedComparison:
    """Call `run_served` with the model, input_len, output_len, concurrency and tp of a service; raise InputError for other words."""
    words = service.given()
    for name, value in words.items():
        if name not in _RUN_WORDS:
            raise bad_field(name, value, "is of a cluster's prediction, --run measures this machine", "leave it out")
    given = read_words(service, "input_len", "output_len", "concurrency", "tp")
    lengths = {name: round(given[name].mean) for name in ("input_len", "output_len") if name in given}
    shapes = usual_shapes(**lengths, sequences=given.get("concurrency", SEQUENCES))
    return run_served(words.get("model", DEFAULT_MODEL), shapes, tp=given.get("tp", 1), progress=progress)
