"""Serving: requests, plans, predictions and measurements."""
