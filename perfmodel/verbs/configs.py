"""Configurations of frameworks as plans: what `predict CONFIG` and the other verbs start from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.values import several
from perfmodel.foundation.words import words_of
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.request import Request
from perfmodel.verbs.requests import make_requests, needs_chips
from perfmodel.verbs.setting import Name, load_plan, make_job, make_setting, placed, plan_in, setting_of_plan
from perfmodel.workload.job import Optimizer, Precision
from perfmodel.workload.routing import BALANCED, routing_of

if TYPE_CHECKING:
    from perfmodel.configs.read import ConfigSetup
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.parallel.serving.request import ServingRequest

#: Words that a verb takes where a configuration does not have them.
_ASKED = ("model", "chips", "nodes", "global_batch", "batch_tokens", "seq_len")
_CONFIGS = (".toml", ".json", ".py", ".sh", ".txt", ".sbatch", ".slurm", ".bash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The plan that a verb starts from. setup: of a configuration, how it was read; None of a plan file"""

    plan: Plan
    setup: ConfigSetup | None = None

    def notes(self, *, verbose: bool = False) -> list[str]:
        from perfmodel.configs.read import described

        return [] if self.setup is None else list(described(self.setup, verbose=verbose))

    def object(self) -> dict[str, Any]:
        """How the configuration was read, as `--json` has it."""
        setup = self.setup
        if setup is None:
            return {}
        return {
            "config": {
                "framework": setup.framework,
                "files": [str(path) for path in setup.files],
                "read": dict(setup.read),
                "assumed": {name: getattr(value, "name", value) for name, value in setup.assumed.items()},
                "notes": list(setup.notes),
                "ignored": list(setup.ignored),
            }
        }


_PLAN_KEYS = ("schema_version", "layout", "job", "rule_set")
_PLAN_KEY = re.compile(rf"^(?:{'|'.join(_PLAN_KEYS)}):", re.MULTILINE)


def is_config(path: Plan | Name) -> bool:
    """Whether a path is that of a framework's configuration, and not of a plan file or the name of a plan."""
    if not isinstance(path, (str, Path)):
        return False
    file = Path(str(path).rpartition(":")[0] if ".py:" in str(path) else path)
    try:
        if not file.is_file():
            return file.suffix in _CONFIGS
    except (OSError, ValueError):
        return False
    if file.suffix not in (".yaml", ".yml", ".json"):
        return file.suffix in _CONFIGS
    from perfmodel.foundation.files import read_text, read_yaml

    try:
        # a key at the start of a line is one of the top level: most plan files need not be parsed twice
        if file.suffix != ".json" and _PLAN_KEY.search(read_text(file, "plan")):
            return False
        return not set(_PLAN_KEYS) & set(read_yaml(file))
    except InputError:  # the reader of each kind says what is wrong
        return file.suffix == ".json"


def start_from(path: Plan | Name, asked: Request, *, spelled: Callable[[str], str] = str) -> Start:
    """Return the plan of a plan file, or of a framework's configuration and of what was asked.

    asked     values of the verb: they fill in what the configuration does not say, the first of several
    spelled   how a field is written where the values come from
    """
    if not is_config(path):
        return Start(plan=load_plan(path))
    from perfmodel.configs.read import read_setup

    given = {name: _first(getattr(asked, name)) for name in _ASKED}
    cluster = _first(asked.cluster)
    facts = {name: _number(value) for name, value in given.items() if value is not None and name != "batch_tokens"}
    if cluster is not None:
        found = _cluster_of(cluster)
        facts["cluster_chips_per_node"] = found.chips_per_node
        if not needs_chips(cluster):
            facts["cluster_chips"] = found.num_chips
    setup = read_setup(str(path), facts)
    if setup.serves:
        raise InputError(f"{one_line(path, 200)}: starts a {setup.framework} server; give it to `perfmodel serve`")
    profile = _first(asked.profile)
    try:
        return Start(plan=_plan_of(setup, cluster, given, profile, spelled), setup=setup)
    except InputError as error:
        raise InputError(f"{one_line(Path(str(path)).name, 60)} ({setup.framework}): {error.full}") from None


def overridden_plan(plan: Plan, asked: Request, *, spelled: Callable[[str], str] = str) -> Plan:
    """Return the plan with the job, the place, the framework, its settings and the calibration that were asked for in place of its own."""
    if all(getattr(asked, name) in (None, []) for name in (*_ASKED, "cluster")):
        if not (asked.profile or asked.stated() or asked.calibration):
            return plan
        return placed(plan, setting_of_plan(plan, profile=asked.profile, settings=asked.stated(), calibration=asked.calibration))
    from perfmodel.verbs.requests import predict_requests

    answers, _ = predict_requests(make_requests(asked, of_plan=True, spelled=spelled)[:1], (Knobs(),), plan=plan)
    return answers[0].prediction.plan


def job_words(plan: Plan, asked: Request) -> Request:
    """Return the request with the plan's job and place where it says nothing."""
    job = plan.job
    own = {
        "model": job.model,
        "cluster": plan.cluster,
        "chips": plan.num_chips,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "train": job.train,
        "profile": plan.framework.name,
    }
    found = replace(asked, **{name: value for name, value in own.items() if getattr(asked, name) in (None, [], "")})
    return replace(found, settings={**plan.framework.settings, **asked.stated()})


def served_from(path: Name, asked: ServingRequest) -> tuple[ServingRequest, ConfigSetup]:
    """Return the request with what the launch line of a serving engine says where the request says nothing, and how it was read."""
    from perfmodel.configs.read import read_setup

    setup = read_setup(str(path))
    if not setup.serves:
        raise InputError(f"{one_line(path, 200)}: is a {setup.framework} training configuration; give it to `perfmodel predict`")
    own = dict(setup.request)
    if own.get("model") is not None and asked.model is None:
        from perfmodel.workload.models import load_model

        model = load_model(own["model"])
        if model.experts is None:
            own.pop("ep", None)
    return replace(asked, **{name: value for name, value in own.items() if getattr(asked, name) is None}), setup


def _first(value: Any) -> Any:
    values = value if isinstance(value, (list, tuple)) else [value]
    values = [one for each in values for one in (several(each) if isinstance(each, str) and not Path(each).exists() else [each])]
    return values[0] if values else None


def _number(value: Any) -> Any:
    from perfmodel.foundation.values import read_integer

    try:
        return read_integer(value, "number")
    except InputError:
        return value


def _cluster_of(cluster: Name | Cluster) -> Cluster:
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.hardware.reader import load_cluster

    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def _plan_of(setup: ConfigSetup, cluster: Any, given: Mapping[str, Any], profile: Any, spelled: Callable[[str], str]) -> Plan:
    """The plan that a configuration describes; what it lacks is asked for by name."""
    own = dict(setup.request)
    for name in _ASKED:
        held = {"nodes": "chips", "batch_tokens": "global_batch"}.get(name, name)
        if given[name] is not None and held not in own:
            own[name] = given[name]
    words = {name: own[name] for name in words_of(Request) if name in own and name not in ("settings", "capacity_factor")}
    _check_complete(setup, {**words, **({} if cluster is None else {"cluster": cluster})}, spelled)
    request = make_requests(Request(**words, cluster=cluster), spelled=spelled)[0]
    settings = dict(own.get("settings", {}))
    batch = request.global_batch
    if request.batch_tokens is not None:
        batch = request.batch_tokens // request.seq_len
    job = make_job(
        request.model,
        global_batch=batch,
        seq_len=request.seq_len,
        precision=request.precision or Precision.BF16_MIXED,
        optimizer=request.optimizer or Optimizer.ADAMW,
        train=request.train or "full",
        routing=routing_of("balanced").with_capacity(own["capacity_factor"]) if own.get("capacity_factor") else BALANCED,
    )
    chips = request.chips if request.nodes is None else request.nodes * _cluster_of(request.cluster).chips_per_node
    setting = make_setting(job, request.cluster, chips=chips, profile=profile or request.profile, settings=settings)
    plan = plan_in(setting, Knobs(**_of_model(setup.knobs, job.model)))
    changes: dict[str, Any] = {}
    if setup.stage_layers and plan.layout.pp > 1:
        changes["stage_layers"] = setup.stage_layers
    if setup.facts.get("recompute_operators"):
        changes["recompute_operators"] = tuple(setup.facts["recompute_operators"])
    return replace(plan, **changes) if changes else plan


def _check_complete(setup: ConfigSetup, words: Mapping[str, Any], spelled: Callable[[str], str]) -> None:
    """Name the flags of what neither the configuration nor the request says."""
    either = {"chips": "nodes", "global_batch": "batch_tokens"}
    needed = [name for name, each in words_of(Request).items() if each.missing]
    absent = [name for name in needed if name not in words and either.get(name, name) not in words]
    if "cluster" in words and not needs_chips(words["cluster"]):
        absent = [name for name in absent if name != "chips"]
    if "chips" in absent and {"micro_batch", "accumulation"} <= setup.facts.keys():
        absent = [name for name in absent if name != "global_batch"]  # which follows from the chips
    if not absent:
        return
    sizes = {name.removeprefix("model.") for name in setup.facts if name.startswith("model.")}
    remedy = "add them as flags" if len(absent) > 1 else "add it as a flag"
    if "model" in absent and "hidden_size" in sizes and "vocab_size" not in sizes:
        remedy += "; the file gives sizes of a model but not its vocabulary"
    raise InputError(f"{', '.join(map(spelled, absent))}: missing in the file; {remedy}")


def _of_model(knobs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The knobs that a model has: those of experts only where it has some; degrees of one data rank stay open."""
    found = dict(knobs)
    if getattr(model, "experts", None) is None:
        for name in ("ep", "etp", "dispatcher"):
            found.pop(name, None)
    if found.get("tp", 1) == 1:
        found.pop("sequence_parallel", None)
    if found.get("pp", 1) == 1:
        for name in ("schedule", "virtual_stages"):
            found.pop(name, None)
    return found
