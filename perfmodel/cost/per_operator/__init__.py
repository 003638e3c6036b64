"""What such plans take."""
