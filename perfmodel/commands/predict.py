"""`perfmodel predict`: step time and memory of one plan, or of the same knobs on several clusters and numbers of chips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.commands import options
from perfmodel.commands.output import print_facts, print_json, print_tables
from perfmodel.errors import InputError

if TYPE_CHECKING:
    from perfmodel.parallel.plan import Plan
    from perfmodel.parallel.prediction import Prediction
    from perfmodel.setting import Confidence, Knobs, Setting
    from perfmodel.workload.job import TrainingJob


def predict(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN.yaml", help="A plan file, or an expert plan by name; or describe the plan with flags.")
    ] = "",
    model: options.Model = "",
    cluster: options.ClusterNames = [],  # noqa: B006  # typer wants a list; nobody changes it
    chip: options.Chip = "",
    per_node: options.PerNode = "",
    scale_up: options.ScaleUp = "",
    scale_out: options.ScaleOut = "",
    chips: options.Chips = "",
    global_batch: options.GlobalBatch = None,
    seq_len: options.SeqLen = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    cp: options.Cp = None,
    dp_replicate: options.DpReplicate = None,
    dp_shard: options.DpShard = None,
    zero: options.Zero = None,
    micro_batch: options.MicroBatch = None,
    virtual_stages: options.VirtualStages = None,
    schedule: options.Schedule = None,
    recompute: options.Recompute = None,
    sequence_parallel: options.SequenceParallel = None,
    order: options.Order = None,
    attention: options.Attention = None,
    precision: options.Precision = "bf16-mixed",
    optimizer: options.Optimizer = "adamw",
    profile: options.Profile = None,
    calibration: options.Calibration = None,
    memory_headroom: options.MemoryHeadroom = options.DEFAULT_HEADROOM,
    interval: Annotated[
        bool,
        typer.Option("--interval", help="An 80 % interval of the step time, and the parameters that it hangs on most."),
    ] = False,
    tokens: options.Tokens = "",
    network: Annotated[
        str,
        typer.Option("--network", metavar="MODULE:FACTORY", help="Of a plan of `shard` for a module of your own: that it may be loaded."),
    ] = "",
    json: options.Json = False,
    plot: options.Plot = None,
    save: options.Save = None,
) -> None:
    """Step time, its parts, memory and utilisation of one plan.

    A degree that is left out is 1; the rest of the chips go to dp_replicate (with --zero 1, 2 or 3: to dp_shard).
    A plan that does not fit is predicted all the same.
    """
    from perfmodel.commands.network_plan import predict_file
    from perfmodel.parallel.network_plan_file import is_network_plan
    from perfmodel.setting import Knobs, load_plan, make_job

    options.check_figure(plot)
    options.check_plan_path(save)
    cluster = options.with_chip(cluster, chip, per_node=per_node, scale_up=scale_up, scale_out=scale_out)
    knobs = Knobs(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        zero=zero,
        micro_batch=micro_batch,
        virtual_stages=virtual_stages,
        schedule=schedule,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        order=options.parse_order(order),
        attention=attention,
    )
    headroom = options.parse_fraction(memory_headroom, "memory_headroom")
    num_tokens = options.parse_tokens(tokens)
    counts = options.parse_chips(chips)
    request = _Request(knobs, calibration=calibration, profile=profile, headroom=headroom)
    if plan and is_network_plan(plan):
        others = {"precision": precision != "bf16-mixed", "optimizer": optimizer != "adamw", "interval": interval}
        flags = {"tokens": tokens, "plot": plot, "save": save, **{name: is_given or None for name, is_given in others.items()}}
        _refuse_beside_a_plan(plan, model=model, chips=chips, global_batch=global_batch, seq_len=seq_len, **knobs.given(), **flags)
        predict_file(plan, cluster, network=network, headroom=headroom, json=json, profile=profile, calibration=calibration)
        return
    if network:
        raise InputError("--network: is for plans of `perfmodel shard`; leave it out")
    if plan:
        _refuse_beside_a_plan(plan, model=model, chips=chips, global_batch=global_batch, seq_len=seq_len, **knobs.given())
        predictions, failures = request.of_plan(load_plan(plan), cluster)
    else:
        options.needed(model, "--model", "a name from `perfmodel models`, a config.json, or a plan file")
        options.needed(len(cluster) or None, "--cluster", "a name from `perfmodel clusters` or a cluster file, or --chip with a chip")
        options.needed(global_batch, "--global-batch", "the sequences of a step")
        options.needed(seq_len, "--seq-len", "the tokens of a sequence")
        job = make_job(model, global_batch=global_batch or 0, seq_len=seq_len or 0, precision=precision, optimizer=optimizer)
        predictions, failures = request.of_job(job, cluster, counts)
    _save_and_plot(predictions, save, plot)
    if len(predictions) + len(failures) > 1:
        _show_several(predictions, failures, json=json, tokens=num_tokens, confidences=request.confidences if interval else [])
    else:
        _show_one(predictions[0], json=json, tokens=num_tokens, confidences=request.confidences if interval else [])
    if plot is not None and not json:
        print(f"\nfigure: {plot}")
    if save is not None and not json:
        print(f"\nplan: {save}")


class _Request:
    """What is asked of every cluster and number of chips alike."""

    def __init__(self, knobs: Knobs, *, calibration: str | None, profile: str | None, headroom: float) -> None:
        self._knobs, self._calibration, self._profile, self._headroom = knobs, calibration, profile, headroom
        self._settings: list[tuple[Setting, Plan]] = []

    @property
    def confidences(self) -> list[Confidence]:
        """How sure each prediction is, in their order."""
        from perfmodel.setting import confidence_in

        return [confidence_in(setting, plan) for setting, plan in self._settings]

    def _predicted(self, setting: Setting, plan: Plan) -> Prediction:
        from perfmodel.setting import predict_in

        prediction = predict_in(setting, plan, memory_headroom=self._headroom)
        self._settings.append((setting, plan))
        return prediction

    def of_job(self, job: TrainingJob, clusters: list[str], counts: list[int]) -> tuple[list[Prediction], list[dict[str, Any]]]:
        """Predictions, and why there are no others; where nothing can be predicted, the first reason is raised."""
        from perfmodel.hardware.reader import load_cluster
        from perfmodel.setting import make_setting, plan_in

        predictions, failures = [], []
        every: list[int | None] = [*counts] or [None]
        places = [(cluster, count) for cluster in clusters for count in every]
        if len(places) > 1:
            for cluster in clusters:
                load_cluster(cluster)  # an unknown name is no line of the table
        for cluster, count in places:
            try:
                setting = make_setting(job, cluster, chips=count, calibration=self._calibration, profile=self._profile)
                predictions.append(self._predicted(setting, plan_in(setting, self._knobs)))
            except InputError as error:
                if len(places) == 1:
                    raise
                failures.append({"cluster": cluster, "chips": count or 0, "reason": str(error)})
        if not predictions:
            raise InputError(failures[0]["reason"])
        return predictions, failures

    def of_plan(self, plan: Any, clusters: list[str]) -> tuple[list[Prediction], list[dict[str, Any]]]:
        from perfmodel.setting import placed, setting_of_plan

        every: list[str | None] = [*clusters] or [None]
        predictions = []
        for cluster in every:
            setting = setting_of_plan(plan, cluster=cluster, calibration=self._calibration, profile=self._profile)
            predictions.append(self._predicted(setting, placed(plan, setting)))
        return predictions, []


def _refuse_beside_a_plan(plan: str, **flags: Any) -> None:
    for name, value in flags.items():
        if value not in (None, ""):
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: cannot be given beside the plan {plan}, which decides it; edit the file, or leave the file out")


def _save_and_plot(predictions: list[Prediction], save: Path | None, plot: Path | None) -> None:
    if save is not None:
        if len(predictions) > 1:
            raise InputError("--save: can write one plan only; give one cluster and one number of chips")
        from perfmodel.parallel.plan_file import write_plan

        write_plan(predictions[0].plan, save)
    if plot is not None:
        from perfmodel.report.figures import plot_predictions

        plot_predictions(predictions, plot)


def _show_one(prediction: Prediction, *, json: bool, tokens: float, confidences: list[Confidence]) -> None:
    from perfmodel.report.predictions import (
        confidence_lines,
        confidence_object,
        headline,
        job_line,
        memory_table,
        parts_table,
        prediction_object,
        sensitivity_table,
    )

    if json:
        more = [confidence_object(prediction, interval, named) for interval, named in confidences]
        print_json(prediction_object(prediction, tokens=tokens) | (more[0] if more else {}))
        return
    lines = [line for interval, _ in confidences for line in confidence_lines(prediction, interval)]
    print_facts(job_line(prediction.plan), headline(prediction, tokens=tokens) + lines)
    print_tables([parts_table(prediction), memory_table(prediction), *(sensitivity_table(named) for _, named in confidences)])


def _show_several(
    predictions: list[Prediction], failures: list[dict[str, Any]], *, json: bool, tokens: float, confidences: list[Confidence]
) -> None:
    from perfmodel.report.predictions import confidence_object, prediction_object, settings_table, workload_line

    if json:
        objects = [prediction_object(each, tokens=tokens) for each in predictions]
        for content, prediction, (interval, named) in zip(objects, predictions, confidences, strict=bool(confidences)):
            content |= confidence_object(prediction, interval, named)
        print_json({"predictions": objects, "not_predicted": failures})
        return
    print(workload_line(predictions[0].plan))
    print_tables([settings_table(predictions, tokens=tokens, intervals=[interval for interval, _ in confidences])])
    print(f"\nMFU is PaLM's (attention on the full square), of the dense {predictions[0].peak_dtype} peak of each chip.")
    for failure in failures:
        print(f"not predicted: {failure['cluster']}, {failure['chips']} chips: {failure['reason']}")
