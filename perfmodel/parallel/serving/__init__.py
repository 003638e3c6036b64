"""Serving: engines, plans of serving and what is predicted of them."""
