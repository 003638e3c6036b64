"""A user's torch modules under plans with a sharding per operator."""
