"""Published runs: read, predicted and compared; what `perfmodel validate` needs."""
