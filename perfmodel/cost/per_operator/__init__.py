"""Cost of plans with a sharding for each operator."""
