"""Floor 0: units, errors, files, and the one road between files and types."""
