"""A hundred errors whose remedy is followed: the value that a message offers passes the check that refused the other."""

import json

import pytest

import perfmodel
from perfmodel.frameworks.profile import list_profiles
from perfmodel.workload.models import list_models
from tests.marks import NIGHTLY

JOB = {"--model": "llama-3.2-1b", "--cluster": "dgx-h100", "--chips": "64", "--global-batch": "512", "--seq-len": "4k"}


def misspelt(name: str) -> str:
    """The name without the letter in its middle."""
    return name[: len(name) // 2] + name[len(name) // 2 + 1 :]


def known(flag, names):
    every = {name.lower() for name in names}
    return [(flag, misspelt(name)) for name in names if misspelt(name).lower() not in every]


WRONG = [
    *known("--model", list_models()[:40]),
    *known("--cluster", [name for name in perfmodel.list_clusters() if not name.startswith(("tpu", "gb"))][:20]),
    *known("--profile", list_profiles()[:12]),
    *known("--precision", ["bf16-mixed", "fp16-mixed", "fp8-delayed"]),
    *known("--optimizer", ["adamw", "momentum"]),
    *known("--schedule", ["interleaved"]),
    *known("--recompute", ["selective", "full"]),
    *known("--attention", ["flash", "unfused"]),
    *(("--seq-len", text) for text in ("1,024", "2,048", "4,096", "8,192", "16,384", "131,072")),
    *(("--micro-batch", text) for text in ("3", "5", "7", "100", "12")),
    *(("--global-batch", text) for text in ("2,048", "1,024")),
    *(("--chips", text) for text in ("12", "20", "100", "1,024", "16,384")),
    *(("--zero", text) for text in ("4", "three")),
    *(("--tp", text) for text in ("0", "x", "two")),
]


#: One in ten in `make check`, and the first of each flag in `make test`: each is two or three commands.
FIRST = {flag: WRONG.index((flag, value)) for flag, value in reversed(WRONG)}


def _marks(index: int):
    if index % 10 == 0:
        return ()
    return pytest.mark.slow if index in FIRST.values() else NIGHTLY


SOME = [pytest.param(*case, marks=_marks(index)) for index, case in enumerate(WRONG)]


def test_there_are_a_hundred():
    assert len(WRONG) >= 95


@pytest.mark.parametrize(("flag", "value"), SOME, ids=lambda part: str(part).strip("-"))
@pytest.mark.slow
def test_a_remedy_can_be_followed(flag, value, call):
    job = {**JOB, flag: value, **({"--tp": "1"} if flag == "--micro-batch" else {})}
    error = failed(call, job)
    assert error["suggestions"], error["message"]
    field = flag.strip("-").replace("-", "_")
    assert error["field"] in (field, f"num_{field}")
    offered = error["suggestions"][0].removeprefix("write ").removeprefix("use ").partition(",")[0].partition(" ")[0]
    followed = failed(call, {**job, flag: offered})
    assert followed is None or followed["field"] != error["field"], followed["message"]


def failed(call, job):
    """The error of a prediction; None where there is none."""
    code, _, err = call("predict", *(word for pair in job.items() for word in pair), "--json")
    return json.loads(err) if code else None
