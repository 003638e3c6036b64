"""Torch modules as graphs of operators over named dims, without torch."""
