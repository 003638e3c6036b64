"""Level 1: chips, links, clusters and calibrations, and the files that they are read from."""
