"""Whole runs as published: Llama 3.1 405B's chip-hours and goodput, BLOOM's energy. Nothing is fitted to them but the failure rate."""

import pytest

import perfmodel
from perfmodel.cost.training_run import training_run
from perfmodel.hardware.assumptions import load_assumptions


def test_llama_3_405b():
    """30.84 M H100-hours (model card of Llama 3.1; all stages, 15.6T tokens); over 90 % effective training time (arXiv 2407.21783)."""
    plan = perfmodel.predict("llama-3.1-405b", chips=16384)
    run = perfmodel.estimate_run(plan, "15.6T")
    assert run.chip_hours == pytest.approx(30.84e6, rel=0.10)
    assert 0.90 < run.goodput < 0.93


def test_bloom_s_energy_by_its_own_accounting():
    """433 MWh and 24.7 t: A100-hours times 400 W, no server and no PUE, 57 g/kWh (arXiv 2211.02001). Steps as measured, 105.22 s."""
    given = {"server_power_factor": 1, "power_utilization": 1, "pue": 1, "carbon_intensity": 57, "checkpoint_overhead": 40}
    steps = 366e9 / (2048 * 2048)
    run = training_run(
        tokens=366e9,
        days=steps * 105.22 / 86400,
        num_chips=384,
        checkpoint_bytes=176.2e9 * 14,
        chip_watts=400.0,
        price_per_hour=0.0,
        assumptions=load_assumptions().with_given(given),
    )
    assert run.energy / 3.6e9 == pytest.approx(433, rel=0.10)
    assert run.carbon / 1e3 == pytest.approx(24.7, rel=0.10)
    assert run.checkpoint_bytes == pytest.approx(2.3e12, rel=0.1)
