"""Level 0: units, errors, files, and the conversion between files and types."""
