"""Runs plans in which every operator has a sharding of its own."""
