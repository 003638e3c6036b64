"""Measured runs of one's own to an execution profile of one's own: what `perfmodel fit` does."""
