"""Fits of published kernel tables, and how far they are from what they did not see."""
