"""Floor 2: the mesh, the sharding algebra, rule sets, schedules, execution profiles and plan files."""
