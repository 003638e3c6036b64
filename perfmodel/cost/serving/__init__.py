"""What serving costs: steps of prefill and decode, memory, load. Pure array formulas; no file, no torch."""
