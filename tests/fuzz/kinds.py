"""One function for each kind of input: it makes one at random, tries it, and says whether it was taken; raises what must not be."""

import contextlib
import dataclasses
import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import perfmodel
from perfmodel.cli import app as cli
from perfmodel.foundation.errors import PerfModelError
from perfmodel.foundation.files import dump_yaml, parse_yaml, read_yaml
from perfmodel.foundation.resources import resource_dir
from perfmodel.foundation.units import QuantityKind, parse_quantity
from perfmodel.frameworks.profile import list_profiles, load_profile, profile_from_dict
from perfmodel.frameworks.shipped import shipped_fields
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.reader import (
    calibrations_for,
    cluster_of,
    list_calibrations,
    list_chips,
    list_clusters,
    load_calibration,
    load_chip,
    load_cluster,
    parse_chip,
    parse_cluster,
)  # fmt: skip
from perfmodel.parallel.algebra.rules import list_rule_sets, load_rule_set, rule_set_from_dict
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import plan_to_dict
from perfmodel.parallel.plan_file import list_plans, plan_from_dict, read_plan
from perfmodel.uncertainty.residuals import load_residuals
from perfmodel.uncertainty.sensitivity import sensitivities
from perfmodel.validation.cases import parse_case
from perfmodel.validation.validate import CasePredictor
from perfmodel.verbs.networks import predict_network_plan, shard_network
from perfmodel.verbs.setting import Setting, make_job, make_setting, plan_in, predict_in, setting_of_plan
from perfmodel.workload.models import list_models, load_model, read_config
from tests.fuzz.checks import check_json, check_prediction, check_refusal, check_step, require
from tests.fuzz.topologies import random_cluster
from tests.fuzz.values import ODD, mutate, odd, scramble

#: Share of what is accepted that is predicted too, which takes a hundred times as long as reading.
PREDICTED = 0.2
_MODELS = Path(perfmodel.__file__).parent / "workload" / "models"


def _refused(action: Callable[[], Any], *, needs_remedy: bool = False) -> Any:
    """Return the result of `action`; None where it refuses in a good sentence."""
    try:
        return action()
    except PerfModelError as error:
        check_refusal(error, needs_remedy=needs_remedy)
        return None


def _predicted(setting: Setting, rng: random.Random) -> bool:
    """A random plan of the setting, or the plain one where that is refused."""
    plan = _refused(lambda: plan_in(setting, _knobs(rng, setting.cluster.num_chips))) or _refused(lambda: plan_in(setting, Knobs()))
    if plan is not None:
        check_prediction(predict_in(setting, plan))
        if rng.random() < 0.1:
            for sensitivity in sensitivities(setting.estimator, plan):
                require(abs(sensitivity.change) < 10, f"sensitivity {sensitivity}")
    return plan is not None


def _knobs(rng: random.Random, chips: int) -> Knobs:
    def part(of: int) -> int:
        return rng.choice([d for d in (1, 2, 3, 4, 8, 16, 32) if of % d == 0])

    tp = part(chips)
    pp = part(chips // tp)
    cp = part(chips // (tp * pp)) if rng.random() < 0.4 else 1
    return Knobs(
        tp=tp,
        pp=pp,
        cp=cp,
        zero=rng.choice((None, 0, 1, 2, 3)),
        micro_batch=rng.choice((1, 1, 2, 4)),
        virtual_stages=rng.choice((None, None, 2, 3)) if pp > 1 else None,
        schedule=rng.choice((None, "gpipe", "1f1b")) if pp > 1 else None,
        recompute=rng.choice(("none", "selective", "full")),
        sequence_parallel=rng.choice((None, True, False)) if tp > 1 else None,
        attention=rng.choice((None, "flash", "unfused")),
        order=rng.sample(DEFAULT_ORDER, len(DEFAULT_ORDER)) if rng.random() < 0.2 else None,
    )


def _job(rng: random.Random, model: Any = "gpt2", chips: int = 8) -> Any:
    return make_job(
        model,
        global_batch=chips * rng.choice((1, 4, 8, 48)),
        seq_len=rng.choice((1, 128, 1024, 1024, 4096)),
        precision=rng.choice(("bf16-mixed", "bf16-mixed", "fp16-mixed", "bf16", "fp32")),
        optimizer=rng.choice(("sgd", "momentum", "adam", "adamw")),
        train=rng.choice(("full", "full", "full", "lora:8", "qlora:1", "lora:16:q_proj+up_proj")),
    )


@cache
def _cluster(name: str, chips: int) -> Cluster:
    return load_cluster(name, num_chips=chips)


@cache
def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@cache
def _yaml(path: Path) -> dict[str, Any]:
    return read_yaml(path)


def _shipped(rng: random.Random, folder: str) -> dict[str, Any]:
    return _yaml(rng.choice(sorted(resource_dir("hardware_specs").joinpath(folder).glob("*.yaml"))))


def configs(rng: random.Random, folder: Path) -> bool:
    """A model's config.json, broken as data or as text."""
    data = _json(_MODELS / f"{rng.choice(list_models())}.json")
    if rng.random() < 0.2:
        path = folder / "config.json"
        path.write_text(scramble(rng, json.dumps(data)), encoding="utf-8", errors="surrogatepass")
        model = _refused(lambda: load_model(path))
    else:
        broken = mutate(rng, data)
        model = _refused(lambda: read_config(broken))
    if model is not None and rng.random() < PREDICTED:
        chips = rng.choice((1, 8, 16, 64))
        job = _refused(lambda: _job(rng, model, chips))
        if job is not None:
            _predicted(make_setting(job, _cluster("dgx-h100", chips)), rng)
    return model is not None


def hardware(rng: random.Random, folder: Path) -> bool:
    """A chip, a cluster or a calibration, broken as data or as text."""
    what = rng.choice(("chips", "clusters", "calibrations"))
    data = mutate(rng, _shipped(rng, what))
    text = _refused(lambda: dump_yaml(data))
    if text is None:
        return False
    text = text if rng.random() < 0.8 else scramble(rng, text)
    if what == "calibrations":
        path = folder / "calibration.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        spec = _refused(lambda: load_calibration(path), needs_remedy=True)
    else:
        spec = _refused(lambda: (parse_chip if what == "chips" else parse_cluster)(text), needs_remedy=True)
    if spec is None or rng.random() > PREDICTED:
        return spec is not None
    match what:
        case "chips":
            cluster = _refused(lambda: cluster_of_chip(spec))
        case "clusters":
            cluster = spec
        case _:
            cluster = _cluster("dgx-h100", rng.choice((1, 8, 16)))
    if cluster is not None:
        calibration = spec if what == "calibrations" else None
        setting = _refused(lambda: make_setting(_job(rng, chips=min(cluster.num_chips, 2**20)), cluster, calibration=calibration))
        if setting is not None:
            _predicted(setting, rng)
    return True


def cluster_of_chip(chip: Any) -> Cluster:
    from perfmodel.hardware.cluster import make_cluster

    return make_cluster(chip, num_chips=chip.node.chips_per_node)


def topologies(rng: random.Random, folder: Path) -> bool:
    """A cluster whose tiers nest, of any topology, always predicted."""
    chip = rng.choice(list_chips())
    cluster = _refused(lambda: parse_cluster(json.dumps(random_cluster(rng, chip))))
    if cluster is None:
        return False
    profile = rng.choice((None, None, *list_profiles()))
    setting = _refused(lambda: make_setting(_job(rng, rng.choice(("gpt2", "llama-3-8b")), cluster.num_chips), cluster, profile=profile))
    return setting is not None and _predicted(setting, rng)


@cache
def _network_plan() -> dict[str, Any]:
    return plan_to_dict(shard_network("alexnet", cluster="dgx-h100", chips=4, batch=64).best.plan)


def plans(rng: random.Random, folder: Path) -> bool:
    """A plan file: of a model or of a network, as data or as text."""
    if rng.random() < 0.15:
        broken = mutate(rng, _network_plan())
        plan = _refused(lambda: plan_from_dict(broken))
        if plan is not None and rng.random() < PREDICTED:
            prediction = _refused(lambda: predict_network_plan(plan))
            if prediction is not None:
                check_prediction(prediction)
        return plan is not None
    data = _json_of(plan_to_dict(read_plan(rng.choice(list_plans())))) if rng.random() < 0.5 else _random_plan(rng)
    broken = mutate(rng, data, most=2)
    if rng.random() < 0.2:
        path = folder / "plan.yaml"
        path.write_text(scramble(rng, _refused(lambda: dump_yaml(broken)) or "x"), encoding="utf-8", errors="surrogatepass")
        plan = _refused(lambda: read_plan(path))
    else:
        plan = _refused(lambda: plan_from_dict(broken))
    if plan is not None and rng.random() < PREDICTED:
        setting = _refused(lambda: setting_of_plan(plan))
        if setting is not None:
            prediction = _refused(lambda: predict_in(setting, plan))
            if prediction is not None:
                check_prediction(prediction)
    return plan is not None


def _json_of(data: Any) -> Any:
    return json.loads(json.dumps(data))


def _random_plan(rng: random.Random) -> dict[str, Any]:
    chips = rng.choice((1, 2, 8, 16, 64))
    setting = _setting("llama-3-8b", chips)
    for _ in range(10):
        plan = _refused(lambda: plan_in(setting, _knobs(rng, chips)))
        if plan is not None:
            return _json_of(plan_to_dict(plan))
    return _json_of(plan_to_dict(plan_in(setting, Knobs())))


@cache
def _setting(model: str, chips: int) -> Setting:
    return make_setting(make_job(model, global_batch=8 * chips, seq_len=1024), _cluster("dgx-h100", chips))


def profiles(rng: random.Random, folder: Path) -> bool:
    """A profile, a rule set or the residuals."""
    strategies = resource_dir("strategies")
    what = rng.choice(("profiles", "profiles", "profiles", "rules", "residuals"))
    if what == "residuals":
        path = folder / f"residuals-{rng.random()}.yaml"
        path.write_text(
            scramble(rng, (strategies / "residuals.yaml").read_text(encoding="utf-8")[: rng.choice((2000, 10**6))]), encoding="utf-8"
        )
        residuals = _refused(lambda: load_residuals(path))
        path.unlink()
        return residuals is not None
    names = list_profiles() if what == "profiles" else list_rule_sets()
    chosen = rng.choice(names)
    if what == "rules":
        broken = mutate(rng, _yaml(strategies / what / f"{chosen}.yaml"))
        return _refused(lambda: rule_set_from_dict(broken)) is not None
    broken = mutate(rng, shipped_fields(chosen))
    profile = _refused(lambda: profile_from_dict(broken))
    if profile is not None and rng.random() < PREDICTED:
        chips = rng.choice((1, 8, 16))
        setting = _refused(lambda: make_setting(_job(rng, chips=chips), _cluster("dgx-h100", chips), profile=profile))
        if setting is not None:
            _predicted(setting, rng)
    return profile is not None


@cache
def _cases() -> tuple[dict[str, Any], ...]:
    import gzip

    with gzip.open(Path(__file__).parents[1] / "golden" / "published_training.jsonl.gz", "rt", encoding="utf-8") as stream:
        return tuple(json.loads(line) for line in stream)


def cases(rng: random.Random, folder: Path) -> bool:
    """A line of published runs, broken as data or as text, predicted where its fields allow."""
    data = mutate(rng, rng.choice(_cases()), most=2)
    line = json.dumps(data) if rng.random() < 0.9 else scramble(rng, json.dumps(data))
    row = CasePredictor(has_intervals=False).row(parse_case(line.encode(errors="surrogatepass"), 1))
    require("please report" not in row.reason, row.reason)
    require(row.reason.isprintable() and row.id != "", f"reason {row.reason!r}, id {row.id!r}")
    if not row.reason:
        require(row.predicted_step_time > 0 and row.predicted["memory"] > 0, f"{row.predicted}")
    return not row.reason


_FLAGS: dict[str, tuple[str, ...]] = {
    "--model": ("gpt2", "llama-3-8b", "no-such", "/dev/zero"),
    "--cluster": ("dgx-h100", "dgx-a100", "gb200-nvl72", "localhost", "no-such.yaml"),
    "--chips": ("1", "8", "16", "8,16", "7"),
    "--global-batch": ("8", "64", "0"),
    "--seq-len": ("128", "1024", "1000"),
    "--tp": ("1", "2", "8"),
    "--pp": ("1", "2", "4"),
    "--cp": ("1", "2"),
    "--dp-replicate": ("1", "2"),
    "--dp-shard": ("1", "8"),
    "--zero": ("0", "1", "3"),
    "--micro-batch": ("1", "2"),
    "--virtual-stages": ("1", "2"),
    "--schedule": ("gpipe", "1f1b", "interleaved"),
    "--recompute": ("none", "selective", "full"),
    "--precision": ("fp32", "bf16-mixed"),
    "--optimizer": ("sgd", "adamw"),
    "--train": ("full", "lora:8", "qlora:4:q_proj", "dora:4", "galore:2"),
    "--attention": ("flash", "unfused"),
    "--profile": ("megatron", "torchtitan"),
    "--calibration": ("spec-sheet", "prior", "h100"),
    "--memory-headroom": ("10%", "0.1", "0"),
    "--tokens": ("15T", "1e12"),
    "--order": ("tp-cp-dp_shard-dp_replicate-pp", "pp,tp,cp,dp-shard,dp-replicate"),
}
_JOB_FLAGS = ("--model", "--cluster", "--chips", "--global-batch", "--seq-len")


def options(rng: random.Random, folder: Path) -> bool:
    """Check a command line of a verb that predicts or lists known names."""
    verb = rng.choice(
        ("predict",) * 8
        + ("search", "explain", "compare", "chips", "clusters", "models", "profiles", "calibrations", "shard", "limits", "no")
    )
    words = [verb]
    if verb in ("predict", "search", "limits"):
        others = [flag for flag in _FLAGS if flag not in _JOB_FLAGS]
        flags = [*_JOB_FLAGS, *rng.sample(others, rng.randint(0, 4))]
        for flag in flags:
            if rng.random() < 0.97:
                words += [flag, _text(rng, _FLAGS[flag][:2] if flag in _JOB_FLAGS and rng.random() < 0.8 else _FLAGS[flag])]
        if verb == "search" and rng.random() < 0.4:
            words += ["--risk", _text(rng, ("5%", "0.2", "0", "1e-9"))]
    elif verb in ("explain", "compare"):
        words += [_text(rng, ("fsdp", "ddp", "megatron-22b", "none.yaml")) for _ in range(rng.randint(0, 2))]
        if verb == "explain" and rng.random() < 0.5:
            words += ["--why-not", _text(rng, ("tp=16", "tp=2,pp=2", "zero=9", "x=1"))]
        if verb == "explain" and rng.random() < 0.3:
            words += ["--trust"]
    elif verb == "shard":
        words += [
            "alexnet",
            "--cluster",
            "dgx-h100",
            "--chips",
            _text(rng, ("2", "1")),
            "--size",
            _text(rng, ("image=3", "batch=2", "layers=2")),
        ]
    else:
        words += [_text(rng, (*list_chips()[:3], *list_clusters()[:3], "gpt2", "megatron", *list_calibrations()[:2]))]
    if rng.random() < 0.5:
        words.append("--json")
    if any("\0" in word for word in words):  # no shell hands one on
        return False
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(words)
    errors, shown = err.getvalue(), out.getvalue()
    require(code in (0, 2), f"exit code {code} of {words}: {errors[:300]}")
    if code == 2:
        lines = [line for line in errors.splitlines() if line]
        is_table = verb == "search" and not errors.startswith("perfmodel: ")
        start = '{"code": ' if "--json" in words else "perfmodel: "
        require(is_table or (lines[-1].startswith(start) and lines[-1].isprintable()), f"{words}: {errors[:300]!r}")
        return False
    require("nan" not in shown.lower().split(), f"nan in the output of {words}")
    if "--json" in words:
        document = check_json(shown)
        for prediction in document.get("predictions", [document] if "step_time" in document else []):
            if "step_time" in prediction:
                shares = {name: prediction[name] for name in ("mfu_causal", "hfu")}
                check_step(
                    prediction["step_time"], prediction["parts"], prediction["memory"], shares, prediction["tokens_per_second_per_chip"]
                )
    return True


def _text(rng: random.Random, usual: tuple[str, ...]) -> str:
    value = (
        rng.choice(usual)
        if rng.random() < 0.93
        else odd(rng, rng.choice(usual), tuple(option for option in ODD if isinstance(option, (str, int, float))))
    )
    try:
        return str(value)
    except ValueError:
        return "9" * 5000


_VALUES: dict[str, tuple[Any, ...]] = {
    "chips": (8, 16), "global_batch": (64,), "seq_len": (128, 1024), "model": ("gpt2",), "cluster": ("dgx-h100",), "tp": (1, 2), "pp":
    (1, 2), "cp": (1, 2), "dp_replicate": (1,), "dp_shard": (1, 2), "zero": (0, 3), "micro_batch": (1, 2), "virtual_stages": (1,),
    "schedule": ("1f1b",), "recompute": ("none", "full"), "sequence_parallel": (True, False), "order": (list(DEFAULT_ORDER),),
    "attention": ("flash",), "precision": ("fp32",), "optimizer": ("sgd",), "train": ("lora:4",), "profile": ("megatron",),
    "calibration": ("h100",), "memory_headroom": (0.1, "10%"),
}  # fmt: skip
_JOB_NAMES = ("model", "cluster", "chips", "global_batch", "seq_len")


def arguments(rng: random.Random, folder: Path) -> bool:
    """A function of the Python interface, called with values of any type."""
    knobs = rng.sample([name for name in _VALUES if name not in _JOB_NAMES], rng.randint(0, 3))
    given = {name: rng.choice(_VALUES[name]) for name in (*_JOB_NAMES, *knobs)}
    for name in rng.sample(list(given), rng.choice((0, 1, 1, 2))):
        given[name] = odd(rng, given[name], ODD)
    anything = odd(rng, rng.choice(("fsdp", "h100", 8)), ODD)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: perfmodel.predict(**given),
        lambda: perfmodel.predict(**given),
        lambda: perfmodel.predict(**given),
        lambda: perfmodel.find_plans(**given | {"top": odd(rng, 5, ODD)}) if rng.random() < 0.2 else None,
        lambda: perfmodel.find_plans(**given | {"risk": odd(rng, 0.05, ODD)}) if rng.random() < 0.2 else None,
        lambda: (
            perfmodel.find_plans(**given | {"maximum": {rng.choice(("tp", "pp", "x", "recompute")): anything}})
            if rng.random() < 0.2
            else None
        ),
        lambda: perfmodel.explain_plan("fsdp", why_not={rng.choice(("tp", "recompute", "x")): anything}) if rng.random() < 0.2 else None,
        lambda: perfmodel.explain_plan(anything),
        lambda: perfmodel.compare_plans([anything, "fsdp"]) if rng.random() < 0.2 else perfmodel.compare_plans(anything),
        lambda: load_model(anything),
        lambda: load_cluster(anything, num_chips=odd(rng, 8, ODD)),
        lambda: load_cluster("dgx-h100", num_chips=anything),
        lambda: load_chip(anything),
        lambda: load_calibration(anything),
        lambda: load_profile(anything),
        lambda: load_rule_set(anything),
        lambda: read_plan(anything),
        lambda: calibrations_for(anything),
        lambda: cluster_of("h100-sxm-80gb", odd(rng, 8, ODD), odd(rng, 16, ODD)),
        lambda: cluster_of("h100-sxm-80gb", 8, 16, odd(rng, 5e10, ODD)),
        lambda: parse_quantity(anything, rng.choice(list(QuantityKind))),
        lambda: parse_yaml(str(anything)[:5000], where="x") if not isinstance(anything, int) else None,
        lambda: read_config(anything) if isinstance(anything, (dict, str)) else None,
        lambda: plan_from_dict(anything),
        lambda: profile_from_dict(anything),
        lambda: rule_set_from_dict(anything),
    )
    result = _refused(rng.choice(calls))
    for item in result if isinstance(result, tuple) else (result,):
        if dataclasses.is_dataclass(item) and hasattr(item, "step_time") and hasattr(item, "memory_moment"):
            check_prediction(item)
    return result is not None


KINDS: dict[str, Callable[[random.Random, Path], bool]] = {
    "configs": configs,
    "hardware": hardware,
    "topologies": topologies,
    "plans": plans,
    "profiles": profiles,
    "cases": cases,
    "options": options,
    "arguments": arguments,
}
#: Of a hundred inputs, how many are of each kind: the quick ones more often.
SHARES = {"configs": 18, "hardware": 18, "topologies": 4, "plans": 16, "profiles": 12, "cases": 12, "options": 5, "arguments": 15}
