"""Share of this machine's processors that other processes take during a measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Processor seconds so far: total (idle time included), busy, and of the measured processes."""

    total: float
    busy: float
    measured: float

    def others_since(self, earlier: ProcessorUse) -> float:
        """Return the share of the machine's processors used by other processes since `earlier`; 0 where unknown."""
        total = self.total - earlier.total
        return max((self.busy - earlier.busy) - (self.measured - earlier.measured), 0.0) / total if total > 0 else 0.0


def processor_use(pids: Sequence[int], *, proc: Path = Path("/proc")) -> ProcessorUse:
    """Read the processor times from Linux's /proc; all 0 elsewhere. `pids`: measured processes other than this one."""
    try:
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
        user, nice, system, idle, waiting, _, _, stolen = (int(word) for word in (proc / "stat").read_text().split()[1:9])
        times = os.times()
        measured = times.user + times.system
        for pid in pids:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            measured += (int(fields[11]) + int(fields[12])) * tick  # utime and stime, the 14th and 15th field of proc(5)
    except (OSError, ValueError, IndexError):
        return ProcessorUse(total=0.0, busy=0.0, measured=0.0)
    busy = user + nice + system + stolen
    return ProcessorUse(total=(busy + idle + waiting) * tick, busy=busy * tick, measured=measured)
