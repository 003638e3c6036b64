"""Fits of calibrations to measurements: published kernel tables (GPUs) and microbenchmarks of this machine."""
