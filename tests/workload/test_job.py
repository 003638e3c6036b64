from dataclasses import replace

import pytest

from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision, TrainingJob
from perfmodel.workload.models import load_model


def job(**changes):
    return TrainingJob(**{"model": load_model("gpt2"), "global_batch": 8, "seq_len": 1024, **changes})


def test_defaults_are_bf16_mixed_and_adamw():
    assert job().policy is PRECISION_POLICIES[Precision.BF16_MIXED]
    assert job().optimizer is Optimizer.ADAMW
    assert job().tokens_per_step == 8192


def test_rotary_positions_need_an_even_head():
    odd = replace(load_model("llama-3-8b"), head_dim=127)
    with pytest.raises(InputError, match="head_dim=127: must be even: rotary positions of llama-3-8b turn pairs"):
        job(model=odd)


def test_every_precision_has_a_policy_of_its_name():
    assert {policy.name for policy in PRECISION_POLICIES.values()} == set(Precision)


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.FP16_MIXED])
def test_mixed_precision_adam_holds_sixteen_bytes_a_parameter(precision):
    """2 + 2 + K with K = 12: Rajbhandari et al., arXiv 1910.02054, section 3.1."""
    policy = PRECISION_POLICIES[precision]
    assert policy.state_bytes_per_parameter(Optimizer.ADAM) == 12
    assert itemsize(policy.parameter) + itemsize(policy.gradient) + policy.state_bytes_per_parameter(Optimizer.ADAM) == 16


@pytest.mark.parametrize(
    "precision, optimizer, num_bytes",
    [
        (Precision.FP32, Optimizer.SGD, 0),
        (Precision.FP32, Optimizer.MOMENTUM, 4),
        (Precision.FP32, Optimizer.ADAMW, 8),
        (Precision.BF16, Optimizer.ADAMW, 4),
        (Precision.BF16_MIXED, Optimizer.SGD, 4),
    ],
)
def test_optimizer_state_bytes(precision, optimizer, num_bytes):
    assert PRECISION_POLICIES[precision].state_bytes_per_parameter(optimizer) == num_bytes


def test_a_step_moves_each_copy_as_often_as_it_is_touched():
    # bf16-mixed AdamW: fp32 gradient 4, master 2 x 4, two moments 2 x 8, bf16 copy 2
    assert PRECISION_POLICIES[Precision.BF16_MIXED].step_bytes_per_parameter(Optimizer.ADAMW) == 4 + 8 + 16 + 2
    assert PRECISION_POLICIES[Precision.FP32].step_bytes_per_parameter(Optimizer.SGD) == 4 + 8


def test_all_policies_hold_a_master_copy_but_those_of_one_dtype():
    without = {name for name, policy in PRECISION_POLICIES.items() if not policy.has_master_copy}
    assert without == {Precision.FP32, Precision.BF16}
    assert all(policy.compute is not Dtype.TF32 for policy in PRECISION_POLICIES.values())


@pytest.mark.parametrize("optimizer, states", [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_number_of_state_tensors(optimizer, states):
    assert Optimizer(optimizer).num_states == states


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 2.0}, "global_batch=2.0"),
        ({"seq_len": -1}, "seq_len=-1"),
        ({"seq_len": 10**5000}, "seq_len="),
        ({"precision": "bf16"}, "precision=bf16"),
        ({"optimizer": "lion"}, "optimizer=lion"),
    ],
)
def test_bad_job_is_refused(changes, field):
    with pytest.raises(InputError) as caught:
        job(**changes)
    assert str(caught.value).startswith(field)
