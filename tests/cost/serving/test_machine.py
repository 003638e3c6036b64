"""The machine of a serving engine, on chips without measurements."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.compute import matmul_time
from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.serving.estimate import LEAST_MEASURED_RIDGE, serving_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.frameworks.engine import load_engine
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.reader import load_chip, load_cluster


def machine_of(chip, calibration=None):
    """`chip` in a node of H100."""
    cluster = replace(load_cluster("dgx-h100", num_chips=8), chip=chip)
    return serving_machine(cluster, calibration or choose_calibration(chip), load_engine("vllm").kernels.floor_fraction)


def unknown_chip(flops, bandwidth):
    """Return a chip without calibration."""
    h100 = load_chip("h100-sxm-80gb")
    rates = {Dtype.BF16: flops, Dtype.FP16: flops, Dtype.FP32: flops / 2}
    return replace(h100, name="mine", vendor="mine", peak_flop_rate=rates, memory=replace(h100.memory, bandwidth=bandwidth))


def share_of_bandwidth(machine, rows=1):
    """Return the share of the memory bandwidth that a large product of few rows reaches as it reads its weights."""
    n, k = 28672, 8192
    time = float(matmul_time(batch=1.0, m=rows, n=n, k=k, itemsize=2.0, machine=machine)) - machine.matmul.floor_time
    return 2.0 * n * k / machine.memory.bandwidth / time


@pytest.mark.parametrize("flops", [13e12, 27e12, 60e12, 120e12, 400e12])
def test_a_product_of_one_row_is_bound_by_memory_on_a_chip_without_relatives(flops):
    assert 0.70 < share_of_bandwidth(machine_of(unknown_chip(flops, 800e9), SPEC_SHEET)) < 0.85


@pytest.mark.parametrize("name", ["h20-96gb", "rtx3090-24gb", "rtx5090-32gb", "mi250x-128gb", "a10g-24gb", "v100-sxm2-32gb"])
def test_a_product_of_one_row_is_bound_by_memory_where_another_chip_was_measured(name):
    assert 0.70 < share_of_bandwidth(machine_of(load_chip(name))) < 0.95


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb", "mi300x-192gb"])
def test_chips_with_as_many_flops_for_a_byte_as_the_measured_ones_have_whole_tiles(name):
    assert machine_of(load_chip(name)).matmul.few_rows == 0.0


def test_a_chip_with_more_flops_or_more_bandwidth_is_no_slower():
    rows = np.array([1.0, 4.0, 16.0, 33.0, 64.0, 200.0])
    for more in ("flops", "bandwidth"):
        steps = [1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0]
        chips = [unknown_chip(27e12 * step, 800e9) if more == "flops" else unknown_chip(122e12, 800e9 * step) for step in steps]
        times = [matmul_time(batch=1.0, m=rows, n=8192, k=8192, itemsize=2.0, machine=machine_of(chip, SPEC_SHEET)) for chip in chips]
        assert (np.array(times[1:]) <= 1.02 * np.array(times[:-1])).all()  # whole tiles cost a little more where they begin


def test_the_least_ridge_of_measured_chips_is_the_a100s():
    chip = load_chip("a100-sxm-80gb")
    assert chip.peak_flop_rate[Dtype.BF16] / chip.memory.bandwidth == pytest.approx(LEAST_MEASURED_RIDGE)
