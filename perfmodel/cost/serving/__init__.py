"""Cost of serving: prefill and decode steps, memory, load. Pure array formulas; no file, no torch."""
