"""The command line: `app` finds the verb; a file for each verb parses, asks and prints."""

from perfmodel.cli.app import main

__all__ = ["main"]
