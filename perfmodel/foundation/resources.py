"""Folders of shipped data, and atomic writes of files."""

import os
import re
import stat
from functools import lru_cache
from pathlib import Path

from perfmodel.foundation.errors import InputError, PerfModelError, bad_field

_PACKAGE = Path(__file__).resolve().parent.parent

# Names of a process's own streams: their descriptors are written to, and the files behind them are never replaced.
_STREAM = re.compile(r"(?:/dev|/proc/self)/fd/(\d{1,9})|/dev/(stdout|stderr)", re.ASCII)


@lru_cache(maxsize=16)
def resource_dir(name: str) -> Path:
    """Return the folder of shipped data `name` ("hardware_specs", "strategies"): in an installed wheel, else in the checkout."""
    for folder in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise PerfModelError(f"{name}: the shipped data folder is missing from this installation; install perfmodel again")


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` completely or not at all.

    It is written to a temporary file in the same folder, flushed to disk and renamed. On a full disk, a missing folder or a denied
    permission the old file stays unchanged, the temporary one is removed, and an `InputError` names the path. The target of a symbolic
    link is written, and the link stays. A device, a pipe or a terminal (`/dev/null`, `/dev/stdout`) is written to, never replaced.
    """
    import tempfile

    target = Path(path)
    temporary = ""
    try:
        special = _open_special(target)
        if special is not None:
            with os.fdopen(special, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
            return
        target = Path(os.path.realpath(target))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except (OSError, UnicodeError) as error:
        _remove(temporary)
        raise InputError(f"{path}: cannot be written ({_reason(error)}); choose another path or free some space") from error
    except BaseException:
        _remove(temporary)
        raise


def check_can_be_written(path: str | Path, field: str, *, endings: str = "", rule: str = "", remedy: str = "") -> None:
    """Refuse a path that `write_atomically` cannot write, before the work is done.

    endings   allowed endings, separated by spaces; empty: all. rule: their text in the message
    """
    text = os.fspath(path)
    if endings and os.path.splitext(text)[1].lower() not in endings.split():
        raise bad_field(field, path, f"must end in {rule or endings}", remedy)
    if not os.path.isabs(text):
        try:
            os.getcwd()
        except OSError:
            raise bad_field(field, text, "the working folder was removed", "change to another folder or give a full path") from None
    folder, mode = os.path.dirname(os.path.realpath(text) if os.path.islink(text) else text) or ".", 0
    try:
        mode = os.stat(text).st_mode
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise bad_field(field, text, f"cannot be written ({_reason(error)})", "choose another path") from None
    if not os.path.isdir(folder):
        raise bad_field(field, text, "its folder does not exist", "make it or choose another path")
    if stat.S_ISDIR(mode):
        raise bad_field(field, text, "is a folder", "give the path of a file in it")
    if not os.access(folder if stat.S_ISREG(mode) or not mode else text, os.W_OK):
        raise bad_field(field, text, "may not be written by this user", "choose another path")


def check_can_be_made(folder: Path) -> None:
    """Refuse a folder that cannot be created or written to, before the work is done."""
    ancestor = folder
    while not os.path.lexists(ancestor) and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not os.path.isdir(ancestor) or not os.access(ancestor, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be made or written by this user (because of {ancestor}); choose a file with --save")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _open_special(target: Path) -> int | None:
    """Return a descriptor of an existing device, pipe or terminal, or of a stream of this process; else None."""
    stream = _STREAM.fullmatch(str(target))
    if stream:
        return os.dup(int(stream[1]) if stream[1] else {"stdout": 1, "stderr": 2}[stream[2]])
    try:
        mode = target.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    opened = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a reader raises an error and does not block
    os.set_blocking(opened, True)
    return opened


def _mode_for(target: Path) -> int:
    """Return the permissions of the replaced file, else those of a file that `open` creates."""
    try:
        return target.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _remove(temporary: str) -> None:
    if temporary:
        try:
            os.unlink(temporary)
        except OSError:
            pass


def require_torch(purpose: str) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError(f"torch: is needed to {purpose}; install perfmodel[torch]")
