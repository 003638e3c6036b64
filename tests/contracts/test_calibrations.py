"""Every shipped chip is predicted by a calibration or by its data sheet, and says which."""

import pytest

from perfmodel.cost.machine import resolve_machine
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import PARTS, SPEC_SHEET, Provenance, default_calibration
from perfmodel.hardware.reader import calibrations_for, cluster_of, list_calibrations, list_chips, load_calibration, load_chip

MEASURED = {chip: load_calibration(name) for name in list_calibrations() for chip in load_calibration(name).chips}
LENT = {chip for name in list_calibrations() for chip in load_calibration(name).relatives}


@pytest.mark.parametrize("name", list_chips())
def test_a_chip_has_the_basis_of_its_numbers(name):
    """A part is `calibrated` only where a calibration that names this chip measured it."""
    calibration = default_calibration(name, calibrations_for(name))
    dtype = Dtype.BF16 if Dtype.BF16 in load_chip(name).peak_flop_rate else Dtype.FP16
    machine = resolve_machine(cluster_of(name, num_chips=16), calibration, dtype=dtype)
    assert set(machine.basis.parts) <= set(PARTS)
    for part, source in machine.basis.parts.items():
        kind, _, rest = source.partition(": ")
        chip_calibration = MEASURED.get(name)
        is_measured = (
            chip_calibration is not None and chip_calibration.provenance is Provenance.CALIBRATED and part not in chip_calibration.borrowed
        )
        assert kind in set(Provenance)
        assert (kind == Provenance.SPEC_SHEET) == (rest == "")
        assert kind != Provenance.CALIBRATED or is_measured
        if calibration is SPEC_SHEET:
            assert kind == Provenance.SPEC_SHEET
        elif rest:
            assert rest == calibration.name
            assert set(rest.removeprefix("mean of ").split(" and ")) <= set(list_calibrations())
    if name in MEASURED:
        assert calibration.name == MEASURED[name].name


def test_no_chip_has_two_calibrations_lent_or_a_lent_one_and_its_own():
    lent = [chip for name in list_calibrations() for chip in load_calibration(name).relatives]
    assert len(lent) == len(set(lent))
    assert not set(lent) & set(MEASURED)
    assert set(MEASURED) | LENT <= set(list_chips())


def test_only_vendors_without_a_measured_chip_of_the_kind_rely_on_the_data_sheet():
    alone = {name for name in list_chips() if default_calibration(name, calibrations_for(name)) is SPEC_SHEET}
    kinds = {(load_chip(name).vendor, load_chip(name).units.unit_kind) for name in MEASURED}
    of_measured_vendors = {name for name in alone if (load_chip(name).vendor, load_chip(name).units.unit_kind) in kinds}
    assert of_measured_vendors == {"gtx1080ti-11gb"}, "no matrix units"
    assert {load_chip(name).vendor for name in alone - of_measured_vendors} == {"google", "aws", "huawei"}


def test_amd_meshes_reach_the_same_share_of_their_links():
    models = [load_calibration(name).kernels.collectives["scale_up"] for name in ("mi300x", "mi325x", "mi355x")]
    assert models[0] == models[1] == models[2]
    assert all("scale_up" in load_calibration(name).borrowed for name in ("mi300x", "mi325x", "mi355x"))
