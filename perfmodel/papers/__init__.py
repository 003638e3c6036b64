"""What single papers did, on public parts only."""
