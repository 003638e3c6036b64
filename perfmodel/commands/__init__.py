"""Floor 6: one module for each group of verbs, and how their results are printed."""
