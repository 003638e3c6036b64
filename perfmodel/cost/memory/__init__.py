"""Peak memory of a chip: saved activations, the moments of a step, bytes by class, and the fullest pipeline rank."""
