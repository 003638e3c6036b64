"""Everything that runs on torch: execution, checking and measurement of plans. Importing this package does not import torch."""
