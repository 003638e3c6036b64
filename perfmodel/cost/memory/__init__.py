"""Peak memory of a chip: what is kept, the moments of a step, bytes by class, and the fullest pipeline rank."""
