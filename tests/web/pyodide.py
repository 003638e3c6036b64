"""Write a folder with Pyodide and numpy for the test of the static page: `python -m tests.web.pyodide FOLDER`.

npm has Pyodide without packages, and a numpy that emscripten-forge built for the same Python and Emscripten (3.12, 3.1.58). Pyodide's own
packages are on no registry.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

PYODIDE = "pyodide@0.27.7"
NUMPY = "@emscripten-forge/numpy@2.0.1-py312h4e66579-0"
_SITE = "lib/python3.12/site-packages/"
_WHEEL = "numpy-2.0.1-cp312-cp312-pyodide_2024_0_wasm32.whl"
#: That build asks glibc's `backtrace` who called it before it reuses temporary arrays, and Pyodide has no such function. One of the same
#: type that returns 0 turns this off; Pyodide's own build of numpy does so too.
_BACKTRACE, _NOTHING = b"\x09backtrace", b"\x09setrlimit"


def write_runtime(folder: Path) -> None:
    """Download both and write what a distribution of Pyodide has: its core, numpy's wheel and a lock file that names it."""
    with TemporaryDirectory() as download:
        command = ["npm", "pack", "--silent", "--pack-destination", download, PYODIDE, NUMPY]
        core, numpy = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split()
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(Path(download, core)) as archive:
            for member in archive.getmembers():
                if member.isfile():
                    Path(folder, Path(member.name).name).write_bytes(archive.extractfile(member).read())
        with tarfile.open(Path(download, numpy)) as outer:
            inner = next(member for member in outer.getmembers() if member.name.endswith(".tar.gz"))
            with tarfile.open(fileobj=outer.extractfile(inner)) as archive, zipfile.ZipFile(folder / _WHEEL, "w") as wheel:
                for member in archive.getmembers():
                    name = member.name.removeprefix("./")
                    if member.isfile() and name.startswith(_SITE) and "/tests/" not in name:
                        wheel.writestr(name.removeprefix(_SITE), archive.extractfile(member).read().replace(_BACKTRACE, _NOTHING))
    lock = json.loads((folder / "pyodide-lock.json").read_text())
    entry = lock["packages"]["numpy"] | {"version": "2.0.1", "file_name": _WHEEL}
    entry["sha256"] = hashlib.sha256((folder / _WHEEL).read_bytes()).hexdigest()
    (folder / "pyodide-lock.json").write_text(json.dumps(lock | {"packages": {"numpy": entry}}))


if __name__ == "__main__":
    write_runtime(Path(sys.argv[1]))
