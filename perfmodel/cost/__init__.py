"""Cost of a step: operators, collectives, memory, pipeline, overlap. Pure array formulas; no file, no torch."""
