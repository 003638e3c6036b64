"""The serving executor's steps, predicted: each part is the sum of what was measured of the machine, of elements of 32 bits."""

from dataclasses import replace

import pytest

from perfmodel.cost.compute import attention_decode_time, matmul_time
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.serving.executor import executor_times, predicted_parts
from perfmodel.cost.serving.memory import weight_bytes
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import VECTOR_BANDWIDTH, WEIGHT_BANDWIDTH, Calibration, DecodeAttentionModel, MatmulModel, Provenance
from perfmodel.hardware.local import local_cluster
from perfmodel.parallel.serving.measurement import StepShape
from perfmodel.workload.quantization import QUANTIZATIONS
from tests.execute.jobs import tiny

HERE = Calibration(
    name="here",
    chips=(local_cluster(num_chips=1).chip.name,),
    software="",
    source="",
    date="2026-01-01",
    provenance=Provenance.CALIBRATED,
    matmul={Dtype.FP32: MatmulModel(peak_fraction=1.0, memory_fraction=0.5, sharpness=1.0)},
    decode_attention={"flash": DecodeAttentionModel(memory_fraction=0.25, floor_time=1e-6)},
    peaks={"flop_rate.fp32": 1e11, "memory_bandwidth": 4e10, WEIGHT_BANDWIDTH: 1e10, VECTOR_BANDWIDTH: 2e10},
    launch_time=1e-5,
)


@pytest.mark.parametrize("sequences", [1, 8])
def test_a_decode_step_is_the_sum_of_its_kernels(sequences):
    model, cluster = tiny("llama"), local_cluster(num_chips=1)
    parts = predicted_parts(model, cluster, HERE, StepShape(sequences=sequences, cached=40, new=1))
    machine = resolve_machine(cluster, HERE, dtype=Dtype.FP32)
    bandwidth = 2e10 if sequences == 1 else 1e10
    machine = replace(machine, matmul=replace(machine.matmul, bandwidth=bandwidth))

    def product(n, k):
        return matmul_time(batch=1.0, m=sequences, n=n, k=k, itemsize=4, machine=machine)

    # q and o, k and v, gate and up, down: each a call of its own
    layer = 2 * product(64, 64) + 2 * product(32, 64) + 2 * product(96, 64) + product(64, 96)
    assert parts["products"] == pytest.approx(4 * layer, rel=1e-9)
    attention = attention_decode_time(batch=sequences, heads=8, kv_heads=4, key_length=41, head_dim=8, itemsize=4, machine=machine)
    assert parts["attention"] == pytest.approx(4 * attention, rel=1e-9)
    assert parts["logits"] > product(131, 64)
    # at least the seven products and the attention of each layer
    assert parts["host"] > 4 * 8 * 1e-5


def test_weights_are_held_in_32_bits():
    model = tiny("mixtral")
    program = executor_times(model, local_cluster(num_chips=1), HERE, rows=1).decode_program
    in_16_bits = weight_bytes(program, QUANTIZATIONS["bf16"], tp=1, pp=1, expert_cut=1)
    assert float(in_16_bits) * 2 == 4 * model.num_parameters
