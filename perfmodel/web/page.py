"""The web page as one text. It sends requests to a local server (`endpoints.py`) or to perfmodel in the browser (`site.py`)."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from string import Template

from perfmodel.report.html import SCRIPT, STYLE

_FOLDER = Path(__file__).parent


def part_text(name: str) -> str:
    """Return the text of a file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def page(*, is_static: bool = False) -> tuple[str, str]:
    """Return the page and its content security policy: only its own style and script, and requests to its own origin.

    is_static   page without a server; the policy is part of the page and allows its worker
    """
    transport = part_text(f"transport_{'static' if is_static else 'server'}.js")
    parts = {"style": STYLE + part_text("page.css"), "script": SCRIPT + transport + part_text("page.js")}
    hashes = {name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in parts.items()}
    hashed = "; ".join(f"{name}-src 'sha256-{value}'" for name, value in hashes.items())
    source = "worker" if is_static else "connect"
    policy = f"default-src 'none'; {hashed}; {source}-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' if is_static else ""
    return Template(part_text("page.html")).substitute(parts, head=head), policy
