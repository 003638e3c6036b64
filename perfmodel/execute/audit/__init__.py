"""Torch's own counts of a plan's program."""
