"""Arithmetic of each layer kind, once: torch functions of local tensors and sizes, called by every program of the executor."""
