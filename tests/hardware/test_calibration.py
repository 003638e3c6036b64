"""Invariants of a calibration, and which one a chip gets."""

import pickle

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import (
    SPEC_SHEET,
    AttentionModel,
    Calibration,
    CollectiveModel,
    DecodeAttentionModel,
    GroupedMatmulModel,
    KernelModels,
    MatmulModel,
    StreamingModel,
    SustainedRates,
    default_calibration,
)
from perfmodel.hardware.reader import calibrations_for, list_calibrations, load_calibration
from perfmodel.hardware.writer import save_calibration

EMPTY = {"name": "x", "chips": ("chip",), "software": "", "source": "", "date": ""}


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MatmulModel(peak_fraction=0.0), "peak_fraction"),
        (lambda: MatmulModel(peak_fraction=0.8, wave_softness=1.5), "wave_softness"),
        (lambda: MatmulModel(peak_fraction=0.8, sharpness=0.5), "sharpness"),
        (lambda: StreamingModel(bandwidth_fraction=-1.0), "bandwidth_fraction"),
        (lambda: StreamingModel(bandwidth_fraction=1.0, caches=((2e6, 4.0), (1e6, 2.0))), "caches"),
        (lambda: StreamingModel(bandwidth_fraction=1.0, caches=((1e6, 0.5),)), "caches"),
        (lambda: AttentionModel(peak_fraction=0.5, backward_rate=0.0), "backward_rate"),
        (lambda: GroupedMatmulModel(rate_fraction=0.0), "rate_fraction"),
        (lambda: GroupedMatmulModel(row_fraction=0.0), "row_fraction"),
        (lambda: GroupedMatmulModel(expert_time=-1e-9), "grouped_matmul"),
        (lambda: DecodeAttentionModel(ramp_bytes=0.0), "ramp_bytes"),
        (lambda: DecodeAttentionModel(wave_time=-1e-9), "decode_attention"),
        (lambda: CollectiveModel(base_time=-1.0), "collective"),
        (lambda: CollectiveModel(ramp_exponent=0.0), "ramp_exponent"),
        (lambda: SustainedRates(sustained_clock_fraction=1.2), "sustained_clock_fraction"),
        (lambda: KernelModels(collectives={"sideways": {}}), "did you mean|use one of"),
        (lambda: Calibration(**EMPTY, peaks={"flops": 1.0}), "flop_rate"),
        (lambda: Calibration(**EMPTY, borrowed=("attension",)), "attention"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(make, field):
    with pytest.raises(InputError, match=field):
        make()


@pytest.mark.parametrize("name", list_calibrations())
def test_files_and_pickles_give_back_the_calibration(name, tmp_path):
    calibration = load_calibration(name)
    save_calibration(calibration, tmp_path / "copy.yaml")
    assert load_calibration(tmp_path / "copy.yaml") == calibration
    assert pickle.loads(pickle.dumps(calibration)) == calibration


@pytest.mark.parametrize(
    ("chip", "name"),
    [
        ("a100-sxm-80gb", "a100"),
        ("h200-sxm-141gb", "h200"),
        ("a100-pcie-80gb", "a100"),
        ("gb200-nvl72", "b200"),
        ("v100-sxm2-32gb", "a100"),
        ("l40s-48gb", "mean of h200 and b200"),
        ("rtx4090-24gb", "mean of h100 and b200"),
        ("rtx2080ti-11gb", "a100"),
        ("mi300x-192gb", "mi300x"),
        ("mi250x-128gb", "mi300x"),
        ("gtx1080ti-11gb", ""),
        ("tpu-v5p", ""),
        ("trainium2-96gb", ""),
        ("no-such-chip", ""),
    ],
)
def test_a_chip_gets_its_own_calibration_or_a_relatives_or_a_prior_or_the_spec_sheet(chip, name):
    calibration = default_calibration(chip, calibrations_for(chip))
    assert calibration.name == name
    assert (calibration is SPEC_SHEET) == (name == "")
