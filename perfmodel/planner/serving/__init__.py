"""Search for serving plans."""
