"""ZeRO on one rank, for any program: flat buffers of a unit, and torch's optimizers over local shards."""
