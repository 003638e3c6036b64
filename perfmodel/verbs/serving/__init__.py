"""The verb `serve`: prediction of a service, its plan, and searches for the best one."""
