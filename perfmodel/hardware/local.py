"""The cluster `localhost`: this machine, detected at run time with the standard library only.

A chip is one process on one core. Numbers that /proc lacks (bandwidths, achieved rates) are stated assumptions until `perfmodel calibrate`
measures them.
"""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.hardware.chip import Chip, ComputeUnits, MemoryTier
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.fabric import Link, NetworkTier, Topology

MAX_LOCAL_PROCESSES = 64
"""Largest number of processes, or the number of cores if larger; processes in excess of the cores share them."""

_MEMORY_GRAIN = 64 * 2**20  # byte; so that two runs in short succession get the same share
_ASSUMED_MEMORY_BANDWIDTH = 10e9  # byte/s per core, between a laptop's and a server's
_ASSUMED_LOOPBACK_BANDWIDTH = 2e9  # byte/s per process through TCP on the loopback interface
_ASSUMED_LOOPBACK_LATENCY = 30e-6  # s
_ASSUMED_CLOCK = 2.5e9  # Hz
_ASSUMED_CACHE = 2**20  # byte

# fp32 FLOPs per core and cycle: two fused multiply-add units of the widest vector extension among the CPU's flags.
_FLOPS_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("avx", 16), ("asimd", 16), ("sve", 16))
_FLOPS_PER_CYCLE_ELSE = 8


def gpu_names() -> tuple[str, ...]:
    """Return the names of this machine's GPUs as listed by the driver's tool; without it, `GPU` for each device file."""
    if shutil.which("nvidia-smi") is None:
        return ("GPU",) * sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = (line for line in listing.stdout.splitlines() if line.startswith("GPU "))
    return tuple(line.partition(": ")[2].partition(" (UUID")[0].strip() or "GPU" for line in lines)


def local_cluster(*, num_chips: int | None = None, proc: Path = Path("/proc")) -> Cluster:
    """Return this machine as a cluster of one-core processes; `num_chips` of them share its memory (None: one per core)."""
    try:
        cpuinfo = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
        meminfo = (proc / "meminfo").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"localhost: {error.filename} cannot be read on this system; describe the machine in a cluster file") from error
    # Cores available to this process, within its affinity mask and container quota.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else len(re.findall(r"^processor[ \t]*:", cpuinfo, re.MULTILINE)) or (os.cpu_count() or 1)
    cores = max(1, min(cores, _container_limit("cpu.max", cores)))
    processes = cores if num_chips is None else num_chips
    largest = max(MAX_LOCAL_PROCESSES, cores)
    if not 1 <= processes <= largest:
        raise bad_field("num_chips", processes, f"localhost runs 1 to {largest} processes ({cores} cores)", "use fewer chips")
    match = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE) or re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        raise InputError("localhost: /proc/meminfo says neither MemAvailable nor MemTotal; describe the machine in a cluster file")
    available = int(match[1]) * 1024
    memory = float(min(available, _container_limit("memory.max", available)))
    chip = _chip(cpuinfo, memory=memory / max(processes, cores))
    link = Link(bandwidth=_ASSUMED_LOOPBACK_BANDWIDTH, pair_bandwidth=_ASSUMED_LOOPBACK_BANDWIDTH, latency=_ASSUMED_LOOPBACK_LATENCY)
    loopback = NetworkTier(
        name="loopback",
        topology=Topology.SWITCH,
        size=largest,
        link=link,
        source="assumed: TCP over the loopback interface; `perfmodel calibrate` measures it",
        provenance="recalled",
    )
    return Cluster(
        name="localhost",
        title=f"this machine, {cores} cores",
        chip=chip,
        num_chips=processes,
        chips_per_node=largest,
        tiers=(loopback,),
        source="/proc/cpuinfo and /proc/meminfo of this machine",
        provenance="mixed",
        notes=f"One process on one core; more than {cores} processes share the cores.",
    )


def _chip(cpuinfo: str, *, memory: float) -> Chip:
    model = _field(cpuinfo, "model name") or _field(cpuinfo, "Model") or _field(cpuinfo, "CPU implementer") or "unknown"
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    clock = _clock(cpuinfo, model)
    fp32 = clock * next((flops for flag, flops in _FLOPS_PER_CYCLE if flag in flags), _FLOPS_PER_CYCLE_ELSE)
    bf16 = fp32 * (16 if "amx_bf16" in flags else 2 if "avx512_bf16" in flags else 1)
    fp16 = fp32 * (16 if "amx_fp16" in flags else 2 if "avx512_fp16" in flags else 1)
    plain = re.sub(r"\((r|tm)\)|\bcpu\b|@.*|\d+-core processor", " ", model.lower())
    cache = re.match(r"(\d+) KB", _field(cpuinfo, "cache size"))
    return Chip(
        name=f"cpu-{re.sub(r'[^a-z0-9]+', '-', plain).strip('-') or 'unknown'}",
        title=f"one core of {model}",
        vendor=(_field(cpuinfo, "vendor_id") or "unknown").lower(),
        launch_year=2020,
        peak_flop_rate={Dtype.FP64: fp32 / 2, Dtype.FP32: fp32, Dtype.BF16: bf16, Dtype.FP16: fp16},
        memory=MemoryTier(
            name="dram", capacity=max(memory // _MEMORY_GRAIN * _MEMORY_GRAIN, float(_MEMORY_GRAIN)), bandwidth=_ASSUMED_MEMORY_BANDWIDTH
        ),
        on_chip_bytes=float(cache[1]) * 1024 if cache else float(_ASSUMED_CACHE),
        units=ComputeUnits(compute_units=1, unit_kind="core"),
        provenance={
            "launch_year": "recalled",
            "peak_flop_rate": "mixed",
            "memory_capacity": "read",
            "memory_bandwidth": "recalled",
            "on_chip": "read",
        },
        source="/proc of this machine: clock times the FLOPs of two fused multiply-add units a cycle; memory bandwidth assumed",
        notes="Launch year is a placeholder. bf16 and fp16 without their own instructions run at the fp32 rate at best.",
    )


def _field(cpuinfo: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else ""


def _clock(cpuinfo: str, model: str) -> float:
    """Return the largest of the first core's maximum clock, the clock in the model's name and the current clocks, else an assumption.
    [Hz]"""
    named = re.search(r"@\s*([\d.]+)\s*GHz", model)
    clocks = [float(named[1]) * 1e9] if named else [0.0]
    with suppress(OSError, ValueError):
        maximum = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii")
        clocks.append(float(maximum) * 1e3)
    for text in re.findall(r"^cpu MHz[ \t]*:[ \t]*(\d+(?:\.\d+)?)[ \t]*$", cpuinfo, re.MULTILINE):
        clocks.append(float(text) * 1e6)
    return max(clocks) or _ASSUMED_CLOCK


def _container_limit(name: str, default: int) -> int:
    """Return a limit of the control group: full cores of `cpu.max`, bytes of `memory.max`; `default` if there is none."""
    try:
        words = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").split()
        if not words or words[0] == "max":
            return default
        return int(words[0]) // int(words[1]) if len(words) > 1 else int(words[0])
    except (OSError, ValueError, ZeroDivisionError):
        return default
