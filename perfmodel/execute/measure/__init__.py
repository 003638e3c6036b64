"""Measures steps, operators and this machine."""
