"""Torch modules of the user under plans in which every operator has a sharding of its own."""
