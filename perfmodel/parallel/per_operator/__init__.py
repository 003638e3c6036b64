"""Plans with a sharding per operator."""
