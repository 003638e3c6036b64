"""Exports torch modules and reads what was exported."""
