"""What the name of a training framework says of a published run that does not say it itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.parallel.profile import GENERIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Defaults of one framework.

    pattern      what its name looks like (the first that matches wins)
    profile      execution profile
    attention    kernel, where the run states none
    zero         ZeRO stage, where the run states neither a stage nor a distributed optimizer
    recompute    where the run states none
    sequence_parallel   with tensor parallelism, where the run does not say
    selective    operators that "selective" recomputation runs again; selective_sharded: of runs under ZeRO 3, where that is something else
    interleaves  the most virtual stages of a pipeline whose number the run does not state; 1: none
    fills_memory one pass over the local batch where the run states no micro-batch (else micro-batches of one sequence)
    memory_kind  what its memory figures count: reserved (all that the allocator holds) or allocated (what is in tensors)
    memory_rank  the pipeline rank that they are of: first, last or the fullest
    adapters     what a run trains of which no more is known than that it trains adapters only
    borrows      the profile is that of its nearest relative: an interval is wider
    folds_experts   the tensor parallelism inside an expert is 1 where the run does not state it (else that of attention)
    dispatcher   how tokens reach their experts, where the run does not say
    flex_on      chips, by the beginning of their names, on which that is flex
    graphs_experts_on    chips on which its recipes run models with experts under CUDA graphs; elsewhere they launch as Megatron-LM does;
                         None: as the profile has it
    hides_exchanges_on   chips on which what experts exchange travels beside another microbatch, where the schedule has one for it
    settings     of its setup, where the run does not state them (docs/settings.md)
    """

    pattern: str
    profile: str
    attention: str = "flash"
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = False
    selective: tuple[str, ...] = ("attention_core",)
    selective_sharded: tuple[str, ...] = ()
    interleaves: int = 1
    fills_memory: bool = False
    memory_kind: str = "reserved"
    memory_rank: str = "fullest"
    adapters: str = "lora:16"
    borrows: bool = False
    folds_experts: bool = False
    dispatcher: str = "alltoall"
    flex_on: tuple[str, ...] = ()
    graphs_experts_on: tuple[str, ...] | None = None
    hides_exchanges_on: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def setup(self, stated: object) -> dict[str, Any]:
        """What is known of the setup of a run that states this."""
        return {**self.settings, **stated} if isinstance(stated, Mapping) else dict(self.settings)


#: torch's selective activation checkpointing as torchtitan sets it: every second matrix multiply and everything elementwise runs
#: again, the outputs of attention and of the others are kept (torchtitan, parallelize_llama.py, `_save_list`). q is kept before the
#: rotary embedding, the output of the down projection in place of the sum that it enters: as large as what is kept here.
_TITAN_SELECTIVE = (
    "attention_norm",
    "mlp_norm",
    "k_rotary",
    "activation",
    "gate_product",
    "k_proj",
    "o_proj",
    "up_proj",
)

#: Weights are stored and gathered in 8 bits wherever a tensor has one scale: `fp8_param_gather=True` of such precisions in NeMo 2 and
#: Megatron-Bridge (`mixed_precision.py`), `fp8_params: True` in the launcher's configurations; of mxfp8 it changes nothing here.
_NEMO = Framework(
    pattern=r"nemo|megatron-bridge",
    profile="nemo",
    zero=1,
    sequence_parallel=True,
    interleaves=12,
    adapters="lora:16:q_proj+k_proj+v_proj",
    graphs_experts_on=("gb200", "gb300"),
    settings={"fp8_params": True},
)

_MEGATRON = Framework(pattern=r"megatron|transformer engine", profile="megatron", zero=1, memory_kind="allocated")

FRAMEWORKS = (
    Framework(pattern=r"deepspeed.*zero-?3", profile="deepspeed", attention="unfused", zero=3),
    Framework(pattern=r"megatron-?deepspeed|deepspeed", profile="deepspeed", attention="unfused"),
    Framework(pattern=r"megatron-lm (2020|\(sc21\)|\(ptd-p\))", profile="megatron-2020", attention="unfused"),
    Framework(pattern=r"megatron-lm \(2022\)", profile="megatron", attention="unfused"),
    Framework(pattern=r"megascale", profile="megatron", zero=2, borrows=True),
    # its continuous integration records the allocator's peak on the rank that logs, the last one
    Framework(pattern=r"megatron-lm dev", profile="megatron", memory_kind="allocated", memory_rank="last"),
    # every recipe of theirs over a pipeline that states its virtual stages has 4 to 20; adapters are beside queries, keys and values alone
    # (`peft.target_modules = ["linear_qkv"]`)
    # its recipes of models with experts set `expert_tensor_parallel_size=1`, whatever tp is, HybridEP and CUDA graphs on NVL72, neither on
    # nodes of eight, and on Hopper `moe_a2a_overlap` (scripts/performance/configs of v0.2 to v0.4)
    replace(_NEMO, pattern=r"megatron-bridge", folds_experts=True, flex_on=("gb200", "gb300"), hides_exchanges_on=("h100", "h200")),
    _NEMO,
    # SimuMax's scripts pass neither `--overlap-grad-reduce` nor `--overlap-param-gather` (simu_tools/megatron_scripts): they measure
    # "a non-overlap contract" (docs/b200/b200_real_repro_guide.md)
    replace(_MEGATRON, pattern=r"simumax", settings={"gradient_bucketing": False}),
    _MEGATRON,
    Framework(pattern=r"nanotron", profile="nanotron", memory_rank="first"),
    Framework(pattern=r"llm-?foundry|composer|mosaic", profile="composer-fsdp", zero=3, fills_memory=True),
    Framework(pattern=r"torchtitan", profile="torchtitan", zero=3, sequence_parallel=True, selective=_TITAN_SELECTIVE, fills_memory=True),
    Framework(pattern=r"fsdp|pytorch|meta internal", profile="torch-fsdp2", zero=3, selective=_TITAN_SELECTIVE, fills_memory=True),
    Framework(pattern=r"maxtext|paxml|jax|maxdiffusion", profile="xla", zero=3, recompute="full", fills_memory=True, borrows=True),
    Framework(pattern=r"llm\.c", profile="llm-c"),
    Framework(pattern=r"colossal", profile="megatron", borrows=True),
    # who cuts parameters does it with torch's FSDP or after its example, and recomputes as its selective checkpoints do
    Framework(pattern=r".*", profile=GENERIC, zero=1, sequence_parallel=True, selective_sharded=_TITAN_SELECTIVE, borrows=True),
)


def framework_of(name: object) -> Framework:
    """The framework that a run names; an unknown or missing name is nobody's: `generic`, and ZeRO 1 where there are replicas."""
    text = name.lower()[:200] if isinstance(name, str) else ""
    return next(framework for framework in FRAMEWORKS if re.match(f".*(?:{framework.pattern})", text, re.DOTALL))


def assumed_virtual_stages(framework: Framework, num_layers: int, pp: int) -> int:
    """Of a pipeline whose run does not state them: the most that the framework interleaves and that cut the layers evenly."""
    for stages in range(framework.interleaves, 1, -1):
        if num_layers % (pp * stages) == 0 or stage_layers_with_ends(num_layers, pp * stages) is not None:
            return stages
    return 1


def stage_layers_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding and the head count as a layer each, if that and only that makes the stages even.

    Source: Megatron-Core's `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split` (Llama 3.1 405B: 126 layers).
    """
    if num_stages < 2 or num_layers % num_stages == 0 or (num_layers + 2) % num_stages:
        return None
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)
