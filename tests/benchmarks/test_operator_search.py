"""Speed of the per-operator search: tables and search apart. `make bench` shows them; nothing asserts a time."""

import pytest

from perfmodel.cost.resolve import choose_calibration, choose_profile, resolve_estimator
from perfmodel.hardware.reader import load_cluster
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.planner.operator_memory import fit_operators
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.planner.operators import search_operators, tables_of
from perfmodel.search import eliminate
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.models import load_model

MESHES = {"tp 4 x cp 2": {"tp_kv": 4, "cp": 2}, "tp 2 x 2, cp 2": {"tp_kv": 2, "tp_q": 2, "cp": 2}}


@pytest.fixture(scope="module")
def llama():
    """Llama-3 70B, 8 sequences of 8192, on one H100 node."""
    job = TrainingJob(model=load_model("llama-3-70b"), global_batch=8, seq_len=8192)
    cluster = load_cluster("dgx-h100").with_chips(8)
    return resolve_estimator(job, cluster, calibration=choose_calibration(cluster.chip), profile=choose_profile(cluster.chip))


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_tables(benchmark, llama, sizes):
    mesh = OperatorMesh(sizes=sizes)
    tables = benchmark.pedantic(
        lambda: tables_of(llama, mesh, micro_batch=1, zero=0, attention=AttentionKernel.FLASH), rounds=3, iterations=1
    )
    benchmark.extra_info["configurations"] = sum(tables.space.num_configurations)


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_search(benchmark, llama, sizes):
    tables = tables_of(llama, OperatorMesh(sizes=sizes), micro_batch=1, zero=0, attention=AttentionKernel.FLASH)
    solution = benchmark.pedantic(lambda: eliminate(tables.vertex_costs, tables.edges), rounds=10, iterations=1)
    assert solution.is_proved


def test_found_and_uniform(llama):
    """Not a speed: what is found beside the rule sets, free and within 200 GB of weights, gradients and optimizer state."""
    mesh = OperatorMesh(sizes={"tp_kv": 4, "cp": 2})
    found = search_operators(llama, mesh)
    fitting = fit_operators(llama, mesh, state_limit=2e11)
    assert found.plan.time <= min(plan.time for plan in found.rule_sets) * (1 + 1e-12)
    assert fitting.lower_bound <= fitting.plan.time
