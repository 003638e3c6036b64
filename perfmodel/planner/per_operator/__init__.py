"""The best sharding of every operator."""
