"""Verbs of perfmodel: a request in, a result out."""
