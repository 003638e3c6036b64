"""The command line: `app` dispatches to the verb; one module per verb parses options, calls the library and prints."""

from perfmodel.cli.app import main

__all__ = ["main"]
