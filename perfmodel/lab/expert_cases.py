"""What of a published run is only there where its model has experts: which model it is, and how its experts are dealt out.

Such runs state sizes of a layer, but neither shared experts nor dense layers nor the ranks of latent attention: those are the model's by
its name, or what Megatron-LM's own flags say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.lab.frameworks import Framework
from perfmodel.parallel.layout import Dispatcher
from perfmodel.parallel.profile import ExecutionProfile
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.layer_specs import Experts, FeedForward, LatentAttention, kinds_of_layers
from perfmodel.workload.models import list_models, load_model

#: Sizes that a run and the model of its name must share: field of the run's model -> of a `TransformerConfig`.
_SAME = ("hidden_size", "num_attention_heads", "num_key_value_heads")

#: Pipelines of Megatron-LM's tests whose flags are cut off in published rows, as the tests' own files say (`model_config.yaml` of
#: tests/functional_tests/test_cases/moe): end of the model's name -> `pipeline-model-parallel-layout`.
_LAYOUTS = {"selective_recompute_experimental": "Et*3|(tt|)*6tmL", "tp4_ep2_etp2_pp2_scoped_cudagraph": "Et|(tt|)*6mL"}

#: Of latent attention, where Megatron-LM's flags do not say (`MLATransformerConfig`).
_MEGATRON_LATENT = {"kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKnobs:
    """Of a plan: how its experts are dealt out, and how tokens reach them."""

    ep: int = 1
    etp: int = 1
    dispatcher: str = str(Dispatcher.ALL_TO_ALL)


def has_experts(model: object) -> bool:
    """Whether a run's model, as the run states it, has experts."""
    if isinstance(model, TransformerConfig):
        return model.experts is not None
    number = model.get("num_experts") if isinstance(model, Mapping) else None
    return isinstance(number, int) and not isinstance(number, bool) and number > 1


def megatron_flags(settings: object) -> dict[str, str]:
    """Megatron-LM's own flags: name -> value."""
    flags = settings.get("megatron_args") if isinstance(settings, Mapping) else None
    pairs = (flag.partition("=") for flag in flags if isinstance(flag, str)) if isinstance(flags, list) else ()
    return {name: value for name, _, value in pairs}


def named_model(model: Mapping[str, Any]) -> TransformerConfig | None:
    """The shipped model with experts that the run's name begins with, as deep as the run says; None where there is none, or where the
    sizes that the run states are not its own."""
    name = _plain(model.get("name"))
    found = max((each for each in list_models() if name.startswith(_plain(each))), key=len, default="")
    if not found:
        return None
    config = _load(found)
    experts, layers = config.experts, model.get("num_hidden_layers")
    if experts is None or (experts.num_experts, experts.top_k) != (model.get("num_experts"), model.get("num_experts_per_tok")):
        return None
    if any(model.get(field) not in (None, getattr(config, field)) for field in _SAME):
        return None
    return config.with_layers(layers) if isinstance(layers, int) and not isinstance(layers, bool) and layers > 0 else config


@lru_cache(maxsize=64)
def _load(name: str) -> TransformerConfig:
    return load_model(name)


def _plain(name: object) -> str:
    """Letters and digits alone, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower()[:80]) if isinstance(name, str) else ""


def with_experts(base: TransformerConfig, model: Mapping[str, Any], flags: Mapping[str, str]) -> TransformerConfig:
    """A dense model with experts in the place of its MLP, of the sizes that the run states, or Megatron-LM's flags."""
    count, top_k, name = model.get("num_experts"), model.get("num_experts_per_tok"), base.name
    if not isinstance(top_k, int):
        raise InputError(f"model.num_experts_per_tok: the run does not state it; {name} cannot be predicted without it")
    if str(model.get("kind")) == "moe-mla" and not flags:
        rule = "no shipped model has its name and sizes, and such runs state neither its latents nor its shared experts"
        raise InputError(f"model.name={one_line(name)}: {rule}; name it, or give Megatron-LM's flags")
    assert isinstance(count, int)
    experts = Experts(
        num_experts=count,
        top_k=top_k,
        width=_flag(flags, "moe-ffn-hidden-size", base.intermediate_size),
        gated=base.gated_mlp,
        bias=base.mlp_bias,
        shared_width=_flag(flags, "moe-shared-expert-intermediate-size", 0),
        score="sigmoid" if flags.get("moe-router-score-function") == "sigmoid" else "softmax",
    )
    made = replace(base, experts=experts, num_mtp_layers=_flag(flags, "mtp-num-layers", 0))
    latent = flags.get("multi-latent-attention") == "True"
    if latent:
        sizes = {name: _flag(flags, name, default) for name, default in _MEGATRON_LATENT.items()}
        made = replace(
            made,
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
        return made
    makes: dict[bool, FeedForward] = {True: "experts", False: "dense"}
    return replace(made, kinds=kinds_of_layers([("latent" if latent else "attention", makes[each]) for each in order]))


def expert_layers(frequency: str, num_layers: int) -> Sequence[bool]:
    """Which layers have experts by Megatron-LM's `moe-layer-freq`: every so many the first of them, or a list such as ([0]*3+[1]*58)."""
    text = frequency.replace(" ", "").strip("()")
    if re.fullmatch(r"\d+", text):
        return [layer % max(int(text), 1) == 0 for layer in range(num_layers)]
    found: list[bool] = []
    for part in text.split("+"):
        listed = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if listed is None:
            raise InputError(f"moe-layer-freq={one_line(frequency, 60)}: must be a number or a list of 0 and 1; correct it in the case")
        found += [digit == "1" for digit in listed[1].split(",")] * int(listed[2] or 1)
    if len(found) != num_layers:
        raise InputError(
            f"moe-layer-freq={one_line(frequency, 60)}: is of {len(found)} layers, not of {num_layers}; correct it in the case"
        )
    return found


def _flag(flags: Mapping[str, str], name: str, default: int) -> int:
    value = flags.get(name)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 9:
        raise InputError(f"{name}={one_line(value, 40)}: must be a whole number; correct it in the case")
    return int(value)


def stated_stages(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of each virtual stage by Megatron-LM's `pipeline-model-parallel-layout`; none where the run does not say it.

    Stages end with |, t is a layer, E, m and L are embedding, further tokens and loss; *3 repeats a letter or what is in parentheses.
    """
    model, name = inputs.get("model"), ""
    if isinstance(model, Mapping):
        name = str(model.get("name"))
    text = megatron_flags(inputs.get("settings")).get("pipeline-model-parallel-layout")
    text = text or next((layout for end, layout in _LAYOUTS.items() if name.endswith(end)), "")
    if not re.fullmatch(r"[EtmL|()*\d]{0,200}", text):
        raise InputError(f"pipeline-model-parallel-layout={one_line(text, 60)}: must be of E, t, m, L and |; correct it in the case")
    for what in (r"\(([Etm|L]{1,200})\)", "([EtmL])"):
        text = re.sub(what + r"\*(\d{1,3})", lambda found: found[1] * int(found[2]), text)
    return tuple(stage.count("t") for stage in text.split("|")) if text else ()


def expert_knobs(inputs: Mapping[str, Any], framework: Framework, *, tp: int, ep: int, assumed: list[str]) -> ExpertKnobs:
    """As the run states them; what it does not state is its framework's habit."""
    flags = megatron_flags(inputs.get("settings"))
    stated = inputs.get("etp")
    if isinstance(stated, int) and not isinstance(stated, bool):
        etp = stated
    else:
        etp = _flag(flags, "expert-tensor-parallel-size", 1 if framework.folds_experts else tp)
    said = inputs.get("dispatcher") or flags.get("moe-token-dispatcher-type") or ("allgather" if flags else None)
    if said is None:
        assumed.append("dispatcher")
        said = str(Dispatcher.FLEX) if str(inputs.get("chip")).startswith(framework.flex_on or ("/",)) else framework.dispatcher
    known = [str(each) for each in Dispatcher]
    if said not in known:
        raise InputError(f"dispatcher={one_line(said, 40)}: is not known; use {', '.join(known)}")
    return ExpertKnobs(ep=ep, etp=etp, dispatcher=said)


def as_recipes_run(
    profile: ExecutionProfile, framework: Framework, chip: object, *, pp: int, virtual_stages: int, eager: ExecutionProfile
) -> ExecutionProfile:
    """As its recipes for the chip run models with experts: under CUDA graphs or launch by launch, as `eager` does; and one microbatch's
    exchanges beside another one's passes, which takes an interleaved schedule in a pipeline, with weight gradients apart (Megatron-Bridge,
    scripts/performance, `_set_moe_a2a_overlap_overrides`: `delay_wgrad_compute = True`)."""
    name = str(chip)
    if framework.graphs_experts_on is not None and not name.startswith(framework.graphs_experts_on):
        profile = replace(profile, host_launch_time=eager.host_launch_time)
    if not name.startswith(framework.hides_exchanges_on or ("/",)) or (pp > 1 and virtual_stages == 1):
        return profile
    return replace(profile, hides_exchanges=True, delays_weight_gradients=True)


def check_expert_ranks(num_chips: int, *, pp: int, knobs: ExpertKnobs) -> None:
    """Experts are dealt over all ranks of a stage: chips = pp * etp * ep * edp."""
    ways = pp * knobs.etp * knobs.ep
    if num_chips % ways:
        rule = f"must be a multiple of pp*etp*ep={ways}, over which the experts are dealt"
        raise InputError(f"num_chips={num_chips}: {rule}; correct it in the case")
