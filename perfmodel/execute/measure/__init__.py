"""Measurement of steps, operators and this machine."""
