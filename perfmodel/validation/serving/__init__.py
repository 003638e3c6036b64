"""Published runs of serving: read, predicted and judged; what they say of engines."""
