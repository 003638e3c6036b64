"""Commands that people wait for, as whole warm processes: seconds, bytes, and the ratio to Python with numpy alone."""

import pytest

from tests.benchmarks.processes import best_run

_JOB = ["--model", "gpt3-175b", "--cluster", "dgx-h100", "--chips", "1024", "--global-batch", "1536", "--seq-len", "2048"]
PREDICT = ["-m", "perfmodel", "predict", *_JOB, "--tp", "8", "--pp", "8"]
SEARCH = ["-m", "perfmodel", "search", *[a if a != "1024" else "4096" for a in _JOB], "--json"]
NUMPY = ["-c", "import numpy"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import perfmodel"],
        ["-m", "perfmodel", "--help"],
        ["-m", "perfmodel", "chips", "--json"],
        PREDICT,
        [*PREDICT, "--json"],
        SEARCH,
    ],
    ids=["import", "help", "chips", "predict", "predict as JSON", "search 8.7 million plans"],
)
def test_process(arguments, record_property):
    wall_time, peak_bytes = best_run(arguments)
    base_time, base_bytes = best_run(NUMPY)
    record_property("wall_time", wall_time)
    record_property("peak_bytes", peak_bytes)
    shown = " ".join(a for a in arguments if len(a) < 40)
    print(f"\n{shown}: {wall_time:.3f} s, {peak_bytes / 1e6:.0f} MB; {wall_time / base_time:.2f} times Python with numpy")
    assert peak_bytes > 0.1 * base_bytes
