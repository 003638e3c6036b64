"""Kernels and collectives against published figures: what the tables show, through calibrations that were fitted to those tables."""

import csv
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_time, matmul_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.hardware.calibration import LATENT_KERNEL
from tests.cost.machines import shipped_machine

FIGURES = list(csv.DictReader(Path(__file__).with_name("kernel_figures.csv").read_text(encoding="utf-8").splitlines()))


def figures(kind):
    return pytest.mark.parametrize(
        "row",
        [row for row in FIGURES if row["kind"] == kind],
        ids=lambda row: f"{row['machine']}-{row['m_or_bytes']}-{row['n_or_ranks']}",
    )


@figures("matmul")
def test_matmul_fraction_of_peak(row):
    """Median over the n and k from 2048 to 16384 that the table has."""
    machine = shipped_machine(row["machine"], clock=False)
    sides = np.array([2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384], dtype=float)
    n, k = np.meshgrid(sides, sides)
    m = float(row["m_or_bytes"])
    fraction = 2 * m * n * k / matmul_time(batch=1.0, m=m, n=n, k=k, itemsize=2.0, machine=machine) / machine.peak_flop_rate
    assert np.median(fraction) == pytest.approx(float(row["published"]), rel=float(row["tolerance"]))


@figures("attention")
def test_causal_attention_rate(row):
    machine = shipped_machine(row["machine"], clock=False)
    length, head_dim = float(row["m_or_bytes"]), float(row["n_or_ranks"])
    shape = {"batch": 4.0, "heads": 32.0, "kv_heads": 8.0, "query_length": length, "key_length": length, "head_dim": head_dim}
    time = attention_time(**shape, causal_fraction=0.5, itemsize=2.0, machine=machine)
    rate = 2 * 4 * 32 * length**2 * head_dim / time
    assert rate == pytest.approx(float(row["published"]), rel=float(row["tolerance"]))


@figures("latent_attention")
def test_rate_of_attention_with_values_narrower_than_keys(row):
    machine = shipped_machine(row["machine"], clock=False)
    length, heads = float(row["m_or_bytes"]), float(row["n_or_ranks"])
    shape = {"batch": 1.0, "heads": heads, "kv_heads": heads, "query_length": length, "key_length": length}
    widths = {"head_dim": 192.0, "value_head_dim": 128.0, "kernel": LATENT_KERNEL}
    time = attention_time(**shape, **widths, causal_fraction=0.5, itemsize=2.0, machine=machine)
    assert heads * length**2 * (192 + 128) / time == pytest.approx(float(row["published"]), rel=float(row["tolerance"]))


@figures("all_reduce")
def test_all_reduce_bus_bandwidth(row):
    machine = shipped_machine(row["machine"], clock=False)
    num_bytes, ranks = float(row["m_or_bytes"]), float(row["n_or_ranks"])
    time = collective_time(CollectiveKind.ALL_REDUCE, num_bytes, group_size=ranks, inside=[min(ranks, 8.0), ranks], machine=machine)
    rate = 2.0 * num_bytes * (ranks - 1.0) / ranks / time  # what each rank sends of a ring
    assert rate == pytest.approx(float(row["published"]), rel=float(row["tolerance"]))
