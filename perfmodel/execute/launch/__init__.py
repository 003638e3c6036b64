"""Worker processes: start, monitoring and cleanup."""
