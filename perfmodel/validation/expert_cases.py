"""Fields of a published run of a mixture-of-experts model: the model, and the distribution of its experts.

Such runs state sizes of a layer, but not the shared experts, the dense layers or the ranks of latent attention. Those follow from the
model's name or from Megatron-LM's flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.frameworks.profile import ExecutionProfile
from perfmodel.frameworks.releases import ReleaseRecipe, as_recipe_runs, load_releases, recipe_of, without_depth
from perfmodel.parallel.choices import Dispatcher
from perfmodel.validation.fields import optional_count
from perfmodel.validation.framework_patterns import Framework
from perfmodel.validation.shipped_models import DENSE, MTP, stated_layers
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import Experts, FeedForward, LatentAttention, kinds_of_layers
from perfmodel.workload.truncation import layers_text

#: Pipelines of Megatron-LM's tests whose flags are truncated in published rows. Source: `model_config.yaml` of
#: tests/functional_tests/test_cases/moe. End of the model's name -> `pipeline-model-parallel-layout`.
_LAYOUTS = {"selective_recompute_experimental": "Et*3|(tt|)*6tmL", "tp4_ep2_etp2_pp2_scoped_cudagraph": "Et|(tt|)*6mL"}

#: Defaults of latent attention for missing flags of Megatron-LM (`MLATransformerConfig`).
_MEGATRON_LATENT = {"kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKnobs:
    """Expert parallelism of a plan, and the dispatcher of its tokens."""

    ep: int = 1
    etp: int = 1
    dispatcher: str = str(Dispatcher.ALL_TO_ALL)


def has_experts(model: object) -> bool:
    """Return whether the model that a run states has experts."""
    if isinstance(model, TransformerConfig):
        return model.parts.experts is not None
    number = model.get("num_experts") if isinstance(model, Mapping) else None
    return isinstance(number, int) and not isinstance(number, bool) and number > 1


def megatron_flags(settings: object) -> dict[str, str]:
    """Return Megatron-LM's flags: name -> value."""
    flags = settings.get("megatron_args") if isinstance(settings, Mapping) else None
    pairs = (flag.partition("=") for flag in flags if isinstance(flag, str)) if isinstance(flags, list) else ()
    return {name: value for name, _, value in pairs}


def stated_kernels(settings: object) -> set[str]:
    """Return the kernel libraries that the run names."""
    names = settings.get("kernels") if isinstance(settings, Mapping) else None
    return {str(name).lower() for name in names} if isinstance(names, list) else set()


def assumed_layers(model: object, config: TransformerConfig) -> list[str]:
    """Return the fields of a truncated model that its run does not state."""
    if not isinstance(model, Mapping) or not layers_text(config) or not config.name.endswith("-layers"):
        return []
    return [names[0] for names in (DENSE, MTP) if stated_layers(model, names) is None]


def with_framework_defaults(
    config: TransformerConfig, model: object, framework: Framework, settings: Mapping[str, Any]
) -> TransformerConfig:
    """Return the model with its framework's defaults.

    It has no multi-token-prediction modules where the framework has none and the run states none. Where the framework forces neighbouring
    experts for each token, experts are chosen within one group of top_k experts.
    """
    if not framework.trains_mtp and isinstance(model, Mapping) and stated_layers(model, MTP) is None:
        config = replace(config, num_mtp_layers=0)
    experts = config.parts.experts
    if experts is None or not framework.experts.forces_neighbours or settings.get("balanced_routing") != "forced":
        return config
    if experts.num_experts % experts.top_k:
        return config
    return config.having(experts=replace(experts, num_groups=experts.num_experts // experts.top_k, top_groups=1))


def with_experts(base: TransformerConfig, model: Mapping[str, Any], flags: Mapping[str, str]) -> TransformerConfig:
    """Return a dense model with experts instead of its MLP, of the sizes in the run or in Megatron-LM's flags."""
    count, top_k, name = model.get("num_experts"), model.get("num_experts_per_tok"), base.name
    if top_k is None:
        raise InputError(f"model.num_experts_per_tok: the run does not state it; {name} cannot be predicted without it")
    if str(model.get("kind")) == "moe-mla" and not flags:
        rule = "no shipped model has its name and sizes, and such runs state neither its latents nor its shared experts"
        raise InputError(f"model.name={one_line(name)}: {rule}; name it, or give Megatron-LM's flags")
    assert isinstance(count, int)
    experts = Experts(
        num_experts=count,
        top_k=top_k,
        width=_flag(flags, "moe-ffn-hidden-size", base.intermediate_size),
        gated=base.mlp.gated_mlp,
        bias=base.biases.mlp_bias,
        shared_width=_flag(flags, "moe-shared-expert-intermediate-size", 0),
        score="sigmoid" if flags.get("moe-router-score-function") == "sigmoid" else "softmax",
    )
    config = base.having(experts=experts, num_mtp_layers=_flag(flags, "mtp-num-layers", 0))
    latent = flags.get("multi-latent-attention") == "True"
    if latent:
        sizes = {name: _flag(flags, name, default) for name, default in _MEGATRON_LATENT.items()}
        config = config.having(
            latent=LatentAttention(
                query_rank=_flag(flags, "q-lora-rank", 0),
                key_value_rank=sizes["kv-lora-rank"],
                nope_head_dim=sizes["qk-head-dim"],
                rope_head_dim=sizes["qk-pos-emb-head-dim"],
                value_head_dim=sizes["v-head-dim"],
            ),
        )
    order = expert_layers(flags.get("moe-layer-freq", "1"), base.num_hidden_layers)
    if all(order):
        return config
    feed_forwards: dict[bool, FeedForward] = {True: "experts", False: "dense"}
    return config.having(
        kinds=kinds_of_layers([("latent" if latent else "attention", feed_forwards[has_experts_here]) for has_experts_here in order]),
    )


def expert_layers(frequency: str, num_layers: int) -> Sequence[bool]:
    """Return for each layer whether it has experts, by Megatron-LM's `moe-layer-freq`.

    The flag is a period, of which the first layer has experts, or a list such as ([0]*3+[1]*58).
    """
    text = frequency.replace(" ", "").strip("()")
    if re.fullmatch(r"\d+", text):
        return [layer % max(int(text), 1) == 0 for layer in range(num_layers)]
    layer_flags: list[bool] = []
    for part in text.split("+"):
        listed = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if listed is None:
            raise InputError(f"moe-layer-freq={one_line(frequency, 60)}: must be a number or a list of 0 and 1; correct it in the case")
        layer_flags += [digit == "1" for digit in listed[1].split(",")] * int(listed[2] or 1)
    if len(layer_flags) != num_layers:
        raise InputError(
            f"moe-layer-freq={one_line(frequency, 60)}: is of {len(layer_flags)} layers, not of {num_layers}; correct it in the case"
        )
    return layer_flags


def _flag(flags: Mapping[str, str], name: str, default: int) -> int:
    value = flags.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 9:
        raise InputError(f"{name}={one_line(value, 40)}: must be a whole number; correct it in the case")
    return int(value)


def stated_stages(inputs: Mapping[str, Any], recipe: ReleaseRecipe | None = None) -> tuple[int, ...]:
    """Return the layers of each virtual stage: as the run states them, else by its recipe if that has the same number of stages."""
    model = inputs.get("model")
    name = str(model.get("name")) if isinstance(model, Mapping) else ""
    stated = megatron_flags(inputs.get("settings")).get("pipeline-model-parallel-layout")
    stages = stages_of(stated or next((layout for end, layout in _LAYOUTS.items() if name.endswith(end)), ""))
    if stages or recipe is None:
        return stages
    stages = stages_of(recipe.layout)
    number = (optional_count(inputs, "pp") or 1) * (optional_count(inputs, "virtual_stages") or 1)
    return stages if len(stages) == number else ()


def stages_of(layout: str) -> tuple[int, ...]:
    """Return the layers of each virtual stage of Megatron-LM's `pipeline-model-parallel-layout`; empty for an empty one.

    Stages end with |, t is a layer, E, m and L are embedding, multi-token prediction and loss; *3 repeats a letter or a group in
    parentheses.
    """
    if not re.fullmatch(r"[EtmL|()*\d]{0,200}", layout):
        raise InputError(f"pipeline-model-parallel-layout={one_line(layout, 60)}: must be of E, t, m, L and |; correct it in the case")
    for what in (r"\(([Etm|L]{1,200})\)", "([EtmL])"):
        layout = re.sub(what + r"\*(\d{1,3})", lambda match: match[1] * int(match[2]), layout)
    return tuple(stage.count("t") for stage in layout.split("|")) if layout else ()


_RELEASE = re.compile(r"(?<![\d.])\d{2}\.\d{2}(?:\.\d{1,2})?(?![\d.])", re.ASCII)


def recipe_of_case(inputs: Mapping[str, Any], framework: Framework, model: TransformerConfig) -> ReleaseRecipe | None:
    """Return the recipe of the release in the framework's name (`Megatron-Bridge / 26.02 NeMo Container`); None for an unknown one."""
    releases = load_releases(framework.profile) if framework.experts.has_recipes and model.parts.experts is not None else None
    stated = _RELEASE.search(str(inputs.get("framework"))[:200])
    if releases is None or stated is None:
        return None
    return recipe_of(
        releases,
        stated[0],
        model=without_depth(model.name),
        chip=str(inputs.get("chip")),
        precision=str(inputs.get("precision") or "bf16"),
        global_batch=optional_count(inputs, "global_batch") or 0,
    )


def expert_knobs(
    inputs: Mapping[str, Any], framework: Framework, recipe: ReleaseRecipe | None, *, tp: int, ep: int, assumed: list[str]
) -> ExpertKnobs:
    """Return expert parallelism and dispatcher as the run states them, else by the recipe or the framework's defaults."""
    flags = megatron_flags(inputs.get("settings"))
    usual = 1 if framework.experts.folds_experts else tp
    etp = optional_count(inputs, "etp") or _flag(flags, "expert-tensor-parallel-size", (recipe and recipe.etp) or usual)
    dispatcher_stated = inputs.get("dispatcher") or flags.get("moe-token-dispatcher-type") or ("allgather" if flags else None)
    dispatcher_stated = dispatcher_stated or (str(Dispatcher.FLEX) if "deepep" in stated_kernels(inputs.get("settings")) else None)
    if dispatcher_stated is None:
        assumed.append("dispatcher")
        dispatcher_stated = None if recipe is None else recipe.dispatcher
    if dispatcher_stated is None:
        dispatcher_stated = (
            str(Dispatcher.FLEX)
            if str(inputs.get("chip")).startswith(framework.experts.flex_on or ("/",))
            else framework.experts.dispatcher
        )
    known = [str(dispatcher) for dispatcher in Dispatcher]
    if dispatcher_stated not in known:
        raise InputError(f"dispatcher={one_line(dispatcher_stated, 40)}: is not known; use {', '.join(known)}")
    return ExpertKnobs(ep=ep, etp=etp, dispatcher=dispatcher_stated)


def with_recipe(
    profile: ExecutionProfile,
    framework: Framework,
    recipe: ReleaseRecipe | None,
    chip: object,
    *,
    pp: int,
    virtual_stages: int,
    eager: ExecutionProfile,
) -> ExecutionProfile:
    """Return the profile with the recipe applied, else with the framework's recipes for the chip.

    Recipes run under CUDA graphs or with the launch times of `eager`. They overlap the all-to-alls of one microbatch with the passes of
    another one, with delayed weight gradients. In a pipeline this takes an interleaved schedule.

    Source: Megatron-Bridge, scripts/performance, `_set_moe_a2a_overlap_overrides`: `delay_wgrad_compute = True`.
    """
    if recipe is not None:
        can_overlap = pp == 1 or virtual_stages > 1
        applied_recipe = recipe if can_overlap else replace(recipe, moe_overlap=False)
        return as_recipe_runs(profile, applied_recipe, launch_time=eager.timing.host_launch_time)
    name = str(chip)
    if framework.experts.graphs_experts_on is not None and not name.startswith(framework.experts.graphs_experts_on):
        profile = profile.having(host_launch_time=eager.timing.host_launch_time)
    if not name.startswith(framework.experts.hides_exchanges_on or ("/",)) or (pp > 1 and virtual_stages == 1):
        return profile
    return profile.having(hides_exchanges=True, delays_weight_gradients=True)


def check_expert_ranks(num_chips: int, *, pp: int, knobs: ExpertKnobs) -> None:
    """Raise InputError if the experts do not divide over the ranks of a stage: chips = pp * etp * ep * edp."""
    ways = pp * knobs.etp * knobs.ep
    if num_chips % ways:
        rule = f"must be a multiple of pp*etp*ep={ways}, over which the experts are distributed"
        raise InputError(f"num_chips={num_chips}: {rule}; correct it in the case")
