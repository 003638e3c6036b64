"""Floor 4, the search kernel: sees arrays of costs only, and knows nothing of plans."""
