"""States that optimizers keep for a parameter."""

import pytest

from perfmodel.workload.job import PRECISION_POLICIES, Optimizer, Precision
from perfmodel.workload.optimizers import OPTIMIZERS


@pytest.mark.parametrize(
    "optimizer, state",
    [
        ("sgd", 0.0),
        ("momentum", 4.0),
        ("adamw", 8.0),
        ("adamw-8bit", 2.0 + 8 / 256),
        ("adamw-4bit", 1.0 + 8 / 128),
        ("lion", 4.0),
        ("lion-8bit", 1 + 4 / 256),
    ],
)
def test_states_of_a_parameter_in_mixed_precision(optimizer, state):
    policy = PRECISION_POLICIES[Precision.BF16_MIXED]
    assert policy.state_bytes_per_parameter(Optimizer(optimizer)) == pytest.approx(4.0 + state)  # in addition to the master copy


def test_pure_bf16_keeps_states_in_bf16_and_8_bit_ones_in_8():
    policy = PRECISION_POLICIES[Precision.BF16]
    assert policy.state_bytes_per_parameter(Optimizer.ADAMW) == 4.0
    assert policy.state_bytes_per_parameter(Optimizer.ADAMW_8BIT) == pytest.approx(2.03125)


def test_every_optimizer_has_states_with_a_source():
    assert set(OPTIMIZERS) == set(Optimizer)
    assert all(entry.source for entry in OPTIMIZERS.values())
