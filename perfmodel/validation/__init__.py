"""Validation against published runs (`perfmodel validate`): cases, their predictions and errors."""
