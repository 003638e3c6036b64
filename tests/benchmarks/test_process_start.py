"""Commands that people wait for, as whole warm processes. The aims are half of these limits."""

import pytest

from tests.benchmarks.processes import best_run

_JOB = ["--model", "gpt3-175b", "--cluster", "dgx-h100", "--chips", "1024", "--global-batch", "1536", "--seq-len", "2048"]
_PREDICT = ["predict", *_JOB, "--tp", "8", "--pp", "8"]


@pytest.mark.parametrize(
    ("arguments", "most_time", "most_bytes"),
    [
        (["-c", "import perfmodel"], 0.05, 30e6),
        (["-m", "perfmodel", "--help"], 0.20, 60e6),
        (["-m", "perfmodel", "chips", "--json"], 0.45, 120e6),
        (["-m", "perfmodel", *_PREDICT], 0.45, 120e6),
        (["-m", "perfmodel", *_PREDICT, "--json"], 0.45, 120e6),
    ],
    ids=["import", "help", "chips", "predict", "predict as JSON"],
)
def test_process(arguments, most_time, most_bytes):
    wall_time, peak_bytes = best_run(arguments)
    print(f"\n{' '.join(arguments)}: {wall_time:.3f} s, {peak_bytes / 1e6:.0f} MB")
    assert wall_time <= most_time
    assert peak_bytes <= most_bytes
