"""Level 2: the mesh, the sharding algebra, rule sets, schedules, plans and plan files."""
