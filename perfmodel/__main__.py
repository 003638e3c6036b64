"""`python -m perfmodel` is `perfmodel`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # `-m` puts the working folder there: its modules would stand in for Python's own

    from perfmodel.cli import main

    main()
