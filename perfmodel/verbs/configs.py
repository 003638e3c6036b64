"""Configurations of frameworks as plans: the input of `predict CONFIG` and other verbs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.files import read_text, read_yaml
from perfmodel.foundation.values import read_integer
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.choices import AttentionKernel
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan, plan_facts
from perfmodel.parallel.request import Request
from perfmodel.verbs.requests import (
    absent_fields,
    make_requests,
    names_in,
    needs_chips,
    predict_requests,
    setting_of_request,
    stated_settings,
)
from perfmodel.verbs.setting import Name, load_plan, placed, plan_in, setting_of_plan
from perfmodel.workload.models import is_model, load_model

if TYPE_CHECKING:
    from perfmodel.configs.read import ConfigSetup
    from perfmodel.parallel.request import Service

#: Fields that a verb accepts where a configuration lacks them.
_ASKED = ("model", "chips", "nodes", "global_batch", "batch_tokens", "seq_len")
_PLAN_KEYS = {"schema_version", "layout", "job", "rule_set"}
_CONFIGS = (".toml", ".json", ".py", ".sh", ".txt", ".sbatch", ".slurm", ".bash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Initial plan of a verb. setup: the parsed configuration; None for a plan file."""

    plan: Plan
    setup: ConfigSetup | None = None

    def notes(self, *, verbose: bool = False) -> list[str]:
        return [] if self.setup is None else list(self.setup.described(verbose=verbose))

    def object(self) -> dict[str, Any]:
        """Return the parsed configuration as `--json` prints it."""
        if (setup := self.setup) is None:
            return {}
        assumed = {name: getattr(value, "name", value) for name, value in setup.assumed.items()}
        names = {"files": setup.files, "read": setup.read, "assumed": assumed, "notes": setup.notes}
        return {"config": {"framework": setup.table.framework, **names, "ignored": [*setup.unknown, *setup.harmless]}}


def is_config(path: Plan | Name) -> bool:
    """Return whether a path is a framework's configuration, and not a plan file or the name of a plan."""
    if not isinstance(path, (str, Path)):
        return False
    file = Path(str(path).rpartition(":")[0] if ".py:" in str(path) else path)
    if not os.path.isfile(file) or file.suffix not in (".yaml", ".yml", ".json"):
        return file.suffix in _CONFIGS
    is_json = file.suffix == ".json"
    try:
        content = json.loads(read_text(file, "JSON file")) if is_json else read_yaml(file)
        return not _PLAN_KEYS & content.keys()
    except (InputError, ValueError, AttributeError, RecursionError):  # the reader of each kind reports the fault
        return is_json


def start_from(path: Plan | Name, asked: Request, *, spelled: Callable[[str], str] = str) -> Start:
    """Return the plan of a plan file, or of a framework's configuration and the request.

    asked     values of the verb: they supply missing fields of the configuration, the first of several
    spelled   spelling of a field in the caller's interface
    """
    if not is_config(path):
        return Start(plan=load_plan(path))
    from perfmodel.configs.read import read_setup

    given = {name: next(iter(names_in(getattr(asked, name))), None) for name in (*_ASKED, "cluster", "profile")}
    facts = {name: _number(given[name]) for name in _ASKED if given[name] is not None and name != "batch_tokens"}
    if (cluster := given["cluster"]) is not None:
        loaded = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        facts["cluster_chips_per_node"] = loaded.chips_per_node
        facts["has_bf16"] = "bf16" in loaded.chip.peak_flop_rate
        if not needs_chips(cluster):
            facts["cluster_chips"] = loaded.num_chips
    setup = read_setup(str(path), facts)
    if setup.table.serves:
        raise InputError(f"{one_line(path, 200)}: starts a {setup.table.framework} server; give it to `perfmodel serve`")
    try:
        words = dict(setup.request)
        for name, value in given.items():
            held = {"nodes": "chips", "batch_tokens": "global_batch"}.get(name, name)
            if value is not None and (name in ("cluster", "profile") or held not in setup.request):
                words[name] = value
        _check_complete(setup, words, spelled)
        request = make_requests(Request(**words), spelled=spelled)[0]
        if request.batch_tokens is not None:  # whole sequences: the rest is dropped
            request = replace(request, global_batch=request.batch_tokens // request.seq_len, batch_tokens=None)
        setting = setting_of_request(request)
        knobs = setup.knobs  # those of experts apply only with experts, and none of an axis of degree 1 does
        idle = [] if setting.job.transformer.parts.experts is not None else ["ep", "etp", "dispatcher"]
        idle += ["sequence_parallel"] if knobs.get("tp", 1) == 1 else []
        idle += ["schedule", "virtual_stages"] if knobs.get("pp", 1) == 1 else []
        plan = plan_in(setting, Knobs(**{name: value for name, value in knobs.items() if name not in idle}))
        if (stage_layers := setup.facts.get("stage_layers")) and plan.layout.pp > 1:
            plan = replace(plan, stage_layers=tuple(stage_layers))
        operators = setup.facts.get("recompute_operators")
        return Start(plan=replace(plan, recompute_operators=tuple(operators)) if operators else plan, setup=setup)
    except InputError as error:
        raise InputError(f"{one_line(Path(str(path)).name, 60)} ({setup.table.framework}): {error.full}") from None


def overridden_plan(plan: Plan, asked: Request, *, spelled: Callable[[str], str] = str) -> Plan:
    """Return the plan with the job, cluster, framework, settings and calibration of the request in place of its own."""
    if all(getattr(asked, name) in (None, []) for name in (*_ASKED, "cluster")):
        if not (asked.profile or stated_settings(asked) or asked.calibration):
            return plan
        return placed(plan, setting_of_plan(plan, profile=asked.profile, settings=stated_settings(asked), calibration=asked.calibration))
    answers, _ = predict_requests(make_requests(asked, of_plan=True, spelled=spelled)[:1], (Knobs(),), plan=plan)
    return answers[0].prediction.plan


def job_words(plan: Plan, asked: Request) -> Request:
    """Return the request with missing fields taken from the plan."""
    job_fields = plan_facts(plan) | {"model": plan.job.model}
    names = ("model", "cluster", "chips", "global_batch", "seq_len", "precision", "optimizer", "train", "profile")
    completed = replace(asked, **{name: job_fields[name] for name in names if getattr(asked, name) in (None, [], "")})
    return replace(completed, settings={**plan.framework.settings, **stated_settings(asked)})


def with_attention(knobs: Knobs, plan: Plan) -> Knobs:
    """Return the knobs of a search that starts from a plan: fused attention stays, where the profile's default would be unfused."""
    keeps = knobs.attention is None and plan.attention is AttentionKernel.FLASH
    return replace(knobs, attention=str(AttentionKernel.FLASH)) if keeps else knobs


def served_from(path: Name, service: Service, *, is_searched: bool = False) -> tuple[Service, ConfigSetup | None]:
    """Return the service with missing words taken from a serving plan, or from an engine's launch line, and the parsed launch line.

    is_searched   a search follows: of a plan only the job, the cluster and the engine are taken
    """
    from perfmodel.configs.read import read_setup
    from perfmodel.parallel.plan_file import is_serving_plan, read_serving_plan
    from perfmodel.verbs.overrides import with_plan

    if is_serving_plan(path):
        return with_plan(service, read_serving_plan(path), is_searched=is_searched), None

    if not is_config(path) and Path(path).is_file():
        raise InputError(f"{one_line(path, 200)}: is a plan of a training job; give it to `perfmodel predict`")
    if not Path(path).exists() and is_model(path):
        raise InputError(f"{one_line(path, 200)}: is a model; give it as --model {one_line(path, 200)}")
    setup = read_setup(str(path))
    if not setup.table.serves:
        raise InputError(f"{one_line(path, 200)}: is a {setup.table.framework} training configuration; give it to `perfmodel predict`")
    words = dict(setup.request)
    if words.get("model") is not None and service.request.model is None and load_model(words["model"]).parts.experts is None:
        words.pop("ep", None)
    return service.having({name: value for name, value in words.items() if name not in service.given()}), setup


def _number(value: object) -> Any:
    try:
        return read_integer(value, "number")
    except InputError:
        return value


def _check_complete(setup: ConfigSetup, words: Mapping[str, Any], spelled: Callable[[str], str]) -> None:
    """Raise InputError with the flags of fields that neither the configuration nor the request has."""
    absent = absent_fields({name: [value] for name, value in words.items()})
    if "chips" in absent and setup.facts.keys() >= {"micro_batch", "accumulation"}:
        absent.pop("global_batch", None)  # it follows from the chips
    if not absent:
        return
    sizes = {name.removeprefix("model.") for name in setup.facts if name.startswith("model.")}
    remedy = "add them as flags" if len(absent) > 1 else "add it as a flag"
    if "model" in absent and "hidden_size" in sizes and "vocab_size" not in sizes:
        remedy += "; the file gives sizes of a model but not its vocabulary"
    raise InputError(f"{', '.join(map(spelled, absent))}: missing in the file; {remedy}")
