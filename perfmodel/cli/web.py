"""`perfmodel web`: a local page for predictions and searches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.words import command, option
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.web.endpoints import DEFAULT_PORT, PageServer


@command()
def web(
    *,
    port: Annotated[int, option("N", "Port of 127.0.0.1 to listen on; 0: a free one.")] = DEFAULT_PORT,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only; open no browser.")] = False,
    static: Annotated[
        Path | None, option("FOLDER", "Write the page as files for any web server; perfmodel then runs in the browser.")
    ] = None,
    pyodide: Annotated[str, option("URL|FOLDER", "With --static: a full distribution of Pyodide. A folder's files are copied.")] = "",
) -> int:
    """Open a local page: choose or paste model, cluster and plan; see time, memory and the best plans at once.

    It listens on 127.0.0.1 only and ends with Ctrl-C. With --static the page is written as files, which need no server of perfmodel.
    """
    import webbrowser
    from threading import Thread

    from perfmodel.web.site import write_site

    if static is not None:
        if not pyodide:
            raise InputError("--pyodide: is missing; give the address or the folder of a full distribution of Pyodide, see pyodide.org")
        files = write_site(static, pyodide)
        size = sum(file.stat().st_size for file in files)
        print(f"perfmodel web: {len(files)} files in {static}, {size / 1e6:.1f} MB; serve them with `python -m http.server -d {static}`")
        return 0
    if pyodide:
        raise InputError("--pyodide: is for a page of files; give it with --static FOLDER")
    if not 0 <= port < 65536:
        raise bad_field("port", port, "must be from 0 to 65535", f"write --port {DEFAULT_PORT}, or --port 0 for a free one")
    with PageServer(port) as server:
        print(f"perfmodel web: {server.url} (Ctrl-C ends it)", flush=True)
        if not no_browser:
            Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
