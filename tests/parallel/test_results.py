"""Measurements: appended, read back exactly, and refused with one sentence when they are not ours."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import make_plan
from perfmodel.parallel.results import CollectiveCount, Measurement, append_measurement, measurement_from_dict, read_measurements
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.models import load_model

PLAN = make_plan(TrainingJob(model=load_model("gpt2"), global_batch=8, seq_len=1024), cluster="localhost", num_chips=2)
MEASUREMENT = Measurement(
    plan=PLAN,
    plan_hash=PLAN.hash(),
    chip="a chip",
    software={"torch": "2.13"},
    num_ranks=2,
    device="cpu",
    warmup=3,
    steps=3,
    step_times=(0.1, 0.3, 0.2),
    step_time=0.2,
    step_time_spread=0.1,
    parts={"forward": 0.1, "communication.tp": 0.01},
    peak_memory=2e9,
    memory_by_rank=(1e9, 2e9),
    collectives=(CollectiveCount(kind="all_reduce", axis="tp", count=4, num_bytes=1e6),),
    loss=10.8,
    gradient_error=1e-7,
)


def test_measurements_are_appended_and_read_back(tmp_path):
    path = tmp_path / "runs.jsonl"
    later = replace(MEASUREMENT, loss=10.5)
    append_measurement(MEASUREMENT, path)
    before = path.read_text()
    append_measurement(later, path)
    assert path.read_text().startswith(before)
    assert read_measurements(path) == (MEASUREMENT, later)


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "runs.jsonl"

    def write(first):
        for number in range(first, first + 5):
            append_measurement(replace(MEASUREMENT, loss=float(number)), path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, 40, 5)))
    assert sorted(measurement.loss for measurement in read_measurements(path)) == [float(number) for number in range(40)]


def test_a_file_from_before_a_field_was_known_is_read():
    data = MEASUREMENT.to_dict()
    del data["busy_fraction"]
    assert measurement_from_dict(data) == MEASUREMENT


def test_an_unchecked_gradient_is_null_in_the_file(tmp_path):
    data = json.loads(json.dumps(replace(MEASUREMENT, gradient_error=float("nan")).to_dict(), allow_nan=False))
    assert data["gradient_error"] is None
    read = measurement_from_dict(data)
    assert read.gradient_error != read.gradient_error


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(schema_version=2), "schema_version=2"),
        (dict(stepz=1), "unknown field 'stepz'; did you mean 'steps'"),
        (dict(step_times=[0.1]), "steps=3"),
        (dict(memory_by_rank=[1.0]), "num_ranks=2"),
        (dict(plan_hash="0"), "plan_hash=0"),
        (dict(collectives=[{"kind": "x"}]), "wrong form"),
        (dict(collectives=7), "wrong form"),
        (dict(plan=3), "plan"),
    ],
)
def test_a_damaged_record_is_refused(change, says):
    with pytest.raises(InputError, match=says):
        measurement_from_dict({**MEASUREMENT.to_dict(), **change})


@pytest.mark.parametrize("key", sorted(set(MEASUREMENT.to_dict()) - {"busy_fraction"}))
def test_a_missing_field_is_refused(key):
    data = MEASUREMENT.to_dict()
    del data[key]
    with pytest.raises(InputError):
        measurement_from_dict(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200)
@given(key=st.sampled_from(sorted(MEASUREMENT.to_dict())), value=JSON)
def test_any_value_in_any_field_is_read_or_refused(key, value):
    try:
        measurement_from_dict({**MEASUREMENT.to_dict(), key: value})
    except InputError:
        pass


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    path.write_bytes(content)
    try:
        assert read_measurements(path) == ()
    except InputError:
        pass


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        append_measurement(MEASUREMENT, tmp_path / "missing" / "runs.jsonl")
