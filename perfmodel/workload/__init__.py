"""Workloads: model shapes, jobs, and the graphs of operators that follow from them."""
