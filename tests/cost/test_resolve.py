"""Estimators of several jobs on one cluster."""

from perfmodel.cost import resolve
from perfmodel.cost.machine import resolve_machine
from perfmodel.cost.resolve import choose_calibration, resolve_estimator
from perfmodel.frameworks.profile import load_profile
from perfmodel.hardware.reader import load_cluster
from tests.cost.jobs import make_job, make_model


def test_jobs_on_one_cluster_share_its_machine(monkeypatch):
    resolved = []

    def counted(*args):
        resolved.append(args)
        return resolve_machine(*args)

    monkeypatch.setattr(resolve, "resolve_machine", counted)
    for layers in (2, 3):
        cluster = load_cluster("dgx-h100", num_chips=40)  # not used elsewhere
        job = make_job(make_model(num_hidden_layers=layers))
        resolve_estimator(job, cluster, calibration=choose_calibration(cluster.chip), profile=load_profile("generic"))
    assert len(resolved) == 1
