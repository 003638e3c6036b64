"""ZeRO on one rank, whatever program the gradients come from: flat buffers of a unit, and torch's optimizers over local shards."""
