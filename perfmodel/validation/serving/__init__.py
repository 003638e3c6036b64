"""Validation against published serving runs: cases, their predictions and errors, by engine."""
