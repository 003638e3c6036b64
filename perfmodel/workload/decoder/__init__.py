"""The parts of a transformer's layers, written down as operators: one file for each kind of mixer and feed-forward."""
