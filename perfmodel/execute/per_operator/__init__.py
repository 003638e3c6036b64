"""Execution of plans with a sharding per operator."""
