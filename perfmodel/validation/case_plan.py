"""Plan of a published run: its inputs become job, cluster, execution profile and plan.

Missing inputs follow the framework's defaults (`framework_patterns.py`). A run that cannot be predicted raises `InputError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field, one_line
from perfmodel.foundation.session import session_cache
from perfmodel.foundation.values import is_path
from perfmodel.frameworks.profile import ExecutionProfile, load_profile
from perfmodel.frameworks.releases import ReleaseRecipe
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.choices import ZeroStage, module_operators, read_modules
from perfmodel.parallel.layout import even_stage_layers
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.parallel.stage_cuts import stage_layers_by_cost
from perfmodel.validation.case_settings import context_of_case, settings_of_case
from perfmodel.validation.expert_cases import (
    ExpertKnobs,
    assumed_layers,
    check_expert_ranks,
    expert_knobs,
    megatron_flags,
    recipe_of_case,
    stated_stages,
    with_framework_defaults,
    with_recipe,
)
from perfmodel.validation.fields import PRECISIONS, optional_count, stated_count, stated_or
from perfmodel.validation.fine_tuning import stated_optimizer, stated_training
from perfmodel.validation.framework_patterns import Framework, assumed_virtual_stages, framework_of, stage_layers_with_ends
from perfmodel.validation.published_models import config_from_case
from perfmodel.validation.schemas import TrainingCaseFile, checked_inputs
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.training import Method, Training, training_of

_GBIT = 1e9 / 8

#: Spellings of fp8 recipes with current scaling (scales of the tensor itself); the default is delayed scaling.
_CURRENT_SCALING = ("tensorwise", "rowwise", "current")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOfCase:
    """Parameters of a case's cluster; hashable, because the runs of one source share clusters.

    cluster       name or file of the cluster of a user's run, which has the chips of the other fields; empty: by these fields
    calibration   calibration of a user's run; empty: the best available
    """

    chip: str
    num_chips: int
    chips_per_node: int | None = None
    inter_node_bandwidth_per_chip: float | None = None
    cluster: str = ""
    calibration: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A run ready to be predicted. matmul_dtype: dtype of matrix multiplies (fp8 where the policy of the job is bf16)."""

    hardware: HardwareOfCase
    framework: Framework
    profile: ExecutionProfile
    matmul_dtype: Dtype
    plan: Plan
    assumed: tuple[str, ...]


def plan_of_case(
    inputs: Mapping[str, Any],
    *,
    hardware: HardwareOfCase | None = None,
    optimizer: Optimizer | None = None,
    dp_shard: int | None = None,
) -> PlannedCase:
    """Return the plan of the run that `inputs` describe. Reads nothing but its arguments.

    hardware, optimizer, dp_shard   of a user's run, which is described in more detail than published ones; None: by the inputs
    """
    inputs = _checked(inputs)
    assumed = list[str]()
    framework = framework_of(inputs.get("framework")).when_sharded(inputs.get("zero_stage"))
    settings = framework.options.setup(settings_of_case(inputs.get("settings")), inputs.get("method"))
    seq_len = stated_count(inputs, "sequence_length")
    num_chips, dp, tp, pp, cp = _degrees(inputs, settings, assumed)
    profile = _profile(framework, settings)
    policy, dtype = _precision(inputs, settings, assumed)
    config = config_from_case(inputs["model"], settings=settings, seq_len=seq_len, tp=tp)
    model = with_framework_defaults(config, inputs["model"], framework, settings)
    profile, rules = context_of_case(profile, cp=cp, tp=tp, num_key_value_heads=model.num_key_value_heads, assumed=assumed)
    experts, recipe = _experts(inputs, framework, model, num_chips=num_chips, tp=tp, pp=pp, assumed=assumed)
    global_batch, micro_batch = _batches(inputs, framework, dp=dp, pp=pp, assumed=assumed)
    train = _train(inputs, framework, assumed)
    optimizer = optimizer or stated_optimizer(inputs) or Optimizer.ADAMW
    job = TrainingJob(model=model, global_batch=global_batch, seq_len=seq_len, precision=policy, optimizer=optimizer, train=train)
    virtual_stages, stage_layers = _stages(inputs, framework, recipe, profile, model, pp, global_batch // max(dp * micro_batch, 1), assumed)
    if experts is not None:
        eager = load_profile_once("megatron")
        profile = with_recipe(profile, framework, recipe, inputs.get("chip"), pp=pp, virtual_stages=virtual_stages, eager=eager)
    zero, shard = _zero(inputs, framework, settings, dp=dp, cp=cp, assumed=assumed)
    recompute, operators = _recompute(inputs, framework, settings, zero, assumed, () if recipe is None else recipe.recompute)
    hardware = hardware or _hardware(inputs, num_chips)
    given = inputs.get("sequence_parallel")
    plan = make_plan(
        job,
        cluster=hardware.cluster or hardware.chip,
        num_chips=num_chips,
        pp=pp,
        cp=cp,
        tp=tp,
        dp_shard=dp_shard or shard,
        dp_replicate=dp // (dp_shard or shard),
        zero=zero,
        sequence_parallel=tp > 1 and (framework.sequence_parallel if given is None else given),
        micro_batch=micro_batch,
        recompute=recompute,
        recompute_operators=operators,
        rules=rules,
        virtual_stages=virtual_stages,
        stage_layers=stage_layers,
        attention=_attention(inputs, framework, settings, assumed),
        profile=profile.name,
        **({} if experts is None else asdict(experts)),
    )
    if inputs.get("zero_stage") == ZeroStage.PARAMETERS and dp * cp * pp == 1:
        # nothing is sharded, but weights are still stored, cast and freed by units
        plan = replace(plan, zero=ZeroStage.PARAMETERS)
    return PlannedCase(hardware=hardware, framework=framework, profile=profile, matmul_dtype=dtype, plan=plan, assumed=tuple(assumed))


def _checked(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inputs of a run that states its model, checked by the schema."""
    loaded = {name: value for name, value in inputs.items() if isinstance(value, TransformerConfig)}  # of a user's run
    inputs = {**checked_inputs(TrainingCaseFile, {**inputs, **dict.fromkeys(loaded)}), **loaded}
    model = inputs.get("model")
    if model is None:
        raise InputError("model: the run does not state it; it cannot be predicted without its sizes")
    if isinstance(model, Mapping) and str(model.get("name")).endswith("offloading"):
        raise InputError("model.name: says that the run moves activations to the host, which is not modelled; leave it out")
    return inputs


@session_cache(maxsize=64, file=lambda name: name)
def load_profile_once(name: str) -> ExecutionProfile:
    return load_profile(name)


def _degrees(inputs: Mapping[str, Any], settings: Mapping[str, Any], assumed: list[str]) -> tuple[int, int, int, int, int]:
    """Return (chips, dp, tp, pp, cp). If chips and dp contradict each other, the number of chips counts."""
    tp, pp, cp = (stated_count(inputs, name, default=1) for name in ("tp", "pp", "cp"))
    if settings.get("device_map") and tp * pp * cp == 1:
        # layers are placed sequentially on all chips, of which one works at a time
        pp = stated_count(inputs, "num_chips")
    ways, stated, dp = tp * pp * cp, optional_count(inputs, "num_chips"), optional_count(inputs, "dp")
    if stated is None:
        if dp is None:
            raise InputError("num_chips: the run states neither it nor dp; it cannot be predicted without one of them")
        return ways * dp, dp, tp, pp, cp
    if stated % ways:
        raise InputError(f"num_chips={stated}: must be a multiple of tp*pp*cp={ways}; correct it in the case")
    if dp is not None and dp != stated // ways:
        assumed.append("dp")
    return stated, stated // ways, tp, pp, cp


def _profile(framework: Framework, settings: Mapping[str, Any]) -> ExecutionProfile:
    optimizer = megatron_flags(settings).get("optimizer", "adam")  # Adam is the default of Megatron-LM
    if optimizer != "adam":
        raise bad_field("optimizer", one_line(optimizer, 40), "is not modelled", "give runs with adam")
    return with_settings(load_profile_once(framework.profile), settings)


def _precision(inputs: Mapping[str, Any], settings: Mapping[str, Any], assumed: list[str]) -> tuple[Precision, Dtype]:
    """Return the policy of the job and the dtype of its matrix multiplies."""
    precision = stated_or(inputs, "precision", "bf16", assumed)
    policy, dtype = PRECISIONS[precision]
    if precision == "bf16" and settings.get("pure_bf16") is True:
        policy = Precision.BF16
    elif precision == "fp8" and settings.get("fp8_recipe") in _CURRENT_SCALING:
        policy = Precision.FP8_CURRENT
    return policy, dtype


def _experts(
    inputs: Mapping[str, Any], framework: Framework, model: TransformerConfig, *, num_chips: int, tp: int, pp: int, assumed: list[str]
) -> tuple[ExpertKnobs | None, ReleaseRecipe | None]:
    """Return the expert parallelism of a model with experts, and the recipe of its release."""
    if model.parts.experts is None:
        return None, None
    assumed += assumed_layers(inputs["model"], model)
    recipe = recipe_of_case(inputs, framework, model)
    experts = expert_knobs(inputs, framework, recipe, tp=tp, ep=stated_count(inputs, "ep", default=1), assumed=assumed)
    check_expert_ranks(num_chips, pp=pp, knobs=experts)
    return experts, recipe


def _batches(inputs: Mapping[str, Any], framework: Framework, *, dp: int, pp: int, assumed: list[str]) -> tuple[int, int]:
    """Return the global batch and the micro-batch.

    By default the local batch runs in one pass (data-parallel frameworks without a pipeline), else one sequence.
    """
    global_batch = stated_count(inputs, "global_batch")
    one_pass = max(global_batch // dp, 1) if framework.fills_memory and pp == 1 else 1
    return global_batch, int(stated_or(inputs, "micro_batch", one_pass, assumed))


def _train(inputs: Mapping[str, Any], framework: Framework, assumed: list[str]) -> Training:
    """Return the training method, such as `lora:16`. For a run that states adapters without a rank (`lora`), use the framework's recipe."""
    value = inputs.get("train")
    if value is None:
        return stated_training(inputs)
    if value in [*Method] and value != Method.FULL:
        assumed.append("train")
        return replace(training_of(framework.adapters), method=Method(value))
    return training_of(value)


def _stages(
    inputs: Mapping[str, Any],
    framework: Framework,
    recipe: ReleaseRecipe | None,
    profile: ExecutionProfile,
    model: TransformerConfig,
    pp: int,
    num_microbatches: int,
    assumed: list[str],
) -> tuple[int, tuple[int, ...] | None]:
    """Return the virtual stages of a rank, and the layers of each stage; None: the default of a plan.

    The layers are those that the run or its recipe states, else as the framework places them. Of stated modules, two precede the layers
    (embedding, transposition), the others follow them.
    """
    layers, stage_layers, stages = model.num_hidden_layers, stated_stages(inputs, recipe), inputs.get("stages")
    if stages and not stage_layers:
        units = [stated_count(stage, "units") for stage in stages]
        if sum(units) < layers:
            rule = f"must state units of each stage, {layers} or more in all"
            raise bad_field("stages", one_line(stages), rule, "correct it in the case")
        first, ends = min(2, sum(units) - layers), accumulate(units)
        stage_layers = tuple(max(min(end, first + layers) - max(end - size, first), 0) for end, size in zip(ends, units, strict=True))
    if stage_layers:
        return len(stage_layers) // pp, stage_layers
    stated = optional_count(inputs, "virtual_stages")
    virtual_stages = assumed_virtual_stages(framework, layers, pp) if stated is None else stated
    if pp == 1 or num_microbatches % pp:
        virtual_stages = 1  # the schedule does not exist for this number of microbatches
    if virtual_stages != (stated or 1):
        assumed.append("virtual_stages")
    if profile.stages.places_layers_by_cost and virtual_stages == 1:
        return virtual_stages, stage_layers_by_cost(model, pp)
    num_stages = pp * virtual_stages
    # evenly where the stages divide their number, without regard to their cost
    placed = even_stage_layers(layers, num_stages) if layers % num_stages == 0 else stage_layers_with_ends(layers, num_stages)
    return virtual_stages, placed


def _zero(
    inputs: Mapping[str, Any], framework: Framework, settings: Mapping[str, Any], *, dp: int, cp: int, assumed: list[str]
) -> tuple[int, int]:
    """Return the ZeRO stage and the replicas that it shards over.

    These are the stated group, a node with HSDP, those of Megatron-LM's flags, else all replicas.
    """
    flags = megatron_flags(settings)
    stage = inputs.get("zero_stage")
    if stage is None:
        distributed = inputs.get("distributed_optimizer")
        if distributed is not None:
            stage = 1 if distributed else 0
        elif flags.get("use-distributed-optimizer") == "True":
            stage = 1
        else:
            stage = stated_or(inputs, "zero_stage", framework.zero, assumed)
    if stage == ZeroStage.PARAMETERS and settings.get("reshard_after_forward") is False:
        stage = ZeroStage.GRADIENTS  # parameters are not resharded after forward
    stage = int(stage)
    if stage == 0 or dp * cp == 1:  # sharded over the replicas and over the sequence
        return 0, 1
    instances = flags.get("num-distributed-optimizer-instances", "1")
    if instances.isdecimal() and int(instances) > 1 and dp % int(instances) == 0:
        return stage, dp // int(instances)
    group = settings.get("zero_group")
    if isinstance(group, int) and not isinstance(group, bool) and 0 < group <= dp and dp % group == 0:
        return stage, group
    chips_per_node = optional_count(inputs, "chips_per_node") or 8
    if str(settings.get("sharding") or "").upper() in ("HSDP", "HYBRID_SHARD") and dp % chips_per_node == 0:
        return stage, chips_per_node
    return stage, dp


def _recompute(
    inputs: Mapping[str, Any],
    framework: Framework,
    settings: Mapping[str, Any],
    zero: int,
    assumed: list[str],
    recipe_modules: tuple[str, ...],
) -> tuple[str, tuple[str, ...]]:
    """Return the recomputation and its operators. recipe_modules: recomputed modules of the release's recipe, the default of the run."""
    value = inputs.get("recompute")
    if value is None:
        assumed.append("recompute")
        if recipe_modules:
            return "selective", module_operators(read_modules(recipe_modules, "recompute"))
        value = framework.recomputation.recompute
    if value == "minimal_offloaded":
        value = "selective"
    modules = megatron_flags(settings).get("recompute-modules", "").strip("[]").split()
    if value == "selective" and modules:
        return value, module_operators(read_modules(modules, "recompute-modules"))
    return value, framework.recomputation.operators(zero)


def _attention(inputs: Mapping[str, Any], framework: Framework, settings: Mapping[str, Any], assumed: list[str]) -> str:
    flash = stated_or(inputs, "flash_attention", None, assumed)
    if flash is not None:
        return "flash" if flash else "unfused"
    return "unfused" if megatron_flags(settings).get("transformer-impl") == "local" else framework.attention


def _hardware(inputs: Mapping[str, Any], num_chips: int) -> HardwareOfCase:
    """Return the hardware of one kind of chips, or of several: each with its nodes, links and the share of its rates that it reaches."""
    if not inputs.get("chips"):
        chip = inputs.get("chip")
        if not chip or not chip.strip() or is_path(chip):
            raise bad_field("chip", one_line(chip), "must be the name of a known chip", "see `perfmodel chips`")
        per_node = optional_count(inputs, "chips_per_node")
        rate = inputs.get("inter_node_gbit_per_s_per_node")
        bandwidth = None if rate is None else rate * _GBIT / (per_node or 8)
        return HardwareOfCase(chip=chip, num_chips=num_chips, chips_per_node=per_node, inter_node_bandwidth_per_chip=bandwidth)
    pools = []
    for kind in inputs["chips"]:
        if is_path(kind["chip"]):
            raise bad_field("chips", one_line(kind), "must name a known chip for each kind", "see `perfmodel chips`")
        count, nodes = stated_count(kind, "count"), optional_count(kind, "nodes")
        per_node = count // (nodes or 1)
        inside, rate, nics = kind.get("scale_up_gbit_s"), kind.get("network_gbit_s"), optional_count(kind, "nics")
        links = {
            "per-node": per_node if nodes else None,
            "scale-up": f"{inside:.6g} Gbit/s" if inside else None,
            "scale-out": f"{rate / per_node:.6g} Gbit/s" if rate else None,
            "nics": nics,
        }
        stated = "".join(f" {name}={value}" for name, value in links.items() if value is not None)
        speed = kind.get("speed")
        pools.append(f"{count}@{kind['chip']}{stated}" + (f"*{speed:g}" if speed else ""))
    text = "+".join(pools) if len(pools) > 1 else pools[0].partition("@")[2]
    return HardwareOfCase(chip=inputs["chips"][0]["chip"], num_chips=num_chips, cluster=text)
