"""`perfmodel web`: a local page for predictions and searches."""

from __future__ import annotations

from typing import Annotated

import typer

from perfmodel.cli.words import command
from perfmodel.foundation.errors import bad_field


@command()
def web(
    *,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port of 127.0.0.1 to listen on; 0: a free one.")] = 8517,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only; open no browser.")] = False,
) -> int:
    """Open a local page: choose or paste model, cluster and plan; see time, memory and the best plans at once.

    It listens on 127.0.0.1 only and ends with Ctrl-C.
    """
    import webbrowser
    from threading import Thread

    from perfmodel.web.endpoints import PageServer

    if not 0 <= port < 65536:
        raise bad_field("port", port, "must be from 0 to 65535", "write --port 8517, or --port 0 for a free one")
    with PageServer(port) as server:
        print(f"perfmodel web: {server.url} (Ctrl-C ends it)", flush=True)
        if not no_browser:
            Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
