"""Execution of uniform plans with torch's own parallelism."""
