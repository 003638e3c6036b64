"""Launch commands of a serving plan for vLLM, SGLang and TensorRT-LLM, with config files and notes.

Flags are those of the versions that the engines' profiles name. Sources:
vLLM: engine/arg_utils.py, docs/serving/data_parallel_deployment.md (experts form one group of dp x tp ranks; limits are those of a
data-parallel rank), docs/serving/expert_parallel_deployment.md, docs/serving/context_parallel_deployment.md, vllm/config/parallel.py
SGLang: docs/advanced_features/server_arguments.md, server_args.py, pool_configurator.py (tp-size counts all ranks; with dp attention
chunked-prefill-size and max-running-requests are divided by dp-size)
TensorRT-LLM: commands/serve.py, llmapi/llm_args.py (attention dp takes all of tp_size; max_batch_size is that of a rank)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine import Engine
from perfmodel.parallel.serving_plan import ServingLayout, ServingPlan
from perfmodel.workload.models import hub_id_of
from perfmodel.workload.serving import ServingJob

PREFILL, DECODE = "prefill", "decode"

#: Format of weights -> flags of vLLM and SGLang; other formats are read from the checkpoint.
_FORMAT_FLAGS = {
    "bf16": ("--dtype", "bfloat16"),
    "fp16": ("--dtype", "float16"),
    "fp8": ("--quantization", "fp8"),
    "fp8-weights": ("--quantization", "fp8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """Launch command of one kind of server of a plan.

    command   one shell command line
    copies    number of servers, each on its own chips
    config    content of the file `config_name` that the command reads; else empty
    notes     requirements and further steps
    """

    engine: str
    version: str
    command: str
    copies: int
    config: str = ""
    config_name: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """Launch options of one kind of server. role: prefill or decode with two pools; else empty"""

    layout: ServingLayout
    job: ServingJob
    engine: Engine
    model: str
    chips_per_node: int
    role: str
    copies: int

    @property
    def max_batch(self) -> int:
        return self.layout.max_batch or self.engine.scheduling.max_batch

    @property
    def max_tokens(self) -> int:
        return self.layout.max_tokens or self.engine.scheduling.max_tokens

    @property
    def longest(self) -> int:
        return self.job.input_len.most + self.job.output_len.most

    @property
    def num_nodes(self) -> int:
        return -(-self.layout.chips_per_replica // self.chips_per_node)

    def line(self, words: list[str], notes: tuple[str, ...], **extra: Any) -> LaunchLine:
        engine = self.engine
        return LaunchLine(engine=engine.name, version=engine.version, command=shlex.join(words), copies=self.copies, notes=notes, **extra)

    def notes(self, *, online: tuple[str, ...]) -> tuple[str, ...]:
        """Return the notes. online: formats to which the engine casts a 16-bit checkpoint when it loads it"""
        notes = []
        if self.copies > 1:
            worker = f"{self.role} workers" if self.role else "copies"
            chips = self.layout.chips_per_replica
            notes.append(f"{self.copies} {worker}, {chips} {'chip' if chips == 1 else 'chips'} each, behind a router")
        name = self.job.quantization.checkpoint
        if name in online:
            notes.append(f"a checkpoint in 16 bits is cast to {name} as it loads; with one in {name} leave --quantization out")
        elif not self.job.quantization.is_plain:
            notes.append(f"needs a checkpoint in {name}, which the engine reads from its config")
        if self.num_nodes > 1:
            notes.append(f"spans {self.num_nodes} nodes")
        return tuple(notes)


def launch_lines(plan: ServingPlan, engine: Engine, *, model: str = "MODEL", chips_per_node: int = 8) -> tuple[LaunchLine, ...]:
    """Return the commands that start a plan, one per kind of worker. Raises InputError for an engine without a known command.

    model   for the engine to load: a name on the hub or a path; the checkpoint must have the job's format
    """
    family = family_of(engine)
    of = _FAMILIES.get(family)
    if of is None:
        known = ", ".join(sorted(_FAMILIES))
        raise bad_field("engine", engine.name, "is started in ways that are not known here", f"use one of {known}")

    def server(one: ServingLayout, copies: int, role: str = "") -> LaunchLine:
        return of(_Server(layout=one, job=plan.job, engine=engine, model=model, chips_per_node=chips_per_node, role=role, copies=copies))

    if isinstance(plan.layout, ServingLayout):
        return (server(plan.layout, plan.layout.replicas),)
    pools = plan.layout
    return server(pools.prefill, pools.prefill_workers, PREFILL), server(pools.decode, pools.decode_workers, DECODE)


def can_launch(engine: Engine) -> bool:
    """Whether the command that starts the engine is known."""
    return family_of(engine) in _FAMILIES


def family_of(engine: Engine) -> str:
    """Return vllm, sglang or tensorrt-llm; the engine's own name if it is none of them."""
    name = engine.name
    if name == "vllm" or name.startswith("vllm-"):
        return "vllm"
    return "tensorrt-llm" if name.startswith("tensorrt-llm") and engine.runs.attention_dp != "none" else name


def _vllm(server: _Server) -> LaunchLine:
    layout, job, engine = server.layout, server.job, server.engine
    words = ["vllm", "serve", server.model]
    words += _sizes({"tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp, "data-parallel-size": layout.attention_dp})
    words += _sizes({"decode-context-parallel-size": layout.dcp, "prefill-context-parallel-size": layout.pcp})
    words += ["--enable-expert-parallel"] if layout.ep > 1 else []
    words += ["--max-num-seqs", str(server.max_batch)]
    words += ["--max-num-batched-tokens", str(server.max_tokens)]
    words += ["--max-model-len", str(server.longest), "--gpu-memory-utilization", f"{engine.memory.memory_fraction:g}"]
    words += _FORMAT_FLAGS.get(job.quantization.name, ())
    words += ["--kv-cache-dtype", "fp8"] if job.kv_precision is Dtype.FP8 else []
    words += ["--enforce-eager"] if not engine.host.has_graphs else []
    if job.speculation is not None:
        drafted = {"num_speculative_tokens": job.speculation.draft_tokens}
        by = {"method": "mtp"} if job.speculation.draft is None else {"model": hub_id_of(job.speculation.draft.name)}
        words += ["--speculative-config", json.dumps(by | drafted)]
    if server.role:
        words += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    notes = server.notes(online=("fp8",))
    if layout.pcp > 1 and engine.runs.prefill_context_since:
        notes += (f"needs {engine.name} {engine.runs.prefill_context_since} or later for --prefill-context-parallel-size",)
    if server.num_nodes > 1 and layout.attention_dp == 1:
        words += ["--distributed-executor-backend", "ray"]
    elif server.num_nodes > 1:
        local = max(server.chips_per_node * layout.attention_dp // layout.chips_per_replica, 1)
        words += ["--data-parallel-size-local", str(local), "--data-parallel-address", "HEAD_NODE"]
        notes += ("on the other nodes the same with --headless and --data-parallel-start-rank",)
    return server.line(words, notes)


def _sglang(server: _Server) -> LaunchLine:
    layout, job, engine = server.layout, server.job, server.engine
    dp = layout.attention_dp
    words = ["python", "-m", "sglang.launch_server", "--model-path", server.model]
    words += _sizes({"tp-size": layout.tp * dp, "pp-size": layout.pp, "dp-size": dp})
    words += ["--enable-dp-attention"] if dp > 1 else []
    words += _sizes({"ep-size": layout.ep})
    words += ["--max-running-requests", str(server.max_batch * dp)]
    words += ["--chunked-prefill-size", str(server.max_tokens * dp)]
    words += ["--context-length", str(server.longest)]
    if engine.memory.memory_fraction < 1.0:  # otherwise the engine's own rule
        words += ["--mem-fraction-static", f"{engine.memory.memory_fraction:g}"]
    words += _FORMAT_FLAGS.get(job.quantization.name, ())
    words += ["--kv-cache-dtype", "fp8_e4m3"] if job.kv_precision is Dtype.FP8 else []
    if job.speculation is not None:
        drafted = job.speculation.draft_tokens
        words += ["--speculative-algorithm", "EAGLE" if job.speculation.draft is None else "STANDALONE"]
        words += ["--speculative-draft-model-path", hub_id_of(job.speculation.draft.name)] if job.speculation.draft is not None else []
        words += ["--speculative-num-steps", str(drafted), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(drafted + 1)]
    words += ["--disaggregation-mode", server.role] if server.role else []
    notes = server.notes(online=("fp8",))
    if server.num_nodes > 1:
        words += ["--nnodes", str(server.num_nodes), "--node-rank", "RANK", "--dist-init-addr", "HEAD_NODE:20000"]
    return server.line(words, notes)


def _tensorrt_llm(server: _Server) -> LaunchLine:
    layout, job, engine = server.layout, server.job, server.engine
    name = f"{server.role or 'serve'}.yaml"
    words = ["trtllm-serve", server.model, "--backend", "pytorch"]
    words += ["--tp_size", str(layout.tp * layout.attention_dp), "--pp_size", str(layout.pp)]
    words += ["--ep_size", str(layout.ep)] if job.model.parts.experts is not None else []
    words += ["--max_batch_size", str(server.max_batch), "--max_num_tokens", str(server.max_tokens)]
    words += ["--max_seq_len", str(server.longest), "--kv_cache_free_gpu_memory_fraction", f"{engine.memory.memory_fraction:g}"]
    words += ["--extra_llm_api_options", name]
    lines = [
        f"enable_attention_dp: {str(layout.attention_dp > 1).lower()}",
        f"enable_chunked_prefill: {str(engine.scheduling.has_chunks).lower()}",
    ]
    lines += ["attention_dp_config:", "  enable_balance: true"] if layout.attention_dp > 1 and engine.scheduling.gathers_prompts else []
    lines += ["kv_cache_config:", f"  dtype: {'fp8' if job.kv_precision is Dtype.FP8 else 'auto'}"]
    lines += ["cuda_graph_config:", "  enable_padding: true", f"  max_batch_size: {server.max_batch}"]
    if job.speculation is not None:
        lines += ["speculative_config:"]
        if job.speculation.draft is None:
            lines += ["  decoding_type: MTP", f"  num_nextn_predict_layers: {job.speculation.draft_tokens}"]
        else:
            lines += ["  decoding_type: DraftTarget", f"  max_draft_len: {job.speculation.draft_tokens}"]
            lines += [f"  speculative_model_dir: {hub_id_of(job.speculation.draft.name)}"]
    notes = server.notes(online=())
    if server.role:
        lines += ["cache_transceiver_config:", "  backend: DEFAULT"]
        notes += ("`trtllm-serve disaggregated -c` joins the workers: context_servers are those of prefill, generation_servers of decode",)
    if server.num_nodes > 1:
        words = ["trtllm-llmapi-launch", *words]
        notes += (f"start it by srun or mpirun with {layout.chips_per_replica} ranks, {server.chips_per_node} a node",)
    return server.line(words, notes, config="\n".join(lines) + "\n", config_name=name)


_FAMILIES: dict[str, Callable[[_Server], LaunchLine]] = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt_llm}


def _sizes(flags: dict[str, int]) -> list[str]:
    return [word for name, value in flags.items() if value > 1 for word in (f"--{name}", str(value))]


__all__ = ["LaunchLine", "family_of", "launch_lines"]
