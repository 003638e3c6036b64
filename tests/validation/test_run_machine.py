"""Files that a run names are read again when they change."""

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.resources import resource_dir
from perfmodel.validation.case_plan import HardwareOfCase
from perfmodel.validation.run_machine import calibration_of_run, cluster_of_run, machine_of_run

HARDWARE = resource_dir("hardware_specs")
CALIBRATION = (HARDWARE / "calibrations" / "h100.yaml").read_text()
CLUSTER = (HARDWARE / "clusters" / "dgx-h100.yaml").read_text()


def test_an_edited_calibration_is_read_again(tmp_path):
    path, hardware = tmp_path / "own.yaml", HardwareOfCase(chip="h100-sxm-80gb", num_chips=8)
    named = HardwareOfCase(chip="h100-sxm-80gb", num_chips=8, cluster="dgx-h100", calibration=str(path))
    machines = []
    for text in (CALIBRATION, CALIBRATION.replace("floor_time: 2.481 us", "floor_time: 91.481 us")):
        path.write_text(text)
        assert calibration_of_run(named) == calibration_of_run(hardware, path)
        machines.append(machine_of_run(hardware, Dtype.BF16, calibration=path))
        assert machine_of_run(hardware, Dtype.BF16, calibration=path) is machines[-1]
    assert machines[0] != machines[1]


def test_an_edited_cluster_is_read_again(tmp_path):
    path = tmp_path / "own.yaml"
    hardware = HardwareOfCase(chip="h100-sxm-80gb", num_chips=64, cluster=str(path))
    clusters = []
    for text in (CLUSTER, CLUSTER.replace("bandwidth: 50 GB/s", "bandwidth: 10.5 GB/s")):
        path.write_text(text)
        clusters.append(cluster_of_run(hardware))
    assert clusters[0] != clusters[1]
