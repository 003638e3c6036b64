"""Kinds of operators of a network: one file each, one function that describes the operator completely."""
