"""A training job: model, batch, precision and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as record_field
from enum import StrEnum
from types import MappingProxyType

from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import bad_field, shown
from perfmodel.workload.config import MAX_SIZE, TransformerConfig, printable
from perfmodel.workload.network_model import NetworkModel
from perfmodel.workload.optimizers import Optimizer as Optimizer  # part of a job, so importable from here too
from perfmodel.workload.recipes import RECIPES, Recipe
from perfmodel.workload.routing import BALANCED, Routing
from perfmodel.workload.training import FULL_TRAINING, Training, linear_operators


class Precision(StrEnum):
    """Precision policies of a job; `PRECISION_POLICIES` defines them."""

    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"
    FP16_MIXED = "fp16-mixed"
    BF16 = "bf16"
    FP8_DELAYED = "fp8-delayed"
    FP8_CURRENT = "fp8-current"
    FP8_BLOCK = "fp8-block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Dtypes of parameter copies, gradients and computation.

    parameter        the copy that operators read and all-gathers move
    compute          dtype of products and stored activations
    gradient         of a parameter, as backward computes it
    gradient_reduce  dtype of gradient accumulation and reduction, unless the execution profile sets another
    master           the copy that the optimizer updates; the only copy where it equals `parameter`
    optimizer_state  of each state tensor of the optimizer
    recipe           of products in fewer bits than `compute`; None: no such products
    """

    name: Precision
    parameter: Dtype
    compute: Dtype
    gradient: Dtype
    gradient_reduce: Dtype
    master: Dtype
    optimizer_state: Dtype
    recipe: Recipe | None = None

    @property
    def has_master_copy(self) -> bool:
        """Whether master weights are separate from the parameters."""
        return self.master is not self.parameter

    def state_bytes_per_parameter(self, optimizer: Optimizer) -> float:
        """Return the bytes of optimizer state: master copy and state tensors. [byte/parameter]

        Adam in mixed precision has 12 (4 + 4 + 4): ZeRO's K, Rajbhandari et al., arXiv 1910.02054, section 3.1.
        """
        master = itemsize(self.master) if self.has_master_copy else 0.0
        return master + optimizer.state_bytes(itemsize(self.optimizer_state))

    def step_bytes_per_parameter(self, optimizer: Optimizer) -> float:
        """Return the memory traffic of a fused optimizer step. [byte/parameter]

        Reads the reduced gradient; reads and writes the master weight and each state; writes the parameter copy if there is one. The
        execution profile adds the traffic of a step with several passes (one kernel for each line of the update rule).
        """
        copy = itemsize(self.parameter) if self.has_master_copy else 0.0
        states = optimizer.state_bytes(itemsize(self.optimizer_state))
        return itemsize(self.gradient_reduce) + 2 * (itemsize(self.master) + states) + copy


_BF16_MIXED = "bf16 bf16 bf16 fp32 fp32 fp32"
#: Dtypes of a policy, in the order of its fields. Low-bit products extend bf16 mixed precision, from which all their dtypes come.
_DTYPES: Mapping[Precision, str] = {
    Precision.FP32: "fp32 fp32 fp32 fp32 fp32 fp32",
    # Megatron-LM accumulates and reduces bf16 gradients in fp32 (it forces the switch), torchtitan reduces them in fp32.
    Precision.BF16_MIXED: _BF16_MIXED,
    # Micikevicius et al., arXiv 1710.03740: fp16 copy, fp32 master weights, scaled loss. Gradients stay fp16 until the step.
    Precision.FP16_MIXED: "fp16 fp16 fp16 fp16 fp32 fp32",
    Precision.BF16: "bf16 bf16 bf16 bf16 bf16 bf16",
}


def _policy(name: Precision) -> PrecisionPolicy:
    parameter, compute, gradient, reduced, master, state = map(Dtype, _DTYPES.get(name, _BF16_MIXED).split())
    return PrecisionPolicy(
        name=name,
        parameter=parameter,
        compute=compute,
        gradient=gradient,
        gradient_reduce=reduced,
        master=master,
        optimizer_state=state,
        recipe=RECIPES.get(str(name)),
    )


PRECISION_POLICIES: Mapping[Precision, PrecisionPolicy] = MappingProxyType({name: _policy(name) for name in Precision})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training job, independent of cluster and plan. Gradient accumulation follows from the plan's micro-batch.

    For a network, the batch counts samples, whose sizes are part of the network; `seq_len` is 1.
    """

    model: TransformerConfig | NetworkModel
    global_batch: int
    seq_len: int
    precision: Precision = Precision.BF16_MIXED
    optimizer: Optimizer = Optimizer.ADAMW
    train: Training = FULL_TRAINING
    routing: Routing = BALANCED
    policy: PrecisionPolicy = record_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, (TransformerConfig, NetworkModel)):
            raise bad_field("model", shown(self.model), "must be a TransformerConfig", "load_model reads one")
        if isinstance(self.model, TransformerConfig) and self.model.positions.position == "rotary" and self.model.rotary_head_dim % 2:
            rule = f"must be even: rotary positions of {self.model.name} turn pairs"
            raise bad_field("head_dim", self.model.rotary_head_dim, rule, "correct the config")
        for field, meaning in (("global_batch", "sequences of a step"), ("seq_len", "tokens of a sequence")):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
                raise bad_field(field, printable(value), f"must be a whole number from 1 to {MAX_SIZE}", f"it counts the {meaning}")
        if not isinstance(self.precision, Precision):
            raise bad_field("precision", self.precision, "is not known", f"use one of {', '.join(Precision)}")
        object.__setattr__(self, "policy", PRECISION_POLICIES[self.precision])
        if not isinstance(self.optimizer, Optimizer):
            raise bad_field("optimizer", self.optimizer, "is not known", f"use one of {', '.join(Optimizer)}")
        if not isinstance(self.train, Training):
            raise bad_field("train", shown(self.train), "must be a Training", "training_of reads one: training_of('lora:16')")
        if not isinstance(self.routing, Routing):
            raise bad_field("routing", shown(self.routing), "must be a Routing", "routing_of reads one: routing_of('skew:1.3')")
        if self.routing != BALANCED:
            experts = self.model.parts.experts if isinstance(self.model, TransformerConfig) else None
            if experts is None:
                capacity = f", capacity {self.routing.capacity_factor:g}" if self.routing.capacity_factor else ""
                raise bad_field("routing", f"{self.routing}{capacity}", f"{self.model.name} has no experts", "leave it out")
            rows = self.seq_len * experts.top_k * self.routing.load / experts.num_experts
            if rows < 1 and self.routing.capacity_factor:
                rule = f"leaves an expert room for {rows:.2g} rows of a sequence, which is below one"
                raise bad_field("capacity_factor", f"{self.routing.capacity_factor:g}", rule, "use a larger one")
        if self.train.targets:
            self.train.check_targets(linear_operators(self.transformer), self.model.name)

    @property
    def transformer(self) -> TransformerConfig:
        """The model as a decoder with a configuration; raises InputError for a network."""
        if isinstance(self.model, TransformerConfig):
            return self.model
        rule = "is a network, whose plans give each operator a sharding of its own; this is of models with a configuration"
        raise bad_field("model", self.model.name, rule, "use a plan of `perfmodel search`, or `perfmodel shard` for networks")

    @property
    def unit(self) -> str:
        """Unit of the throughput."""
        return "samples" if isinstance(self.model, NetworkModel) else "tokens"

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len
