"""Search among plans of serving."""
