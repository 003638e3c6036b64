"""Standard output and error as a program may find them: closed, full, or with a reader that has gone."""

from __future__ import annotations

import errno
import io
import os
import sys

from perfmodel.foundation.errors import PerfModelError


class OutputError(PerfModelError):
    """Standard output takes nothing more. `is_unread`: because its reader (`| head`) has gone, which is no fault."""

    def __init__(self, reason: str, *, is_unread: bool = False) -> None:
        super().__init__(f"standard output: cannot be written ({reason}); write to another place")
        self.is_unread = is_unread


class _Output(io.TextIOWrapper):
    """Says which stream failed: an OSError of a write names no file."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _output_error(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _output_error(error) from None


class _ErrorStream(io.TextIOWrapper):
    """Standard error: where even that cannot be written, nobody is left to be told."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def _output_error(error: OSError) -> OutputError:
    return OutputError(error.strerror or str(error), is_unread=error.errno == errno.EPIPE)


def guard_streams() -> None:
    """From here on, a failed write to standard output is an `OutputError`, and one to standard error is nothing.

    What the terminal's encoding does not have is written as an escape: names and messages may hold anything.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise OutputError("it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # `shutil.get_terminal_size` asks `sys.__stdout__`, which the wrapper has just detached.
        sys.stdout = sys.__stdout__ = _wrapped(_Output, sys.stdout)  # type: ignore[misc]
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _wrapped(_ErrorStream, sys.stderr)


def _wrapped(kind: type[io.TextIOWrapper], stream: io.TextIOWrapper) -> io.TextIOWrapper:
    encoding, lines = stream.encoding, stream.line_buffering
    return kind(stream.detach(), encoding=encoding, errors="backslashreplace", line_buffering=lines)


def abandon_output() -> None:
    """Send what is still buffered nowhere: the interpreter would complain about it on its way out."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
