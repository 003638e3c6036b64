"""Level 1: chips, links, clusters and calibrations, and the readers and writers of their files."""
