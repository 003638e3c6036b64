"""Kinds of operators: one function each, which describes the operator completely."""
