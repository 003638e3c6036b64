"""Plans that the executor of this package cannot run, or that torch would run wrongly, with the reason in one sentence.

A plan can run in two ways: with torch's own modules under torch's tensor parallelism, or with an interpreter of the graph, which shards
operators by any rules (`per_operator/by_rules.py`). The first is preferred. A plan that is not executable is still predicted, because
other frameworks may run it.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.reader import LOCALHOST, load_cluster
from perfmodel.parallel.algebra.degrees import present_axes
from perfmodel.parallel.algebra.folding import EXPERT_AXES
from perfmodel.parallel.assignment import cuts_as
from perfmodel.parallel.choices import AttentionKernel, Dispatcher, PipelineSchedule, Recompute, ZeroStage, num_rounds, rounds_rule
from perfmodel.parallel.compression import NO_COMPRESSION
from perfmodel.parallel.grid import make_grid
from perfmodel.parallel.layout import DEFAULT_ORDER, Placement
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS, Plan, tokens_of_rank
from perfmodel.workload.job import Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.routing import RoutingCounts, counts_in_turn
from perfmodel.workload.training import FULL_TRAINING, Method

#: Rule sets that the executor runs, and with them every rule set that shards operators as one of these on the axes in use.
RULE_SETS = ("megatron", "megatron-sp", "ulysses", "megatron-ulysses")


def executed_precision(job: TrainingJob) -> Precision:
    """Return the precision in which the executor computes a job: bf16-mixed in place of scaled losses and of scaled products."""
    return Precision.BF16_MIXED if job.precision is Precision.FP16_MIXED or job.policy.recipe is not None else job.precision


def realised_as(plan: Plan) -> str:
    """Return the executor's rule set that shards as the plan's rules; "" if there is none."""
    layout, model = plan.layout, plan.job.transformer
    axes = present_axes(model, cp=layout.cp, tp=layout.tp)
    return cuts_as(RULE_SETS, plan.rules, model, str(plan.attention), axes)


def not_executable_reason(plan: Plan) -> str:
    """Return why the executor cannot run a plan of this form on any machine; "" if it can."""
    network = plan.job.model
    if plan.job.policy.recipe is not None:
        return f"precision={plan.job.precision}: the executor has no products in fewer bits than bf16; use bf16-mixed"
    if isinstance(network, NetworkModel):
        if plan.schedule.splits_backward or plan.schedule.is_simulated:
            return f"schedule={plan.schedule}: the interpreter runs backward passes as a whole; use 1f1b"
        return f"network={network.name}: is your own code, whose operators are not imported" if network.is_imported else ""
    train = plan.job.train
    if train.method is Method.GALORE:
        return f"train={train}: the executor projects no gradients; use train=full"
    if train.decomposes or train.quantizes_base:
        plain = replace(train, method=Method.LORA, base="")
        lacks = "magnitudes of rows" if train.decomposes else f"weights in {train.base}"
        return f"train={train}: the executor has no {lacks}; use train={plain}"
    if train.num_adapters > 1:
        return f"train={train}: the executor has one adapter at a time; use train={replace(train, num_adapters=1)}"
    if not plan.job.optimizer.is_plain:
        return f"optimizer={plan.job.optimizer}: the executor has torch's own; use sgd, momentum, adam or adamw"
    reason = not_modules_reason(plan)
    if reason and plan.compression != NO_COMPRESSION:
        return f"gradient_compression={plan.compression}: the interpreter that runs such plans sums gradients as they are; use none"
    if not reason or plan.has_experts or (network.parts.latent is not None and network.parts.latent.index_heads):
        return reason  # the interpreter has no experts and no indexer
    from perfmodel.parallel.per_operator.by_rules import interpreter_reason

    other = interpreter_reason(plan)
    if other and not realised_as(plan):
        return f"rules={plan.rule_set}: the executor cuts operators as one of {', '.join(RULE_SETS)} does, otherwise only {other}"
    return reason if other else ""


def not_modules_reason(plan: Plan) -> str:
    """Return why torch's own modules cannot be sharded as the plan does; "" if they can. Audits count the program of these modules."""
    model, layout = plan.job.transformer, plan.layout
    norms, has_sinks = model.norms, model.attention.attention_sinks
    if model.attention.attention_chunk:
        return (
            f"model={model.name}: has attention in chunks, which torch's own modules here do not have; predict it, or use a model without"
        )
    if plan.job.train != FULL_TRAINING:
        return f"train={plan.job.train}: torch's own modules train all parameters, adapters are interpreted; use train=full"
    if not realised_as(plan):
        return f"rules={plan.rule_set}: the executor cuts operators as one of {', '.join(RULE_SETS)} does; use one of these"
    if plan.job.precision is Precision.FP16_MIXED:
        return "precision=fp16-mixed: needs dynamic loss scaling, which the executor does not have; use bf16-mixed"
    if model.num_key_value_heads % layout.tp or model.num_attention_heads % layout.tp:
        return (
            f"tp={layout.tp}: must divide num_key_value_heads={model.num_key_value_heads}, because DTensor cannot store one head on "
            "several ranks; use a smaller tp"
        )
    if model.intermediate_size % layout.tp:
        return f"tp={layout.tp}: must divide intermediate_size={model.intermediate_size}; use a smaller tp"
    if plan.job.seq_len % (layout.cp * (layout.tp if plan.sequence_parallel else 1)):
        return f"cp*tp={layout.cp * layout.tp}: must divide seq_len={plan.job.seq_len}; use smaller degrees"
    if reason := _mixers_reason(plan):
        return reason
    if has_sinks and plan.attention is not AttentionKernel.FLASH:
        return f"attention={plan.attention}: torch's own modules have attention with sinks as one kernel; use attention=flash"
    if has_sinks and plan.rules.exchanges_heads and layout.cp > 1:
        return f"rules={plan.rule_set}: torch's own modules do not deal sinks of attention over cp; use rules=megatron-sp"
    if norms.qk_norm and norms.qk_norm_scope == "own":
        return "qk_norm_scope=own: the executor has no norm with a weight for each head; use another model"
    if norms.qk_norm and norms.qk_norm_scope == "bare":
        return "qk_norm_scope=bare: the executor has no norm without a weight; use another model"
    if norms.qk_norm and norms.qk_norm_scope == "all" and layout.tp > 1:
        return f"tp={layout.tp}: a norm over all heads of {model.name} is not cut by the executor; use tp=1"
    if plan.recompute is Recompute.SELECTIVE and tuple(plan.recompute_operators) != DEFAULT_RECOMPUTE_OPERATORS:
        return (
            f"recompute_operators={','.join(plan.recompute_operators)}: the executor can recompute {','.join(DEFAULT_RECOMPUTE_OPERATORS)} "
            "alone or whole layers; use --recompute full"
        )
    if plan.has_experts and (reason := _experts_reason(plan)):
        return reason
    if plan.job.routing.counts is not None:
        return f"routing={plan.job.routing}: a run takes tokens as they come; audit the plan, or use routing=balanced"
    if plan.job.routing.load != 1.0:
        return f"routing={plan.job.routing}: the executor takes tokens as they come, and audits spread them evenly; use routing=balanced"
    if plan.schedule.splits_backward and (plan.has_experts or any(kind.mixer in ("mamba", "delta") for kind in model.layer_kinds)):
        return f"schedule={plan.schedule}: the executor's experts and scans have one kernel for all their gradients; use schedule=1f1b"
    if plan.schedule.placement is Placement.V and model.num_mtp_layers:
        rule = "the executor's stages are separate modules, of which two on one rank share no table for further tokens"
        return f"schedule={plan.schedule}: {model.name} reads its embedding at both ends, and {rule}; use schedule=1f1b"
    if plan.schedule.placement is Placement.V and model.tie_word_embeddings and plan.zero >= ZeroStage.GRADIENTS:
        rule = "fully_shard shards each of both stages on a rank by itself, so they cannot share a matrix"
        return f"schedule={plan.schedule}: {model.name} reads its embedding at both ends, and {rule}; use zero=0 or 1, or schedule=1f1b"
    if layout.pp > 1:
        if plan.schedule is PipelineSchedule.ONE_F_ONE_B and plan.num_microbatches < layout.pp:
            return (
                f"schedule=1f1b: torch's schedule needs at least pp={layout.pp} microbatches, not {plan.num_microbatches}; "
                "use a smaller micro_batch or schedule=gpipe"
            )
        if plan.schedule.groups and plan.num_microbatches % num_rounds(plan.num_microbatches, layout.pp):
            rule = f"torch's schedule needs a multiple of {rounds_rule(plan.num_microbatches, layout.pp)} as microbatches"
            return f"schedule={plan.schedule}: {rule}, not {plan.num_microbatches}; use another micro_batch"
        for index, layers in enumerate(plan.stage_layers[1:-1], start=1):
            if layers == 0:
                return f"stage_layers[{index}]=0: a stage without weights has nothing to run; give it a layer or use fewer stages"
    return ""


def _mixers_reason(plan: Plan) -> str:
    """Return why torch's own modules cannot have latent attention or recurrent mixers as the plan does."""
    model, cp, latent = plan.job.transformer, plan.layout.cp, plan.job.transformer.parts.latent
    if latent is not None:
        if latent.index_heads and cp > 1:
            return f"cp={cp}: the executor's sparse indexer of {model.name} has whole sequences; use cp=1"
        if plan.attention is not AttentionKernel.FLASH or plan.recompute is Recompute.SELECTIVE:
            rule = "torch's own modules have latent attention as one kernel, which is kept"
            return f"attention={plan.attention}, recompute={plan.recompute}: {rule}; use attention=flash and recompute=none or full"
        if latent.value_head_dim > latent.score_head_dim:
            return f"value_head_dim={latent.value_head_dim}: must not exceed {latent.score_head_dim} in the executor; use another model"
    if any(kind.mixer in ("mamba", "delta") for kind in model.layer_kinds):
        if model.parallel_block:
            return "parallel_block=true: torch's own modules have no state-space or delta mixer parallel to an MLP; use another model"
        if cp > 1:
            return f"cp={cp}: torch's own modules have whole sequences where a mixer has a state; use cp=1"
    return ""


def _experts_reason(plan: Plan) -> str:
    """Return why the executor's mixture of experts differs from the plan's."""
    model, tp = plan.job.transformer, plan.layout.tp
    experts = model.parts.experts
    assert experts is not None
    if reason := _one_hop_reason(plan):
        return reason
    if plan.dispatcher is Dispatcher.ALL_GATHER and plan.etp > 1:
        return f"etp={plan.etp}: the executor gathers tokens only over the ranks that split the experts; use etp=1"
    if experts.bias and plan.etp > 1:
        return f"etp={plan.etp}: the biases of experts of {model.name} are added to whole sums, which ranks that share one lack; use etp=1"
    if experts.bias and plan.dispatcher is Dispatcher.ALL_GATHER:
        return f"dispatcher=allgather: rows are weighted before the last biases of experts of {model.name} are added; use alltoall"
    if model.parallel_block:
        return "parallel_block=true: the executor has experts in the place of an MLP alone; use another model"
    if tp > 1 and not plan.sequence_parallel:
        return f"tp={tp}: the executor's tp ranks send tokens of their own to experts; use sequence_parallel=true"
    if experts.shared_width % tp:
        return f"tp={tp}: must divide the shared experts' width {experts.shared_width}; use a smaller tp"
    return ""


def _one_hop_reason(plan: Plan) -> str:
    """Return why the plan's dispatch differs from the executor's, which sends a token once to each rank, in one hop."""
    if plan.dispatcher is not Dispatcher.FLEX or plan.ep == 1 or plan.cluster == LOCALHOST:
        return ""
    try:
        tiers = load_cluster(plan.cluster, num_chips=plan.num_chips).tiers
    except InputError:  # the file is not on this machine
        return ""
    grid = make_grid(
        {axis: [plan.layout.degree(axis)] for axis in DEFAULT_ORDER},
        [plan.order],
        tier_sizes=[tier.size for tier in tiers],
        num_key_value_heads=plan.job.transformer.num_key_value_heads,
        folding=[plan.folding],
    )
    inside = int(grid.group_inside(EXPERT_AXES)[0][0])
    if inside == plan.ep:
        return ""
    return (
        f"dispatcher=flex: ep={plan.ep} lies on {plan.ep // inside} nodes, to each of which a token travels once, then to the ranks there; "
        "the executor sends it to each rank in one hop; use alltoall, or ep within a node"
    )


def counted_routing(plan: Plan, given: RoutingCounts | None = None) -> RoutingCounts | None:
    """Return the tokens that each rank sends to each expert in an audit: the given counts, else the plan's, else round-robin counts.

    None: each expert gets equally many tokens of each rank, and a token is sent once for each of its experts. Raises InputError where the
    model has no experts, or counts do not match the ranks.
    """
    experts = plan.job.transformer.parts.experts
    if experts is None:
        if given is not None:
            raise InputError(f"routing: {plan.job.transformer.name} has no experts to send tokens to; leave it out")
        return None
    tokens = tokens_of_rank(plan)
    sizes = {"ranks": plan.ep, "num_experts": experts.num_experts, "tokens": tokens, "top_k": experts.top_k}
    given = given or plan.job.routing.counts
    if given is not None:
        given.check(**sizes)
        return given
    rows = tokens * experts.top_k
    if (plan.dispatcher is not Dispatcher.FLEX or plan.ep == 1) and rows % plan.ep == 0 and rows * plan.ep % experts.num_experts == 0:
        return None
    return counts_in_turn(**sizes)
