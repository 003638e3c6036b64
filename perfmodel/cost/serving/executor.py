"""Steps of the serving executor of this package (`execute/serving/`): its engine, on a machine that computes in 32 bits."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.cost.compute import matmul_time
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.cost.serving.estimate import ServingEstimator
from perfmodel.cost.serving.step import StepCosts
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import bad_field
from perfmodel.frameworks.engine import Engine, EngineHost, EngineKernels, EngineMemory
from perfmodel.hardware.calibration import VECTOR_BANDWIDTH, WEIGHT_BANDWIDTH, Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.results import ANCHOR_ROWS, ANCHOR_WEIGHT, StepShape
from perfmodel.parallel.serving_plan import ServingLayout
from perfmodel.workload.config import TransformerConfig
from perfmodel.workload.kinds.cache import UPDATE_KERNELS
from perfmodel.workload.quantization import QUANTIZATIONS

#: No graphs, no fused kernels, no host time but kernel launches.
EXECUTOR = Engine(
    name="executor",
    version="of this package",
    source="perfmodel/execute/serving: torch's modules in eager mode",
    memory=EngineMemory(
        memory_fraction=1.0,
        activation_factor=(0.0,) * 4,
        expert_activation_factor=(0.0,) * 4,
        least_activation_bytes=0.0,
        graph_bytes=0.0,
        context_bytes=0.0,
        link_bytes=0.0,
    ),
    host=EngineHost(has_graphs=False),
    kernels=EngineKernels(floor_fraction=1.0, fuses_all_reduce=False, fuses_kernels=False),
)


def lacks_states(model: TransformerConfig, calibration: Calibration) -> bool:
    """Return whether the model has layers with a state that the calibration has not measured."""
    return any(
        kind.mixer in UPDATE_KERNELS and UPDATE_KERNELS[kind.mixer] not in calibration.kernels.streaming for kind in model.layer_kinds
    )


def executor_times(
    model: TransformerConfig, cluster: Cluster, calibration: Calibration, *, rows: int, dtype: Dtype = Dtype.FP32
) -> StepCosts:
    """Return step times of the executor with `rows` rows on one chip of the cluster, with weights and cache in `dtype`.

    A model's weights are read from memory, even if a single product's fit into a cache: the measured bandwidth of weights counts, if there
    is one. Raises InputError if layers with a state have not been measured.
    """
    if lacks_states(model, calibration):
        rule = f"has measured no layers with a state, which {model.name} has"
        raise bad_field("calibration", calibration.name, rule, "write a new one with perfmodel calibrate")
    machine = _machine(cluster, calibration, dtype, VECTOR_BANDWIDTH if rows == 1 else WEIGHT_BANDWIDTH)
    estimator = ServingEstimator(
        model=model,
        cluster=cluster,
        calibration=calibration,
        engine=EXECUTOR.having(launch_time=machine.host.launch_time),
        quantization=QUANTIZATIONS["bf16"],
        cache=dtype,
        element_bytes=float(itemsize(dtype)),
    )
    estimator.machine = machine
    return estimator.times([ServingLayout()])


def _machine(cluster: Cluster, calibration: Calibration, dtype: Dtype, peak: str) -> Machine:
    """Return the machine of one chip, whose products read weights at the measured peak of that name, if there is one."""
    machine = resolve_machine(replace(cluster, num_chips=1), calibration, dtype=dtype)
    return replace(machine, matmul=replace(machine.matmul, bandwidth=calibration.peaks.get(peak, machine.matmul.bandwidth)))


def anchor_times(cluster: Cluster, calibration: Calibration, *, dtype: Dtype = Dtype.FP32) -> dict[str, float]:
    """Return the calibrated time of each reference product of `ANCHOR_ROWS`. [s]"""
    outputs, inputs = ANCHOR_WEIGHT
    machine, size = _machine(cluster, calibration, dtype, WEIGHT_BANDWIDTH), float(itemsize(dtype))
    return {
        name: float(matmul_time(batch=1.0, m=rows, n=outputs, k=inputs, itemsize=size, machine=machine))
        for name, rows in ANCHOR_ROWS.items()
    }


def predicted_parts(
    model: TransformerConfig, cluster: Cluster, calibration: Calibration, shape: StepShape, *, dtype: Dtype = Dtype.FP32
) -> dict[str, float]:
    """Return the seconds of each part of a step of that shape; they add up to the step."""
    costs = executor_times(model, cluster, calibration, rows=shape.rows, dtype=dtype)
    if shape.is_decode:
        parts = costs.parts(float(shape.sequences), float(shape.cached + 1))
    else:
        parts = costs.parts(0.0, 0.0, prompt_tokens=float(shape.new), prompt_cached=float(shape.cached), prompts=float(shape.sequences))
    return {name: float(time[0]) for name, time in parts.items()}
