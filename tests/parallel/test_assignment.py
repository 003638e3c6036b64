"""Plans whose operators have shardings of their own, and their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.algebra.sharding import Held
from perfmodel.parallel.per_operator.assignment import Assignment
from perfmodel.parallel.per_operator.mesh import MeshAxis
from perfmodel.parallel.plan import Plan, assigned_plan
from perfmodel.parallel.plan_file import read_plan, write_plan
from perfmodel.workload.job import Optimizer, Precision, TrainingJob
from perfmodel.workload.network_model import NetworkModel

_AXES = (MeshAxis(name="t1a", size=2, tier=1), MeshAxis(name="t0a", size=4, tier=0))


def _plan(stages: tuple[str, ...] = ()) -> Plan:
    assignment = Assignment(
        axes=_AXES,
        shardings={"conv1": {"b": ("t1a", "t0a")}, "fc1": {"n": ("t0a",)}},
        held={"x": Held(cuts=(("t1a",), ()), partial=frozenset(("t0a",)))},
        stages=stages,
    )
    model = NetworkModel(name="alexnet", sizes={"image": 64, "window": (3, 3)})
    job = TrainingJob(model=model, global_batch=64, seq_len=1, precision=Precision.FP32, optimizer=Optimizer.SGD)
    return assigned_plan(job, cluster="dgx-a100", assignment=assignment, micro_batch=32, zero=2, profile="ddp")


@pytest.mark.parametrize("stages", [(), ("conv1", "fc1")])
def test_a_plan_of_single_shardings_is_read_as_it_was_written(tmp_path: Path, stages: tuple[str, ...]) -> None:
    plan = _plan(stages)
    write_plan(plan, tmp_path / "p.yaml")
    again = read_plan(tmp_path / "p.yaml")
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.hash() == plan.hash()
    assert again.num_chips == 8 * max(1, len(stages))
    assert again.num_microbatches == 2


def test_what_only_decoders_have_is_refused_of_a_network() -> None:
    with pytest.raises(InputError, match="model=alexnet: is a network"):
        _ = _plan().job.transformer


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size: 4", "size: 0", "size=0"),
        ("stages: []", "stages: 3", "stages=3"),
        ("num_chips: 8", "num_chips: 4", "num_chips=4: the assignment is for 8"),
        ("micro_batch: 32", "micro_batch: 48", "micro_batch=48: must divide global_batch=64"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_plan(_plan(), tmp_path / "p.yaml")
    text = (tmp_path / "p.yaml").read_text()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_plan(tmp_path / "p.yaml")
