"""Groups of worker processes on this machine, with failure detection.

`WorkerGroup(num_ranks)` starts the processes once and runs functions on all of them (importing torch takes
seconds, so tests, the demo and calibration share a group). If a rank dies, raises or hangs, the group is closed within
`hang_timeout` seconds plus a few, with a `RunError` that names the rank. No process is left behind.

This module does not import torch: only the workers do.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from perfmodel.execute.launch.processes import (
    STOPPED_TIMEOUT,
    RunningClock,
    die_with_parent,
    exit_reason,
    is_stopped,
    last_log_line,
    private_folder,
    start_python,
)
from perfmodel.foundation.errors import InputError, RunError, one_line

_Made = TypeVar("_Made")

#: Status of a rank while it imports, which may take longer than any step.
STARTING = "starting up"
#: Longer messages go through a file: a stopped rank would block the writer of the pipe in the middle of a message. [byte]
_LONGEST_MESSAGE = 1 << 15
#: Imported before a rank is ready, so that no call spends time on imports.
#: Function that returns the device's name and the versions of software.
DESCRIBE = ("perfmodel.execute.measure.measure", "describe_on_rank")
PRELOADED = ("perfmodel.execute.measure.measure", "perfmodel.execute.uniform.gradient_check")

#: A heartbeat file holds the monotonic time, a counter and the current activity of the rank.
HEARTBEAT_BYTES = 256
_HEARTBEAT_HEAD = struct.Struct("<dqi")

#: Stack frames of a rank that waits for its peers and is therefore not the cause of a hang.
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "pipelining/schedules.py", "wait_tensor", "in wait")

#: Error texts of a rank that lost its peer: a consequence, not the cause.
_SECONDARY = ("closed by peer", "reset by peer", "broken pipe", "timed out waiting", "connection refused", "gloo", "nccl", "store")


#: Variables that a launcher sets for its own processes. These workers are not part of its group.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

#: glibc settings: a worker keeps freed memory, as a GPU's caching allocator does. Otherwise every step would fault in fresh pages.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}


class Heartbeat:
    """Heartbeat of one rank, in a file that the parent can read while the rank is stuck."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(HEARTBEAT_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), HEARTBEAT_BYTES)
        self._count = 0

    def beat(self, what: str) -> None:
        self._count += 1
        text = what.encode()[: HEARTBEAT_BYTES - _HEARTBEAT_HEAD.size]
        self._map[_HEARTBEAT_HEAD.size : _HEARTBEAT_HEAD.size + len(text)] = text
        self._map[: _HEARTBEAT_HEAD.size] = _HEARTBEAT_HEAD.pack(time.monotonic(), self._count, len(text))

    def read(self) -> tuple[float, int, str]:
        when, count, length = _HEARTBEAT_HEAD.unpack(self._map[: _HEARTBEAT_HEAD.size])
        text = self._map[_HEARTBEAT_HEAD.size : _HEARTBEAT_HEAD.size + max(0, length)]
        return when, count, text.decode(errors="replace")


@dataclass(slots=True)
class Worker:
    """First argument of a function that runs on every rank."""

    rank: int
    world_size: int
    device: str
    heartbeat: Heartbeat | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: object, make: Callable[[], _Made]) -> _Made:
        """Return what was made for this key before, or make it."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]  # type: ignore[no-any-return]

    def latest(self, kind: str, key: object, make: Callable[[], _Made]) -> _Made:
        """Return the last of its kind if it was made for this key; otherwise free it and make another."""
        if kind not in self.cache or self.cache[kind][0] != key:
            self.cache.pop(kind, None)
            self.cache[kind] = key, make()
        return self.cache[kind][1]  # type: ignore[no-any-return]

    def beat(self, what: str) -> None:
        """Report progress. A rank without a heartbeat for `hang_timeout` seconds counts as hung."""
        if self.heartbeat is not None:
            self.heartbeat.beat(what)


def init_process_group(worker: Worker, store: object, timeout: float) -> None:
    """Initialize the process group: gloo on CPUs; nccl on GPUs, plus gloo for objects."""
    import torch
    import torch.distributed as dist

    if worker.device == "cuda":
        torch.cuda.set_device(worker.rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
        backend = "gloo"
    limit = timedelta(seconds=timeout)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=limit)


def _post(connection: Connection, kind: str, data: bytes, path: Path) -> None:
    """Send data; long data goes through a file with a single reader. A shared file could be overwritten while it is read."""
    if len(data) > _LONGEST_MESSAGE:
        path.write_bytes(data)
        data = b""
    connection.send((kind, data))


def _posted(data: bytes, path: Path) -> Any:
    return pickle.loads(data or path.read_bytes())


def worker_main(descriptor: int, rank: int, world_size: int, device: str, folder_name: str, parent: int, timeout: float) -> None:
    """Join the group, then run the functions that the parent sends until it closes the connection. Entry point of a worker."""
    die_with_parent(parent)
    import faulthandler

    folder = Path(folder_name)
    stack = open(folder / f"stack{rank}", "w")  # noqa: SIM115 - must stay open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    warnings.simplefilter("ignore")  # suppressed: after a death they would be reported as the last lines of the log
    connection = Connection(descriptor)
    worker = Worker(rank, world_size, device, Heartbeat(folder / f"beat{rank}"))
    try:
        worker.beat(STARTING)
        import torch.distributed as dist

        for module in PRELOADED:
            importlib.import_module(module)
        worker.beat("joining the group")
        # Ranks meet through a file in a folder that only this user can read. torch's TCP store listens on every address and unpickles
        # the data of its peers.
        init_process_group(worker, dist.FileStore(str(folder / "store"), world_size), timeout)
        worker.beat("ready")
        _post(connection, "ok", pickle.dumps(None), folder / f"result{rank}")
        while True:
            try:
                _, message = connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            function, arguments = _posted(message, folder / f"call{rank}")
            if isinstance(function, tuple):
                module, name = function
                function = getattr(importlib.import_module(module), name)
            worker.beat(f"starting {getattr(function, '__name__', function)}")
            result = function(worker, *arguments)
            worker.beat("done")
            _post(connection, "ok", pickle.dumps(result), folder / f"result{rank}")
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(("error", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE], traceback.format_exc()[-_LONGEST_MESSAGE:]))
        os._exit(1)


@dataclass(slots=True)
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection
    heartbeat: Heartbeat


class WorkerGroup:
    """`num_ranks` processes with an initialised torch process group; a context manager.

    with WorkerGroup(2) as group:
        results = group.call(function, argument)     # function(worker, argument) on every rank; results by rank

    `function` must be importable (a module's top-level function, or its module and name if this process must not import torch);
    arguments and results must be picklable.
    hang_timeout   seconds without a heartbeat of any unfinished rank after which the group is closed
    on_progress    called periodically with the activity of rank 0
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: str = "cpu",
        hang_timeout: float = 20.0,
        start_timeout: float = 120.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self.hang_timeout = hang_timeout
        self.start_timeout = start_timeout
        self.on_progress = on_progress
        self._processes: list[_Process] = []
        self._scope = ExitStack()
        self._folder = Path()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def __enter__(self) -> WorkerGroup:
        try:
            self._folder = self._scope.enter_context(private_folder())
            for rank in range(self.num_ranks):
                self._processes.append(self._start(rank))
            self._receive(self.start_timeout)
        except OSError as error:
            self.close()
            reason = error.strerror or str(error)
            raise RunError(f"the worker processes could not be started ({reason}); free some memory or disk space and run again") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> _Process:
        heartbeat = Heartbeat(self._folder / f"beat{rank}", create=True)
        # Every gloo or nccl timeout is longer than the hang detection below, so that the parent names the culprit before a peer times out.
        timeout = 3 * max(self.hang_timeout, 20.0) + self.start_timeout
        # All ranks run on this machine: listen on the loopback interface only, whatever network the user's other runs use.
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        settings = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        if self.device == "cpu":
            settings |= {name: os.environ.get(name, value) for name, value in _KEEP_MEMORY.items()}
            settings |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        popen, connection = start_python(
            ("perfmodel.execute.launch.launch", "worker_main"),
            *(rank, self.num_ranks, self.device, str(self._folder), os.getpid(), timeout),
            folder=self._folder,
            log=self._folder / f"log{rank}",
            settings=settings,
            without=LAUNCHER_VARIABLES,
        )
        return _Process(rank, popen, connection, heartbeat)

    def call(self, function: Callable[..., Any] | tuple[str, str], *arguments: Any, timeout: float = float("inf")) -> list[Any]:
        """Run `function(worker, *arguments)` on every rank and return the results by rank."""
        message = pickle.dumps((function, arguments))
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead rank is detected below
                    _post(process.connection, "call", message, self._folder / f"call{process.rank}")
            return self._receive(timeout)
        except BaseException:
            self.close()
            raise

    def _receive(self, timeout: float) -> list[Any]:
        """Return the reply of every rank, and monitor the ranks that have not replied yet."""
        pending = {process.connection: process for process in self._processes}
        results: dict[int, Any] = {}
        clock, waited, silence, last_sign = RunningClock(), 0.0, 0.0, 0.0
        stopped = dict.fromkeys(range(self.num_ranks), 0.0)
        while pending:
            for connection in wait(list(pending), timeout=0.2):
                process = pending[connection]  # type: ignore[index]
                try:
                    message = process.connection.recv()
                except (EOFError, OSError):
                    raise self._first_failure() from None
                if message[0] == "error":
                    raise self._first_failure({process.rank: message[1:]})
                results[process.rank] = _posted(message[1], self._folder / f"result{process.rank}")
                del pending[connection]  # type: ignore[arg-type]
            passed = clock.passed()
            waited += passed
            if self.on_progress is not None and self._processes:
                self.on_progress(self._processes[0].heartbeat.read()[2])
            for process in pending.values():
                stopped[process.rank] = stopped[process.rank] + passed if is_stopped(process.popen.pid) else 0.0
                if stopped[process.rank] > min(self.hang_timeout, STOPPED_TIMEOUT):
                    raise self._hung(process, "it was stopped from outside (SIGSTOP)")
            signs = [process.heartbeat.read() for process in pending.values()]
            newest = max((when for when, _, _ in signs), default=last_sign)
            silence = silence + passed if newest <= last_sign else 0.0
            last_sign = max(last_sign, newest)
            silence_limit = self.start_timeout if any(text in ("", STARTING) for _, _, text in signs) else self.hang_timeout
            if pending and (silence > silence_limit or waited > timeout):
                raise self._hang_error(list(pending.values()))
        return [results[rank] for rank in range(self.num_ranks)]

    def _first_failure(self, errors: dict[int, tuple[str, str]] | None = None) -> RunError:
        """Return the error of the rank that failed first: deaths before exceptions, exceptions of a rank's own before lost connections."""
        errors = dict(errors or {})
        deadline = time.monotonic() + 1.5  # peers notice a death within milliseconds: wait for every report
        dead: list[_Process] = []
        while not dead and time.monotonic() < deadline:
            time.sleep(0.05)
            ended = [process for process in self._processes if process.popen.poll() is not None]
            for process in self._processes:  # after the check of ended ranks: a rank reports its exception before it ends
                with contextlib.suppress(EOFError, OSError):
                    while process.rank not in errors and process.connection.poll(0):
                        message = process.connection.recv()
                        if message[0] == "error":
                            errors[process.rank] = message[1:]
            dead = [process for process in ended if process.rank not in errors]
        if dead:
            process = min(dead, key=lambda process: process.popen.returncode == -signal.SIGABRT)  # a lost peer may abort a rank
            code = process.popen.returncode
            doing = process.heartbeat.read()[2] or STARTING
            words = last_log_line(self._folder / f"log{process.rank}", code)
            remedy = "; the kernel does that where memory runs out" if code == -signal.SIGKILL else ""
            died = f"rank {process.rank} of {self.num_ranks} died ({exit_reason(code)}) during {doing!r}{words}"
            return RunError(f"{died}; nothing was written{remedy}")
        if not errors:
            return RunError(f"a rank of {self.num_ranks} closed its connection; nothing was written")
        primary = [rank for rank, (text, _) in sorted(errors.items()) if not any(word in text.lower() for word in _SECONDARY)]
        rank = primary[0] if primary else min(errors)
        text, trace = errors[rank]
        failure = RunError(f"rank {rank} of {self.num_ranks} failed: {' '.join(text.split())[:300]}")
        failure.add_note(trace)
        return failure

    def _hang_error(self, pending: list[_Process]) -> RunError:
        """Return the error of the rank that the others wait for: one that does not respond, else one outside any collective."""
        for process in pending:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        stacks = {}
        for process in pending:
            path = self._folder / f"stack{process.rank}"
            stacks[process.rank] = path.read_text(errors="replace") if path.exists() else ""
        silent = [p for p in pending if not stacks[p.rank]]
        busy = [p for p in pending if not any(word in line for line in stacks[p.rank].splitlines()[:8] for word in _WAITING)]
        suspect = min(silent or busy or pending, key=lambda p: p.heartbeat.read()[0])
        when = suspect.heartbeat.read()[0]
        failure = self._hung(suspect, f"no sign of life for {time.monotonic() - when:.0f} s" if when else "no sign of life since its start")
        failure.add_note("\n".join(f"rank {rank}:\n{stack or '(no answer)'}" for rank, stack in stacks.items()))
        return failure

    def _hung(self, process: _Process, why: str) -> RunError:
        doing = process.heartbeat.read()[2] or STARTING
        return RunError(
            f"rank {process.rank} of {self.num_ranks} hung: {why}, last during {doing!r}; the run was ended and nothing was written"
        )

    def close(self) -> None:
        """Kill every worker and remove the temporary folder."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.connection.close()
        for process in self._processes:
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self._processes:
            process.popen.wait()
        self._processes = []
        self._scope.close()


def workers_of(
    group: WorkerGroup | None, num_ranks: int, *, device: str, hang_timeout: float, on_progress: Callable[[str], None] | None = None
) -> AbstractContextManager[WorkerGroup]:
    """Return the given group, which stays open, or a new one."""
    if group is not None:
        return nullcontext(group)
    return WorkerGroup(num_ranks, device=device, hang_timeout=hang_timeout, on_progress=on_progress)


def torchrun_worker(timeout: float = 25.0) -> Worker | None:
    """Return the worker of this process if a launcher such as torchrun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = (launched_number(name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= world_size:
        raise InputError(f"RANK={rank}: must be below WORLD_SIZE={world_size}; start the run with torchrun, or unset both for one without")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise InputError(
            f"{missing[0]}: is not set although RANK and WORLD_SIZE are; start the run with torchrun, or unset these for one without"
        )
    launched_number("MASTER_PORT")
    torch = importlib.import_module("torch")
    import torch.distributed as dist

    worker = Worker(rank, world_size, "cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        # No parent monitors these ranks: the timeout of the collectives ends a run with a dead or hung rank.
        die_with_parent(os.getppid())
        init_process_group(worker, None, timeout=timeout)
    return worker


def launched_number(name: str) -> int:
    """Return the integer that a launcher set in an environment variable."""
    value = os.environ[name].strip()
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise InputError(f"{name}={one_line(value)}: must be a whole number; start the run with torchrun, or unset it for a run without")
    return int(value)
