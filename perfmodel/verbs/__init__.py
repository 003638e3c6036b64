"""Verbs of perfmodel: the functions of the API, from a request to a result."""
