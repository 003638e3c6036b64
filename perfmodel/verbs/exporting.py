"""`export`: a plan as the configuration files of a framework, checked by reading them back; a serving plan as its engine's launch files."""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.configs.tables import load_tables, names_of, table_named
from perfmodel.configs.write import TORCHRUN, ExportedPlan, facts_of_plan, launch_files, launcher_named, write_config
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.files import read_text
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.foundation.words import words_of
from perfmodel.frameworks.engine_launch import LaunchLine, family_of, launch_lines
from perfmodel.frameworks.profile import GENERIC, load_profile
from perfmodel.frameworks.runnable import not_runnable_reason
from perfmodel.parallel.plan import Plan, plan_facts
from perfmodel.parallel.plan_file import is_serving_plan
from perfmodel.parallel.request import Request, Service
from perfmodel.parallel.schedule_table import ScheduleTable
from perfmodel.parallel.serving_plan import DEGREES, ServingLayout
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.setting import Name, Setting, load_plan, predict_in, setting_of_plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.models import hub_id_of

#: Facts that may differ when a plan is read back: names, and facts that belong to the profile.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_NAMES = ("model", "cluster", "profile", "settings", "calibration", "rules", "rule_set")


def runs_in(setting: Setting, plan: Plan) -> tuple[str, ...] | None:
    """Return the frameworks that run a plan for which none was given, by their names in `export`; None for other plans."""
    if plan.framework.name != GENERIC or plan.assignment is not None or not isinstance(plan.job.model, TransformerConfig):
        return None
    facts, names = facts_of_plan(plan, setting.cluster), []
    for name, table in load_tables().items():
        if not table.outputs or not_runnable_reason(plan, load_profile(table.profile)):
            continue
        try:
            names_of(table.framework, table.let, table.cannot, {**facts, "framework": table.framework, "profile": table.profile})
        except InputError:
            continue
        names.append(name)
    return tuple(names)


def export_plan(plan: Plan | Name, *, to: str, stem: str = "plan", launcher: str = TORCHRUN) -> ExportedPlan:
    """Export a plan as a framework's configuration and launch script, with the predicted numbers behind each option in comments.

    Features that the framework cannot express raise InputError; differences are in `notes`. The files are read back: they give the same
    plan.

    to         torchtitan, torchtitan-python, megatron, megatron-bridge, nemo-automodel, trl, llama-factory, axolotl, ms-swift,
               swift-megatron, deepspeed, nanotron or maxtext
    stem       name of the files without their endings
    launcher   torchrun, slurm, skypilot or kubernetes
    """
    loaded = load_plan(plan)
    table = table_named(to)
    if loaded.assignment is not None or not isinstance(loaded.job.model, TransformerConfig):
        rule = "has a sharding for each operator, which no framework loads"
        raise bad_field("plan", loaded.job.model.name, rule, "export a plan of search")
    setting = setting_of_plan(loaded)
    exported = write_config(
        facts_of_plan(loaded, setting.cluster), table, prediction=predict_in(setting, loaded), stem=stem, launcher=launcher
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in exported.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        script = Path(folder) / exported.script
        asked = Request(cluster=loaded.cluster, chips=loaded.num_chips)
        try:
            again = start_from(script, asked).plan
        except InputError:
            again = start_from(script, replace(asked, model=loaded.job.model)).plan
    wanted, read_back = _compared(loaded), _compared(again)
    for name in wanted:
        if wanted[name] != read_back[name]:
            rule = f"cannot be written for {table.framework}, whose files would mean {one_line(read_back[name], 60)}"
            raise bad_field(name, one_line(wanted[name], 60), rule, f"change {name}, or export to another framework")
    notes = []
    lost = {name: value for name, value in loaded.framework.settings.items() if again.framework.settings.get(name) != value}
    if lost:
        named = ", ".join(f"{name}={str(value).lower()}" for name, value in lost.items())
        notes.append(f"{table.framework} has no option that is known here for the settings {named}")
    if loaded.framework.name != again.framework.name:
        notes.append(f"the plan assumes {loaded.framework.name}; a prediction of the files assumes {again.framework.name}")
    return replace(exported, notes=(*exported.notes, *notes))


def _compared(plan: Plan) -> dict[str, Any]:
    """Return the facts of a plan that its exported files must reproduce."""
    model = plan.job.transformer
    facts = plan_facts(plan) | {name: getattr(model, name) for name in _SIZES} | {"stage_layers": plan.stage_layers}
    if isinstance(plan.schedule, ScheduleTable):
        facts["schedule"] = plan.schedule.lines
    without = [*_NAMES, *(["schedule"] if plan.layout.pp == 1 else []), *(["dispatcher"] if plan.ep == 1 else [])]
    return {name: value for name, value in facts.items() if name not in without}


def write_export(exported: ExportedPlan, folder: Path) -> list[Path]:
    """Write the files of an export, all of them or none."""
    files = {folder / name: text for name, text in exported.files.items()}
    for path in files:
        check_can_be_written(path, "out")
    for path, text in files.items():
        write_atomically(path, text)
    return list(files)


# --- serving plans -----------------------------------------------------------------------------------------------------

#: Size of the volume, relative to the checkpoint.
_SPACE_FOR_CHECKPOINT = 1.1


def is_service(path: object) -> bool:
    """Return whether a path is a serving plan, or a prediction written by `serve --json`."""
    if not isinstance(path, (str, Path)):
        return False
    return is_serving_plan(path) or (Path(path).suffix == ".json" and "launch" in _content(path))


def _content(path: Name) -> Mapping[str, Any]:
    """Return the mapping of a JSON file; empty if it has none."""
    try:
        content = json.loads(read_text(path, "JSON file"))
    except (ValueError, RecursionError):  # also of a file that cannot be read
        return {}
    return content if isinstance(content, dict) else {}


def export_service(prediction: ServingPrediction | Name, *, to: str, stem: str = "serve") -> ExportedPlan:
    """Export a serving plan as launch scripts or as a manifest, with the predicted numbers in comments.

    Options that the target cannot express raise InputError.

    prediction   of `serve`, or a file that `serve --save`, `serve --json` or `serve --search --json` wrote
    to           vllm, sglang or tensorrt-llm; llm-d, dynamo or kserve
    stem         name of the files without their endings
    """
    from perfmodel.report.serving import serving_object
    from perfmodel.verbs.serving_predict import serve_plan, service_of
    from perfmodel.verbs.serving_setting import serving_layout, serving_setting

    if not isinstance(prediction, ServingPrediction) and is_serving_plan(prediction):
        prediction = serve_plan(prediction)
    if isinstance(prediction, ServingPrediction):
        saved, plan = _figures(serving_object(prediction)), prediction.plan
        setting = serving_setting(service_of(plan))
    else:
        saved = _prediction_in(prediction)
        service = _saved_service(saved["plan"])
        setting = serving_setting(service)
        plan = setting.estimator.plan(setting.job, serving_layout(setting, service.knobs)[0])
    engine, cluster, job = setting.estimator.engine, setting.estimator.cluster, setting.job
    family = family_of(engine)
    launcher = launcher_named(to, family)
    if not saved["fits"]:
        raise InputError(f"plan: {plan.label()} does not fit into the memory of {cluster.chip.name}; `perfmodel serve` lists what would")
    model, node = hub_id_of(job.model.name), cluster.chips_per_node
    lines = launch_lines(plan, engine, model=model, chips_per_node=plan.num_chips if launcher.joins_nodes else node)
    pools = plan.layout
    kinds = (("", pools),) if isinstance(pools, ServingLayout) else (("prefill", pools.prefill), ("decode", pools.decode))
    ttft, tpot = (format_time(saved[name]["mean"]) for name in ("ttft", "tpot"))
    header = [
        f"{to}, written by perfmodel: {job.model.name} on {plan.num_chips} chips of {saved['plan']['cluster']}, {plan.label()}",
        f"predicted for {engine.name} {engine.version}: TTFT {ttft}, TPOT {tpot}, "
        f"{saved['tokens_per_second_per_chip']:,.0f} output tokens/s a chip, "
        f"{format_bytes(saved['memory']['total'])} of {format_bytes(saved['memory_usable'])} on each chip",
    ]
    # the exported files contain all copies of a worker: no note on a router
    plan_notes = dict.fromkeys(note for line in lines for note in line.notes if not note.endswith("behind a router"))
    checkpoint = job.model.num_parameters * max(job.quantization.weight_bytes, 1.0)
    files, notes = launch_files(
        launcher,
        [_worker(line, one, role, model, node) for line, (role, one) in zip(lines, kinds, strict=True)],
        header=header,
        names={
            "stem": stem,
            "engine": family,
            "model_id": model,
            "vendor": cluster.chip.vendor,
            "chip": cluster.chip.name,
            "checkpoint_gib": math.ceil(_SPACE_FOR_CHECKPOINT * checkpoint / 2**30),
        },
    )
    return ExportedPlan(framework=to, files=files, options={}, notes=(*plan_notes, *notes))


def _prediction_in(path: Name) -> Mapping[str, Any]:
    """Return the prediction in a file of `serve`; of a search, the best one."""
    content = _content(path)
    saved = content.get("best", content)
    try:
        _saved_service(saved["plan"])
        return _figures(saved)
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{one_line(path, 200)}: has no serving plan; write one with `perfmodel serve ... --json`") from None


def _figures(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: saved[name] for name in ("plan", "fits", "ttft", "tpot", "tokens_per_second_per_chip", "memory", "memory_usable")}


def _saved_service(plan: Mapping[str, Any]) -> Service:
    """Return the service that reproduces a saved plan."""
    limits = plan["pools"]["decode"] if plan.get("pools") else plan
    stored = {name: plan[name] for name in words_of(Service) if name in plan}
    lengths = {name: ":".join(map(str, plan[name])) for name in ("input_len", "output_len")}
    most = {name: limits[name] or None for name in ("max_batch", "max_tokens")}
    return Service().having(stored | lengths | most | {"chips": plan["num_chips"]})


def _worker(line: LaunchLine, layout: ServingLayout, role: str, model: str, chips_per_node: int) -> Mapping[str, Any]:
    """Return the facts of one kind of worker. options: of its command, after the model."""
    words = shlex.split(line.command)
    options, chips = words[words.index(model) + 1 :], layout.chips_per_replica
    return {
        **{name: getattr(layout, name) for name in DEGREES},
        "role": role,
        "replicas": line.copies,
        "chips": chips,
        "nodes": -(-chips // chips_per_node),
        "chips_of_node": min(chips, chips_per_node),
        "command": line.command,
        "arguments": (),
        "options": options,
        "quoted": shlex.join(options),
        "configs": {line.config_name: line.config} if line.config else {},
        "notes": line.notes,
    }
