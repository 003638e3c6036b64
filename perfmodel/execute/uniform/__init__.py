"""Runs uniform plans with torch's own parallelism."""
