"""The web page: as one text, and as static files for any web server.

It sends requests to a local server (`endpoints.py`); the static page to perfmodel in the browser, with Pyodide.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template
from typing import Any

from perfmodel.foundation.errors import bad_field
from perfmodel.foundation.files import read_text
from perfmodel.foundation.resources import resource_dir, write_atomically
from perfmodel.report.html import SCRIPT, STYLE

_PACKAGE = Path(__file__).parents[1]
#: Pure-Python dependencies of perfmodel for the page; PyYAML without its compiled part.
_DISTRIBUTIONS = ("PyYAML",)
#: Packages of perfmodel that need torch or processes.
_LEFT_OUT = ("execute", "calibrate", "fitting", "validation")
#: Compiled dependencies, from Pyodide; pydantic is for pasted plan files.
_COMPILED = ("numpy", "pydantic")
_LOCK, _RUNTIME = "pyodide-lock.json", "pyodide"


def _part(name: str) -> str:
    """Return the text of a file of this folder."""
    return (_PACKAGE / "web" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=2)
def page(*, is_static: bool = False) -> tuple[str, str]:
    """Return the page and its content security policy: only its own style and script, and requests to its own origin.

    is_static   page without a server; the policy is part of the page and allows its worker
    """
    transport = _part(f"transport_{'static' if is_static else 'server'}.js")
    parts = {"style": STYLE + _part("page.css"), "script": SCRIPT + transport + _part("page.js")}
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in parts.items()}
    hashed = "; ".join(f"{name}-src 'sha256-{value}'" for name, value in hashes.items())
    source = "worker" if is_static else "connect"
    policy = f"default-src 'none'; {hashed}; {source}-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if is_static else ""
    return Template(_part("page.html")).substitute(parts, head=head), policy


def write_site(folder: str | Path, pyodide: str) -> list[Path]:
    """Write the static page and return its files, to be opened through a web server.

    pyodide   URL or folder of a full Pyodide distribution (Python 3.11 or newer); required files of a folder are copied
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise bad_field("static", folder, "is a file", "name a folder")
    runtime = pyodide.rstrip("/") if pyodide.startswith(("https://", "http://")) else _RUNTIME
    copied = [] if runtime != _RUNTIME else list(_runtime_files(Path(pyodide)))
    try:
        (target / _RUNTIME if copied else target).mkdir(parents=True, exist_ok=True)
        for file in copied:
            shutil.copyfile(file, target / _RUNTIME / file.name)
    except OSError as error:
        raise bad_field("static", folder, f"cannot be written ({error.strerror})", "choose another folder") from None
    worker = Template(_part("static_worker.js")).substitute(runtime=f"{runtime}/", packages=json.dumps(_COMPILED))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, path in sorted(_archived()):
            entry = zipfile.ZipInfo(name)  # without a timestamp, so that the same version gives the same bytes
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    files: Mapping[str, str | bytes] = {"perfmodel.zip": zipped.getvalue(), "worker.js": worker, "index.html": page(is_static=True)[0]}
    for name, content in files.items():
        write_atomically(target / name, content)
    return [*(target / _RUNTIME / file.name for file in copied), *(target / name for name in files)]


def _runtime_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a Pyodide distribution that the page loads: Python and the packages that perfmodel needs."""
    if not (folder / "pyodide.mjs").is_file() or not (folder / _LOCK).is_file():
        remedy = "unpack a full distribution of Pyodide there, or give the address of one"
        raise bad_field("pyodide", folder, "is no folder of Pyodide", remedy)
    packages: Mapping[str, Mapping[str, Any]] = json.loads(read_text(folder / _LOCK, "lock file"))["packages"]
    if not (folder / str(packages.get("numpy", {}).get("file_name"))).is_file():
        raise bad_field("pyodide", folder, "is no folder of Pyodide with numpy", "unpack a full distribution, not its core")
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("pyodide", "python_stdlib")) and file.suffix in (".mjs", ".js", ".wasm", ".zip", ".json"):
            yield file
    wanted = [*_COMPILED]
    for name in wanted:
        package = packages.get(name, {})
        wanted += [dependency for dependency in package.get("depends", ()) if dependency not in wanted]
        if (folder / str(package.get("file_name"))).is_file():
            yield folder / package["file_name"]


def _archived() -> Iterator[tuple[str, Path]]:
    for path in _PACKAGE.rglob("*"):
        name = path.relative_to(_PACKAGE)
        if path.is_file() and path.suffix != ".pyc" and name.parts[0] not in (*_LEFT_OUT, "_data"):
            yield f"perfmodel/{name.as_posix()}", path
    for folder in map(resource_dir, ("hardware_specs", "strategies")):
        for path in folder.rglob("*"):
            if path.is_file():
                yield f"perfmodel/_data/{path.relative_to(folder.parent).as_posix()}", path
    for package in (*_DISTRIBUTIONS, "perfmodel"):
        try:
            files = distribution(package).files or ()
        except PackageNotFoundError:  # perfmodel in a checkout that is not installed
            continue
        for file in files:
            is_about = file.name == "METADATA" or "LICENSE" in file.name  # version, and the licence that has to go with copies
            is_wanted = is_about if ".dist-info" in file.parts[0] else package != "perfmodel" and file.suffix == ".py"
            if is_wanted and not file.parts[0].startswith("..") and Path(str(file.locate())).is_file():
                yield file.as_posix(), Path(str(file.locate()))
