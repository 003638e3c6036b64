"""Predictions of published runs by fits that did not see their models."""
