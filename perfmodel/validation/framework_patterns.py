"""What the name of a training framework says of a published run that does not say it itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perfmodel.frameworks.profile import GENERIC


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
    has_recipes  the release in its name says how its recipes run models with experts (strategies/releases)
    trains_mtp   its models have the modules for further tokens that their configs state, where the run does not say
    forces_neighbours   balanced routing that is forced sends a token to neighbouring experts, else to any
    settings     of its setup, where the run does not state them (docs/settings.md)
    of_method    the same of runs whose `method` has this word: full, lora, qlora, rl
    breaks_compile   words of methods whose modules torch.compile cannot keep in one graph, whatever the run states
    words        values of settings as its users state them -> what they mean here
    sharded      execution profile of runs that state a ZeRO stage above 0; "": the same
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
    has_recipes: bool = False
    trains_mtp: bool = True
    forces_neighbours: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    breaks_compile: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sharded: str = ""

    def setup(self, stated: object, method: object = None) -> dict[str, Any]:
        """What is known of the setup of a run that states this."""
        found = dict(self.settings)
        for word in re.findall(r"[a-z0-9]+", method.lower()) if isinstance(method, str) else ():
            found |= self.of_method.get(word, {})
        for name, value in stated.items() if isinstance(stated, Mapping) else ():
            meanings = self.words.get(name, {})
            found[name] = meanings.get(value, value) if isinstance(value, str) else value
        if isinstance(method, str) and any(word in method.lower() for word in self.breaks_compile):
            found["compile"] = False
        return found

    def when_sharded(self, zero_stage: object) -> Framework:
        """As it runs where ZeRO shards what it trains."""
        if not self.sharded or zero_stage not in (1, 2, 3):
            return self
        return replace(self, profile=self.sharded, settings={**self.settings, "pure_bf16": None}, of_method={})


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
    has_recipes=True,
    zero=1,
    sequence_parallel=True,
    interleaves=12,
    adapters="lora:16:q_proj+k_proj+v_proj",
    graphs_experts_on=("gb200", "gb300"),
    settings={"fp8_params": True},
)

_MEGATRON = Framework(pattern=r"megatron|transformer engine", profile="megatron", zero=1, memory_kind="allocated")

#: Trainers on Hugging Face's models: 24 bytes a logit at the loss (16-bit logits and a shifted copy 4, a float32 cast 4, log-probabilities
#: 4, their gradients 8, and the copy of a model's outputs that accelerate makes 4: `convert_outputs_to_fp32`); torch's AdamW with foreach
#: (transformers 4.37, `trainer.py`: adamw_torch); weights of full fine-tuning in the bf16 in which they are loaded, dropout of 0.05 before
#: adapters (ms-swift 1.5, `swift/llm/sft.py`, `argument.py`), but under DeepSpeed, which has float32 masters. The allocator's factor is
#: that of 44 runs of ms-swift over texts of mixed lengths (half of them between 1.2 and 1.8), prime-rl's that of 59 runs of its trainer
#: (half between 1.3 and 1.6; of supervised runs, whose peak is the few large tensors of the loss, 1.0 to 1.1).
_HUGGING_FACE = Framework(
    pattern=r"ms-swift.*transformers|llama-?factory|\bpeft\b",
    profile="torch-fsdp2",
    settings={
        "float32_logits": True,
        "loss_memory": 24.0,
        "float32_norms": True,
        "adapter_dropout": True,
        "fused_optimizer": False,
        "allocator_factor": 1.6,
    },
    of_method={"full": {"pure_bf16": True}, "qlora": {"float32_rest": True}},
    sharded="deepspeed",
)

FRAMEWORKS = (
    # `src/prime_rl/trainer` of 2026-02: fully_shard with float32 weights, frozen ones too (`optimization_dtype`, model.py), logits copied
    # to float32 (`cast_float_and_contiguous`, layers/lm_head.py); RL: log-probabilities in chunks of the vocabulary, in float32:
    # 56 bytes of traffic a logit forward, 62 backward, and 12 for what is added up (`_ChunkedLogProbEntropyFn`). Every adapter repeats its
    # factors by a tensor (`repeat_interleave`, layers/lora/multi_linear.py), at which torch.compile breaks the graph of a layer
    Framework(
        pattern=r"prime-rl",
        profile="torch-fsdp2",
        zero=3,
        settings={"frozen_weights": "float32", "float32_logits": True, "fused_optimizer": False, "allocator_factor": 1.5},
        of_method={"rl": {"loss": "chunked", "float32_logits": False, "loss_traffic": 130.0}, "sft": {"allocator_factor": 1.05}},
        breaks_compile=("lora",),
    ),
    # AnswerDotAI/fsdp_qlora, train.py: precision bf16 is all in bf16, Hugging Face's Llama, `max_memory_reserved`
    replace(
        _HUGGING_FACE,
        pattern=r"fsdp_qlora",
        zero=3,
        settings={"float32_logits": True, "float32_norms": True, "adapter_dropout": True, "fused_optimizer": False, "pure_bf16": True},
        sharded="",
    ),
    # litgpt 0.4, finetune/lora.py: bf16-true, logits in chunks of 128 tokens that the loss works on one by one in bf16 and that stay with
    # their log-probabilities, `max_memory_allocated`
    Framework(
        pattern=r"litgpt|lit-gpt",
        profile="torch-fsdp2",
        memory_kind="allocated",
        settings={
            "pure_bf16": True,
            "loss_memory": 6.0,
            "float32_norms": True,
            "adapter_dropout": True,
            "fused_optimizer": False,
        },
    ),
    # torchtune 0.5, recipes and README: bf16 weights, CEWithChunkedOutputLoss keeps the logits and copies an eighth of them to float32 at a
    # time; peak of active memory
    Framework(
        pattern=r"torchtune",
        profile="torch-fsdp2",
        memory_kind="allocated",
        settings={"pure_bf16": True, "loss": "upcast", "fused_optimizer": True},
        words={"loss": {"chunked": "upcast"}},
    ),
    replace(
        _HUGGING_FACE,
        pattern=r"axolotl",
        settings={"loss": "fused", "float32_norms": True, "adapter_dropout": True, "allocator_factor": 1.6},
    ),
    _HUGGING_FACE,
    Framework(pattern=r"deepspeed.*zero-?3", profile="deepspeed", attention="unfused", zero=3),
    Framework(pattern=r"megatron-?deepspeed|deepspeed", profile="deepspeed", attention="unfused"),
    Framework(pattern=r"megatron-lm (2020|\(sc21\)|\(ptd-p\))", profile="megatron-2020", attention="unfused"),
    Framework(pattern=r"megatron-lm \(2022\)", profile="megatron", attention="unfused"),
    Framework(pattern=r"megascale", profile="megatron", zero=2, borrows=True),
    # its continuous integration records the allocator's peak on the rank that logs, the last one
    Framework(pattern=r"megatron-lm dev", profile="megatron", memory_kind="allocated", memory_rank="last"),
    # torch's FSDP2 whatever its name says, with kernels of Transformer Engine and DeepEP where a run states them
    # (BackendConfig, components/moe/utils.py); its models have no modules for further tokens (components/models/deepseek_v3 of v0.2), and
    # FakeBalancedGate (components/moe/layers.py) gives token i the experts from i k on
    Framework(
        pattern=r"automodel",
        profile="nemo-automodel",
        zero=3,
        sequence_parallel=True,
        folds_experts=True,
        borrows=True,
        trains_mtp=False,
        forces_neighbours=True,
    ),
    # every recipe of theirs over a pipeline that states its virtual stages has 4 to 20; adapters are beside queries, keys and values alone
    # (`peft.target_modules = ["linear_qkv"]`)
    # its recipes of models with experts set `expert_tensor_parallel_size=1`, whatever tp is, HybridEP and CUDA graphs on NVL72, neither on
    # nodes of eight, and on Hopper `moe_a2a_overlap` (scripts/performance/configs of v0.2 to v0.4)
    replace(
        _NEMO,
        pattern=r"megatron-bridge",
        folds_experts=True,
        flex_on=("gb200", "gb300"),
        hides_exchanges_on=("h100", "h200"),
    ),
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
    Framework(pattern=r"internevo|internlm", profile="internevo", zero=1, borrows=True),
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
