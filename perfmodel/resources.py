"""Where the shipped data files are, and how a file is written so that nothing is left half-written."""

import os
import tempfile
from pathlib import Path

from perfmodel.errors import InputError, PerfModelError

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The folder of shipped data `name` ("hardware_specs", "strategies"): inside an installed wheel, else at the root of the checkout."""
    for folder in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise PerfModelError(f"{name}: the shipped data folder is missing from this installation; install perfmodel again")


def user_calibrations_dir() -> Path:
    """Where `perfmodel calibrate` leaves calibrations and predictions look first: ~/.local/share/perfmodel/calibrations.

    It is the XDG default below the home folder; it need not exist.
    """
    try:
        home = Path.home()
    except RuntimeError as error:
        raise InputError("home: this user has no home folder; save the calibration with --save and name it with --calibration") from error
    return home / ".local" / "share" / "perfmodel" / "calibrations"


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` whole or not at all.

    It goes to a temporary file in the same folder, is forced to disk and then renamed. On a full disk, a missing folder or a
    refused permission the old file stays as it was, the temporary one is removed, and an `InputError` names the path.
    """
    target = Path(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except (OSError, UnicodeError) as error:
        _remove(temporary)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{target}: cannot be written ({reason}); choose another path or free some space") from error
    except BaseException:
        _remove(temporary)
        raise


def _mode_for(target: Path) -> int:
    """Permissions of the file that is replaced, else those that a plain `open` would give."""
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
