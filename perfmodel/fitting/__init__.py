"""Fit of an execution profile to the user's measured runs (`perfmodel fit`)."""
