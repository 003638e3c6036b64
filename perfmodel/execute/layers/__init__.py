"""Arithmetic of each layer kind: torch functions of local tensors and sizes, shared by all programs of the executor."""
