"""Search for the best sharding of every operator."""
