"""`export`: a plan as the configuration files of a framework, checked by reading them back."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.configs.launch import TORCHRUN
from perfmodel.configs.tables import FrameworkTable, table_named
from perfmodel.configs.write import ExportedPlan, facts_of_plan, write_config
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.parallel.plan import Plan, plan_facts
from perfmodel.parallel.request import Request
from perfmodel.verbs.configs import start_from
from perfmodel.verbs.setting import Name, load_plan, predict_in, setting_of_plan
from perfmodel.workload.config import TransformerConfig

#: Facts that may differ when a plan is read back: names, and facts that belong to the profile.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_NAMES = ("model", "cluster", "profile", "settings", "calibration", "rules", "rule_set")


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
    return replace(exported, notes=(*exported.notes, *_checked(exported, loaded, table)))


def _checked(exported: ExportedPlan, plan: Plan, table: FrameworkTable) -> list[str]:
    """Read the files back: raise InputError if the plan differs, and return notes on settings without an option of the framework."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in exported.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        script = Path(folder) / exported.script
        asked = Request(cluster=plan.cluster, chips=plan.num_chips)
        try:
            again = start_from(script, asked).plan
        except InputError:
            again = start_from(script, replace(asked, model=plan.job.model)).plan
    wanted, read_back = _compared(plan), _compared(again)
    for name in wanted:
        if wanted[name] != read_back[name]:
            rule = f"cannot be written for {table.framework}, whose files would mean {one_line(read_back[name], 60)}"
            raise bad_field(name, one_line(wanted[name], 60), rule, f"change {name}, or export to another framework")
    notes = []
    lost = {name: value for name, value in plan.framework.settings.items() if again.framework.settings.get(name) != value}
    if lost:
        named = ", ".join(f"{name}={str(value).lower()}" for name, value in lost.items())
        notes.append(f"{table.framework} has no option that is known here for the settings {named}")
    if plan.framework.name != again.framework.name:
        notes.append(f"the plan assumes {plan.framework.name}; a prediction of the files assumes {again.framework.name}")
    return notes


def _compared(plan: Plan) -> dict[str, Any]:
    """Return the facts of a plan that its exported files must reproduce."""
    model = plan.job.transformer
    facts = plan_facts(plan) | {name: getattr(model, name) for name in _SIZES} | {"stage_layers": plan.stage_layers}
    without = [*_NAMES, *(["schedule"] if plan.layout.pp == 1 else []), *(["dispatcher"] if plan.ep == 1 else [])]
    return {name: value for name, value in facts.items() if name not in without}


def write_export(exported: ExportedPlan, folder: Path) -> list[Path]:
    """Write the files of an export, all of them or none."""
    paths = [folder / name for name in exported.files]
    for path in paths:
        check_can_be_written(path, "out")
    for path, text in zip(paths, exported.files.values(), strict=True):
        write_atomically(path, text)
    return paths
