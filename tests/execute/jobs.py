"""Small jobs for the executor's tests, and functions that its workers run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

from perfmodel.execute.launch.launch import Worker
from perfmodel.parallel.plan import Plan, make_plan
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.layer_specs import DeltaNet, Experts, LatentAttention, LayerSpec, Mamba
from perfmodel.workload.routing import RoutingCounts

LLAMA = dict(
    name="tiny-llama", architecture="llama", num_hidden_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=4,
    head_dim=8, intermediate_size=96, vocab_size=131, max_position_embeddings=64, gated_mlp=True, activation="silu", norm="rmsnorm",
    position="rotary", qkv_bias=False, attention_output_bias=False, mlp_bias=False, norm_bias=False, tie_word_embeddings=False,
)  # fmt: skip
#: What differs from LLAMA in each variant.
VARIANTS = {
    "llama": {},
    "gpt2": dict(
        gated_mlp=False, activation="gelu_tanh", norm="layernorm", position="learned", qkv_bias=True, attention_output_bias=True,
        mlp_bias=True, norm_bias=True, tie_word_embeddings=True, num_key_value_heads=8, position_offset=2,
    ),
    "qwen3": dict(qk_norm=True, qkv_bias=True, tie_word_embeddings=True),
    "falcon": dict(parallel_block=True, shared_norm=True, gated_mlp=False, activation="gelu", norm="layernorm", norm_bias=True),
    "neox": dict(parallel_block=True, gated_mlp=False, activation="gelu", norm="layernorm", norm_bias=True, qkv_bias=True,
                 attention_output_bias=True, mlp_bias=True, num_key_value_heads=8),
    "gemma2": dict(sandwich_norm=True, sliding_window=8, full_attention_every=2, tie_word_embeddings=True, activation="gelu_tanh"),
    "smollm3": dict(no_rotary_every=2, tie_word_embeddings=True),
    "olmo2": dict(pre_norm=False, sandwich_norm=True, qk_norm=True, qk_norm_scope="all"),
    "bloom": dict(position="alibi", embedding_layernorm=True, norm="layernorm", norm_bias=True, gated_mlp=False, activation="relu",
                  lm_head_bias=True),
}  # fmt: skip
#: Latent attention; two dense layers, then layers with experts.
LATENT = LatentAttention(query_rank=24, key_value_rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=6)
DENSE_FIRST = (
    LayerSpec(name="dense_layer", count=2, mixer="latent"),
    LayerSpec(name="layer", count=2, mixer="latent", feed_forward="experts"),
)
#: With experts: alone, and with shared experts and groups.
EXPERT_VARIANTS = {
    "mixtral": dict(experts=Experts(num_experts=8, top_k=2, width=24)),
    "shared experts": dict(
        experts=Experts(num_experts=8, top_k=4, width=24, shared_width=32, shared_gate=True, score="sigmoid", num_groups=4, top_groups=2),
    ),
    "deepseek": dict(
        experts=Experts(num_experts=8, top_k=2, width=24, shared_width=24), latent=LATENT, num_key_value_heads=8, kinds=DENSE_FIRST
    ),
}
#: With sinks, windows, and biases of all that has them.
BIASED = {
    "gpt-oss": dict(
        experts=Experts(num_experts=8, top_k=2, width=24, bias=True, router_bias=True),
        attention_sinks=True, sliding_window=8, full_attention_every=2, qkv_bias=True, attention_output_bias=True,
    ),
}  # fmt: skip
SPARSE = replace(LATENT, index_heads=4, index_head_dim=8, index_top=12)
#: Latent attention to the keys that an indexer chooses, with experts and without.
SPARSE_VARIANTS = {
    "sparse": dict(latent=SPARSE, num_key_value_heads=8),
    "glm-5": dict(
        experts=Experts(num_experts=8, top_k=2, width=24, shared_width=24, score="sigmoid"), latent=SPARSE, num_key_value_heads=8,
        kinds=DENSE_FIRST, num_mtp_layers=1,
    ),
}  # fmt: skip
#: What attention gives is scaled by a gate of each entry.
GATED = {"gated": dict(attention_gate=True, qk_norm=True)}
LATENT_VARIANTS = {"latent": dict(latent=LATENT, num_key_value_heads=8)}
#: Mixers with a state: with experts, as in Qwen3-Next (gated attention in every second layer) and Nemotron, and without.
STATE = Mamba(num_heads=8, head_dim=4, num_groups=4, state_size=6, conv_kernel=4, chunk_size=8)
DELTA = DeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=4, conv_kernel=4, chunk_size=8)
STATE_VARIANTS = {
    "qwen3-next": dict(
        experts=Experts(num_experts=8, top_k=2, width=24, shared_width=24, shared_gate=True), delta=DELTA, attention_gate=True,
        qk_norm=True,
        kinds=(
            LayerSpec(name="layer", count=2, mixer="delta", feed_forward="experts", turn="t"),
            LayerSpec(name="attention_layer", count=2, feed_forward="experts", turn="t"),
        ),
    ),
    "nemotron": dict(
        experts=Experts(num_experts=8, top_k=2, width=24, gated=False, shared_width=24, score="sigmoid"), mamba=STATE, gated_mlp=False,
        activation="relu2", position="none",
        kinds=(
            LayerSpec(name="layer", count=1, mixer="mamba", feed_forward="none", turn="t"),
            LayerSpec(name="experts_layer", count=2, mixer="none", feed_forward="experts", turn="t"),
            LayerSpec(name="attention_layer", count=1, feed_forward="none", turn="t"),
        ),
    ),
    "hybrid": dict(
        mamba=STATE, attention_gate=True,
        kinds=(LayerSpec(name="layer", count=2, mixer="mamba", turn="t"), LayerSpec(name="attention_layer", count=2, turn="t")),
    ),
}  # fmt: skip
EXPERT_VARIANTS |= {f"{name}, further tokens": {**EXPERT_VARIANTS[name], "num_mtp_layers": 2} for name in ("mixtral", "deepseek")}


def tiny(variant: str = "llama", **changes: object) -> TransformerConfig:
    return TransformerConfig.of(
        **{
            **LLAMA,
            **(VARIANTS | EXPERT_VARIANTS | BIASED | LATENT_VARIANTS | STATE_VARIANTS | SPARSE_VARIANTS | GATED)[variant],
            "name": f"tiny-{variant}",
            **changes,
        }
    )  # type: ignore[arg-type]


def tiny_plan(
    num_chips: int,
    *,
    model: TransformerConfig | None = None,
    batch: int = 8,
    seq_len: int = 32,
    precision: Precision = Precision.FP32,
    optimizer: Optimizer = Optimizer.ADAMW,
    **knobs: object,
) -> Plan:
    job = TrainingJob(model=model or tiny(), global_batch=batch, seq_len=seq_len, precision=precision, optimizer=optimizer)
    return make_plan(job, cluster="localhost", num_chips=num_chips, **knobs)  # type: ignore[arg-type]


def worst_error(results: list[dict[str, float]]) -> tuple[str, float]:
    """Name and size of the largest error on any rank; nan counts as infinite."""
    return max(
        ((name, error if error == error else float("inf")) for errors in results for name, error in errors.items()),
        key=lambda item: item[1],
    )


# ------------------------------------------------------------------------------------ functions that the workers run


def rank_of(worker: Worker) -> int:
    return worker.rank


def echo(worker: Worker, value: str) -> str:
    return value


def fail_on_rank(worker: Worker, rank: int, how: str) -> None:
    """Every rank takes steps together; one of them ends or stops in the way that `how` names."""
    import torch
    import torch.distributed as dist

    for step in range(1000):
        worker.beat(f"step {step}")
        if step == 3 and worker.rank == rank:
            match how:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    os._exit(7)
                case "raise":
                    raise ValueError("a fault of its own")
                case "sleep":
                    time.sleep(3600)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "spin":
                    while True:
                        pass
        dist.all_reduce(torch.ones(8))


def check_with_lost_norm_gradients(worker: Worker, plan: Plan) -> dict[str, float]:
    """The gradient check of a program that forgets to add up the norm weights' gradients over tp."""
    from perfmodel.execute.uniform.data_parallel import FlatData
    from perfmodel.execute.uniform.gradient_check import check_gradients_on_rank

    original = FlatData._reduce_partial
    FlatData._reduce_partial = lambda self: None  # type: ignore[method-assign]
    try:
        return check_gradients_on_rank(worker, plan)
    finally:
        FlatData._reduce_partial = original  # type: ignore[method-assign]


def check_with_lost_error_feedback(worker: Worker, plan: Plan) -> dict[str, float]:
    """The gradient check of a program whose hooks forget what their factors leave out."""
    from perfmodel.execute.compression import GradientHook
    from perfmodel.execute.uniform.gradient_check import check_gradients_on_rank

    original = GradientHook.lost
    GradientHook.lost = lambda self: None  # type: ignore[method-assign]
    try:
        return check_gradients_on_rank(worker, plan)
    finally:
        GradientHook.lost = original  # type: ignore[method-assign]


def reduced_by_ddp_and_by_unit(worker: Worker, word: str):
    """Gradients of a module under DDP with torch's hook in its third iteration, those of a flat unit with the same ones, and the factors'
    documented math; and the bytes of the all-reduces of both."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from perfmodel.execute.compression import GradientHook
    from perfmodel.parallel.compression import compression_of

    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 24, bias=False))
    inputs = torch.randn(16, 48, generator=torch.Generator().manual_seed(worker.rank))
    compression = compression_of(word)
    sent: list[tuple[int, int]] = []
    original = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append((tensor.numel(), tensor.element_size()))
        return original(tensor, *args, **kwargs)

    def backward(of: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        of(inputs).square().mean().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    local = backward(module)
    ddp = nn.parallel.DistributedDataParallel(module)
    if compression.is_low_rank:
        state = PowerSGDState(None, matrix_approximation_rank=compression.rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        ddp.register_comm_hook(None, fp16_compress_hook)
    dist.all_reduce = counted
    try:
        for _ in range(3):  # the buckets are built again after the first, and the second is plain
            sent.clear()
            of_ddp = backward(ddp)
        by_ddp = list(sent)
        sent.clear()
        # DDP's buckets hold gradients in the order in which backward computes them, the last first
        order = list(reversed(range(len(local))))
        hook = GradientHook(compression, dist.group.WORLD, [tuple(local[i].shape) for i in order])
        buffer = torch.cat([local[i].flatten() for i in order])
        hook.reduce(buffer).wait()
        by_unit = list(sent)
    finally:
        dist.all_reduce = original
    of_unit = dict(zip(order, buffer.split([local[i].numel() for i in order]), strict=True))
    means = []
    for gradient in local:
        mean = gradient.clone()
        dist.all_reduce(mean)
        means.append(mean / worker.world_size)
    # P P^T M, with P an orthonormal basis of M Q and Q the orthonormal draws of the state's generator
    expected = [mean.double().numpy() for mean in means]
    torch.manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i in order:
        if compression.is_low_rank and expected[i].ndim == 2:
            shapes.setdefault(expected[i].shape, []).append(i)
    for i in (i for same in shapes.values() for i in same):
        rank = int(compression.factor_rank(*map(float, expected[i].shape)))
        if rank:
            q = np.linalg.qr(torch.randn(1, expected[i].shape[1], rank)[0].double().numpy())[0]
            p = np.linalg.qr(expected[i] @ q)[0]
            expected[i] = p @ (p.T @ expected[i])
    gradients = [(one.numpy(), of_unit[i].view(one.shape).numpy(), expected[i]) for i, one in enumerate(of_ddp)]
    return gradients, by_ddp, by_unit


def losses_of_steps(worker: Worker, plan: Plan, steps: int) -> list[float]:
    """This rank's share of the loss of each of the first steps, optimizer included."""
    from perfmodel.execute.uniform.parallelize import TrainingProgram

    program = TrainingProgram(worker, plan)
    shares = []
    for _ in range(steps):
        program.step()
        shares.append(program.loss_share())
    return shares


def count_collectives_on_rank(worker: Worker, plan: Plan, routing: RoutingCounts | None = None):
    """Collectives of one step after a first one (which also exchanges what torch sets up lazily)."""
    from perfmodel.execute.measure.measure import count_step
    from perfmodel.execute.uniform.parallelize import TrainingProgram

    program = TrainingProgram(worker, plan, routing)
    program.step()
    program.clock.durations()
    tally = count_step(program.step, program.mesh.axis_of, worker.device)
    return tally
