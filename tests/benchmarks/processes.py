"""Times and peak memory of whole processes."""

import json
import subprocess
import sys

REPEATS = 7

# A small process starts the measured one: on Linux a child's peak counts from that of the process that forks it, and pytest's is large.
_LAUNCHER = """
import json, os, sys, time
results = []
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)])
    _, status, usage = os.wait4(process, 0)
    results.append((time.perf_counter() - start, usage.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)))
print(json.dumps(results))
"""


def best_run(arguments: list[str], *, repeats: int = REPEATS) -> tuple[float, float]:
    """Shortest wall time [s] and largest resident set [byte] of several runs of this Python with `arguments`."""
    launcher = [sys.executable, "-S", "-c", _LAUNCHER, str(repeats), sys.executable, *arguments]
    results = json.loads(subprocess.run(launcher, check=True, capture_output=True, text=True).stdout)
    assert all(code == 0 for *_, code in results)
    return min(wall for wall, *_ in results), max(peak for _, peak, *_ in results)
