"""Everything that runs on torch: a plan executed, checked and measured. Importing this package does not import torch."""
