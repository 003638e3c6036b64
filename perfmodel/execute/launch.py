"""Groups of worker processes on this machine, and the watch over them.

`WorkerGroup(num_ranks)` starts the processes once and runs functions on all of them in turn (importing torch costs
seconds, so tests, the demo and calibration share a group). A rank that dies, raises or hangs ends the group within
`hang_timeout` seconds and a few more, with a `RunError` that names the rank, and leaves no process behind.

Nothing here imports torch: only the workers do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from perfmodel.errors import RunError

#: What a rank says while it imports and joins the process group: that may take longer than any step.
STARTING = "starting up"
#: Imported before a rank is ready, so that no call spends seconds on it.
PRELOADED = ("perfmodel.execute.measure", "perfmodel.execute.gradient_check")

#: prctl option: the signal that a process gets when its parent dies (linux/prctl.h).
PR_SET_PDEATHSIG = 1

#: A heartbeat file holds the monotonic time, a counter and what the rank was doing.
HEARTBEAT_BYTES = 256
_HEARTBEAT_HEAD = struct.Struct("<dqi")

#: Frames that show a rank waiting for its peers rather than being the one that they wait for.
_WAITING = ("distributed_c10d.py", "_functional_collectives.py", "pipelining/schedules.py", "wait_tensor", "in wait")

#: What a rank says when a peer is gone: a consequence, not the cause.
_SECONDARY = ("closed by peer", "reset by peer", "broken pipe", "timed out waiting", "connection refused", "gloo", "nccl", "store")


#: glibc: a worker keeps the memory that it frees, as the caching allocator of a GPU does; else every step pays for fresh pages again.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)}


class Heartbeat:
    """One rank's sign of life, in a file that the parent can read while the rank is stuck."""

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
    """What a function that runs on every rank gets as its first argument."""

    rank: int
    world_size: int
    device: str
    heartbeat: Heartbeat | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    def beat(self, what: str) -> None:
        """Say that this rank moves on; one that says nothing for `hang_timeout` seconds is taken to hang."""
        if self.heartbeat is not None:
            self.heartbeat.beat(what)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere the closed pipe ends the worker)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def init_process_group(worker: Worker, store: Any, timeout: float) -> None:
    """gloo on CPUs; on GPUs nccl, with gloo beside it for objects."""
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


def worker_main(descriptor: int, rank: int, world_size: int, device: str, folder: str, parent: int, timeout: float) -> None:
    """Entry point of a spawned worker: join the group, then run what the parent sends until it hangs up."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    import faulthandler

    stack = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115 - must stay open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(descriptor)
    worker = Worker(rank, world_size, device, Heartbeat(Path(folder) / f"beat{rank}"))
    try:
        worker.beat(STARTING)
        import torch.distributed as dist

        for module in PRELOADED:
            importlib.import_module(module)
        limit = timedelta(seconds=timeout)
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
            connection.send(("port", store.port))
        else:
            store = dist.TCPStore("127.0.0.1", connection.recv(), world_size, is_master=False, timeout=limit)
        init_process_group(worker, store, timeout)
        worker.beat("ready")
        connection.send(("ok", pickle.dumps(None)))
        while True:
            message = connection.recv_bytes()
            function, arguments = pickle.loads(message)
            worker.beat(f"starting {getattr(function, '__name__', function)}")
            result = function(worker, *arguments)
            worker.beat("done")
            connection.send(("ok", pickle.dumps(result)))
    except EOFError:
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
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

    `function` must be importable (a module's top-level function), arguments and results picklable.
    hang_timeout   seconds without a sign of life from any unfinished rank after which the group is given up
    on_progress    called now and then with what rank 0 is doing
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
        self._folder = ""

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def __enter__(self) -> WorkerGroup:
        try:
            self._folder = tempfile.mkdtemp(prefix="perfmodel-run-")
            for rank in range(self.num_ranks):
                self._processes.append(self._start(rank))
            port = self._receive([0], self.start_timeout, kind="port")[0]
            for process in self._processes[1:]:
                process.connection.send(port)
            self._receive(range(self.num_ranks), self.start_timeout)
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
        ours, theirs = Pipe()
        folder = Path(self._folder)
        heartbeat = Heartbeat(folder / f"beat{rank}", create=True)
        # Every gloo or nccl transfer outlives the watch below: the parent, not a peer's timeout, names the culprit.
        timeout = 3 * max(self.hang_timeout, 20.0) + self.start_timeout
        arguments = (theirs.fileno(), rank, self.num_ranks, self.device, self._folder, os.getpid(), timeout)
        code = f"from perfmodel.execute.launch import worker_main; worker_main(*{arguments!r})"
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        if self.device == "cpu":
            environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = "1"
            for name, value in _KEEP_MEMORY.items():
                environment.setdefault(name, value)
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        with (folder / f"log{rank}").open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        return _Process(rank, popen, ours, heartbeat)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = float("inf")) -> list[Any]:
        """Run `function(worker, *arguments)` on every rank and return the results by rank."""
        message = pickle.dumps((function, arguments))
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):  # a dead rank is found below
                    process.connection.send_bytes(message)
            return self._receive(range(self.num_ranks), timeout)
        except BaseException:
            self.close()
            raise

    def _receive(self, ranks: Sequence[int], timeout: float, *, kind: str = "ok") -> list[Any]:
        pending = {self._processes[rank].connection: self._processes[rank] for rank in ranks}
        results: dict[int, Any] = {}
        start = last_sign = time.monotonic()
        while pending:
            for connection in wait(list(pending), timeout=0.2):
                process = pending[connection]  # type: ignore[index]
                try:
                    message = process.connection.recv()
                except (EOFError, OSError):
                    raise self._blame_failure() from None
                if message[0] == "error":
                    raise self._blame_failure({process.rank: message[1:]})
                if message[0] != kind:
                    raise RunError(f"rank {process.rank} sent {message[0]!r} where {kind!r} was due")
                results[process.rank] = message[1] if kind == "port" else pickle.loads(message[1])
                del pending[connection]  # type: ignore[arg-type]
            now = time.monotonic()
            signs = [process.heartbeat.read() for process in pending.values()]
            if self.on_progress is not None and self._processes:
                self.on_progress(self._processes[0].heartbeat.read()[2])
            last_sign = max([last_sign, *(when for when, _, _ in signs)])
            silence_limit = self.start_timeout if any(text in ("", STARTING) for _, _, text in signs) else self.hang_timeout
            if pending and (now - last_sign > silence_limit or now - start > timeout):
                raise self._blame_hang(list(pending.values()), now)
        return [results[rank] for rank in ranks]

    def _blame_failure(self, errors: dict[int, tuple[str, str]] | None = None) -> RunError:
        """Which rank failed first? A death before an exception, an exception of its own before a lost connection."""
        errors = dict(errors or {})
        deadline = time.monotonic() + 1.5  # peers notice a death within milliseconds: let every report come in
        while time.monotonic() < deadline:
            for process in self._processes:
                with contextlib.suppress(EOFError, OSError):
                    if process.rank not in errors and process.connection.poll(0):
                        message = process.connection.recv()
                        if message[0] == "error":
                            errors[process.rank] = message[1:]
            if any(p.popen.poll() is not None and p.rank not in errors for p in self._processes):
                break
            time.sleep(0.05)
        for process in self._processes:
            code = process.popen.poll()
            if code is not None and process.rank not in errors:
                cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                doing = process.heartbeat.read()[2] or "starting"
                words = self._log_tail(process)
                return RunError(f"rank {process.rank} of {self.num_ranks} died ({cause}) during {doing!r}{words}; nothing was written")
        if not errors:
            return RunError(f"a rank of {self.num_ranks} closed its connection; nothing was written")
        primary = [rank for rank, (text, _) in sorted(errors.items()) if not any(word in text.lower() for word in _SECONDARY)]
        rank = primary[0] if primary else min(errors)
        text, trace = errors[rank]
        failure = RunError(f"rank {rank} of {self.num_ranks} failed: {' '.join(text.split())[:300]}")
        failure.add_note(trace)
        return failure

    def _blame_hang(self, pending: list[_Process], now: float) -> RunError:
        """Name the rank that the others wait for: one that cannot even answer, else one not inside a collective."""
        for process in pending:
            with contextlib.suppress(ProcessLookupError):
                process.popen.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        stacks = {}
        for process in pending:
            path = Path(self._folder) / f"stack{process.rank}"
            stacks[process.rank] = path.read_text(errors="replace") if path.exists() else ""
        silent = [p for p in pending if not stacks[p.rank]]
        busy = [p for p in pending if not any(word in line for line in stacks[p.rank].splitlines()[:8] for word in _WAITING)]
        suspect = min(silent or busy or pending, key=lambda p: p.heartbeat.read()[0])
        when, _, doing = suspect.heartbeat.read()
        since = f"{now - when:.0f} s" if when else "its start"
        failure = RunError(
            f"rank {suspect.rank} of {self.num_ranks} hung: no sign of life for {since}, last during {doing or 'starting'!r}; "
            "the run was ended and nothing was written"
        )
        failure.add_note("\n".join(f"rank {rank}:\n{stack or '(no answer)'}" for rank, stack in stacks.items()))
        return failure

    def _log_tail(self, process: _Process) -> str:
        with contextlib.suppress(OSError):
            lines = (Path(self._folder) / f"log{process.rank}").read_text(errors="replace").strip().splitlines()
            if lines:
                return f", last words: {lines[-1][:200]}"
        return ""

    def close(self) -> None:
        """End every worker, for certain, and remove the temporary folder."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.connection.close()
        for process in self._processes:
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self._processes:
            process.popen.wait()
        self._processes = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def torchrun_worker(timeout: float = 25.0) -> Worker | None:
    """The worker of this process where a launcher such as torchrun has set RANK and WORLD_SIZE; else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    torch = importlib.import_module("torch")
    import torch.distributed as dist

    worker = Worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        # No parent of ours watches here: the transfers' own limit ends a run with a dead or hung rank.
        die_with_parent()
        init_process_group(worker, None, timeout=timeout)
    return worker
