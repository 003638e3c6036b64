"""What a step costs: operators, collectives, memory, pipeline, overlap. Pure array formulas; no file, no torch."""
