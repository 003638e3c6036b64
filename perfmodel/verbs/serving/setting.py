"""Settings of `serve`: job, cluster, engine and the estimator of its plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import check_name, is_path
from perfmodel.foundation.words import words_of
from perfmodel.frameworks.engine_formats import format_on, require_format
from perfmodel.hardware.assumptions import load_assumptions, read_assumed
from perfmodel.hardware.cluster_text import chips_of, is_mixed, joined_pools
from perfmodel.parallel.serving.plan import cluster_text
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.verbs.requests import needs_chips
from perfmodel.verbs.setting import file_reference, find_cluster
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.imported.decoder import ARCHITECTURE, decoder_of, description_of
from perfmodel.workload.imported.graph import ImportedGraph
from perfmodel.workload.quantization import Quantization, published_format, quantization_named
from perfmodel.workload.serving import ServingJob, Speculation

if TYPE_CHECKING:
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import Engine
    from perfmodel.hardware.assumptions import Assumptions
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster

DEFAULT_ACCEPTANCE = 0.7
WIDENED = "fp8-weights"
"""Format of an 8-bit checkpoint on a chip without 8-bit units, under an engine whose formats are not known."""
MOST_CHIPS = 2**20
"""Limit of a service: with the usual number of sequences per chip, requests in flight are counted in 32 bits."""
#: Required fields, and their meaning.
NEEDED = {
    "model": "a name from `perfmodel models` or the path of a config.json",
    "cluster": "a name from `perfmodel clusters` or the path of a cluster file",
    "chips": "how many chips serve",
    "input_len": "the tokens of a prompt",
    "output_len": "the tokens of an answer",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingSetting:
    """A job on a cluster under an engine, with the estimator of its plans.

    price         of a chip, 0 if unknown   [USD/h]
    chip_watts    mean of the chips at full load; 0: unknown   [W]
    assumptions   constants of energy and carbon
    notes         notes for the user on how it was assembled
    """

    estimator: ServingEstimator
    job: ServingJob
    reference: str
    num_chips: int
    assumptions: Assumptions
    price: float = 0.0
    chip_watts: float = 0.0
    notes: tuple[str, ...] = ()


def serving_setting(asked: ServingRequest) -> ServingSetting:
    """Return the job, the cluster, the engine and their estimator. Raise InputError with all missing fields."""
    from perfmodel.cost.resolve import choose_calibration
    from perfmodel.cost.serving.estimate import ServingEstimator
    from perfmodel.frameworks.engine import DEFAULT_ENGINE, Engine, load_engine
    from perfmodel.hardware.calibration import Calibration, Provenance, typical_fractions

    asked = with_workers_chips(asked)
    absent = [f"{name}: is missing; give {meaning}" for name, meaning in NEEDED.items() if getattr(asked, name) is None]
    if absent:
        raise InputError("; ".join(absent))
    given = read_given(asked, "chips", "input_len", "output_len", "concurrency", "rate", "prefix_hit", "quantization", "acceptance")
    if given["chips"] > MOST_CHIPS:
        raise bad_field(
            "chips", given["chips"], f"must be at most {MOST_CHIPS:,}", "predict a part of the service; replicas do not slow one another"
        )
    model = _model(asked.model, "model")
    quantization = given.get("quantization") or published_format(model.origin.architecture)
    reference, cluster = find_cluster(asked.cluster, given["chips"])
    if cluster.pools and (asked.workers is None or len(cluster.pools) != 2):
        rule = "has several kinds of chips, of which one replica has one"
        raise bad_field(
            "cluster", cluster.name, rule, "give prefill and decode workers of one kind each, such as --workers 3x4@h20:1x8@h200"
        )
    pools = joined_pools(cluster.pools) if cluster.pools else ()
    assumptions = load_assumptions().with_given(read_assumed(asked.assume)).on(cluster)
    engine = load_engine(asked.engine or DEFAULT_ENGINE)
    is_given = asked.quantization is not None
    quantization, notes = _format_that_runs(engine, cluster.chip, quantization, model.name, is_given=is_given)
    if model.origin.architecture == ARCHITECTURE:
        rule = "where its masks are not known, attention is taken to be causal and to see all earlier tokens"
        notes.append(f"model: {model.name} is an imported module, read as {description_of(model)}; {rule}")
    speculation = _speculation(asked, model)
    job = ServingJob(
        model=model,
        input_len=given["input_len"],
        output_len=given["output_len"],
        concurrency=given.get("concurrency"),
        rate=given.get("rate"),
        prefix_hit=given.get("prefix_hit", 0.0),
        quantization=quantization,
        speculation=speculation,
        **read_given(asked, "kv_precision"),
    )

    plan_names = {"cluster": reference}
    if asked.engine is not None and not isinstance(asked.engine, Engine):
        plan_names["engine"] = file_reference(asked.engine)
    if asked.calibration is not None and not isinstance(asked.calibration, Calibration):
        plan_names["calibration"] = file_reference(asked.calibration)

    def estimator(on: Cluster, prefill: ServingEstimator | None = None) -> ServingEstimator:
        calibration = (
            asked.calibration if isinstance(asked.calibration, Calibration) else choose_calibration(on.chip, asked.calibration or "")
        )
        if calibration.provenance is Provenance.SPEC_SHEET:
            notes.append(f"chip: neither {on.chip.name} nor a chip like it was measured; {typical_fractions()}, as measured GPUs reach")
        return ServingEstimator(
            model=model,
            cluster=on,
            calibration=calibration,
            engine=engine,
            quantization=quantization,
            cache=job.kv_precision,
            prefill=prefill,
            plan_names=plan_names,
        )

    price = cluster.mean_chip(lambda chip: chip.price_per_hour)
    return ServingSetting(
        estimator=estimator(pools[1], estimator(pools[0])) if pools else estimator(cluster),
        job=job,
        reference=reference,
        num_chips=cluster.num_chips,
        assumptions=assumptions,
        chip_watts=cluster.mean_chip(lambda chip: chip.tdp_watts),
        price=read_given(asked, "price").get("price", assumptions.price or price),
        notes=tuple(notes),
    )


def with_workers_chips(asked: ServingRequest) -> ServingRequest:
    """Return the request with the cluster that its workers name, and with the chips of a cluster text that contains them."""
    text = asked.cluster
    if asked.workers is not None and (named := cluster_text(read_given(asked, "workers")["workers"])):
        if text not in (None, named):
            raise bad_field("workers", asked.workers, f"names its chips, and cluster={text} others", "leave out one of the two")
        text = named
    if asked.chips is not None or not isinstance(text, (str, Path)):
        return asked
    if is_mixed(str(text)):
        return replace(asked, cluster=text, chips=chips_of(str(text)))
    if not is_path(text) or needs_chips(text):
        return asked
    cluster = find_cluster(text, None)[1]
    return replace(asked, cluster=text, chips=cluster.num_chips) if cluster.pools else asked


def _format_that_runs(
    engine: Engine, chip: Chip, quantization: Quantization, model: str, *, is_given: bool
) -> tuple[Quantization, list[str]]:
    """Return the format that an engine runs, with notes. A default format that does not run is widened, or the model runs in 16 bits."""
    notes: list[str] = []
    if not is_given and not quantization.is_plain:
        notes.append(f"quantization: not given, and {model} is published in {quantization.name}")
    runs = format_on(engine.kernels.formats, chip, quantization)
    if runs is None and is_given:
        require_format(engine.name, engine.kernels.formats, chip, quantization)
    if runs is None:
        runs = quantization_named("bf16" if engine.kernels.formats else WIDENED)
    if runs.name != quantization.name:
        fallback = f"weights are widened inside the products ({runs.name})" if not runs.is_plain else f"it is taken in {runs.name}"
        notes.append(f"quantization: {engine.name} on {chip.name} has no products in {quantization.name}; {fallback}")
    return runs, notes


def _speculation(asked: ServingRequest, model: TransformerConfig) -> Speculation | None:
    """Return speculative decoding with a draft model, or with the model's own multi-token-prediction module."""
    given = read_given(asked, "draft_tokens", "acceptance")
    if "draft_tokens" not in given:
        for name in ("acceptance", "draft_model"):
            if getattr(asked, name) is not None:
                raise bad_field(name, getattr(asked, name), "is of drafts, of which there are none", "give draft_tokens")
        return None
    draft = None if asked.draft_model is None else _model(asked.draft_model, "draft_model")
    if draft is None and not model.num_mtp_layers:
        rule = f"{model.name} has no module for further tokens"
        raise bad_field("draft_tokens", asked.draft_tokens, rule, "name a model that drafts with draft_model")
    return Speculation(**{"acceptance": DEFAULT_ACCEPTANCE, **given, "draft": draft})


def read_given(asked: ServingRequest, *names: str) -> dict[str, Any]:
    """Return the given values of these fields. Raises InputError."""
    words = words_of(ServingRequest)
    return {name: words[name].value(getattr(asked, name), name) for name in names if getattr(asked, name) is not None}


def _model(name: Any, field: str) -> TransformerConfig:
    from perfmodel.workload.models import load_model

    if isinstance(name, ImportedGraph):
        return decoder_of(name)
    if isinstance(name, str) and ":" in name and not Path(name).exists():
        file = f"perfmodel import '{name}' --inputs 'int64[1,2048]' --save graph.json"
        raise bad_field(field, name, "a module is served by the file that import saves", f"run {file} and give graph.json")
    check_name(name, field, TransformerConfig, "see `perfmodel models`")
    return name if isinstance(name, TransformerConfig) else load_model(name)
