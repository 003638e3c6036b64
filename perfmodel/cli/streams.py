"""Standard output and error that may be closed, full, or without a reader."""

from __future__ import annotations

import errno
import io
import os
import sys

from perfmodel.foundation.errors import PerfModelError


class OutputError(PerfModelError):
    """Failed write to standard output.

    is_unread   its reader (`| head`) closed it, which is not an error
    """

    def __init__(self, reason: str, *, is_unread: bool = False) -> None:
        super().__init__(f"standard output: cannot be written ({reason}); write to another place")
        self.is_unread = is_unread


class _Output(io.TextIOWrapper):
    """Standard output that raises OutputError; an OSError of a write does not name the stream."""

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
    """Standard error that ignores failed writes."""

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
    """Make failed writes to standard output raise `OutputError`, and ignore those to standard error.

    Characters missing in the encoding of the terminal are escaped, because names and messages may contain any character.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if sys.stdout is None:
        raise OutputError("it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # `shutil.get_terminal_size` reads `sys.__stdout__`, whose buffer the wrapper detaches.
        sys.stdout = sys.__stdout__ = _wrapped(_Output, sys.stdout)  # type: ignore[misc]
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _wrapped(_ErrorStream, sys.stderr)


def _wrapped(kind: type[io.TextIOWrapper], stream: io.TextIOWrapper) -> io.TextIOWrapper:
    encoding, lines = stream.encoding, stream.line_buffering
    return kind(stream.detach(), encoding=encoding, errors="backslashreplace", line_buffering=lines)


def abandon_output() -> None:
    """Discard buffered output; otherwise the interpreter prints an error at exit."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
