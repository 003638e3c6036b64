"""Tests of the executor: a package, so that its worker processes end with its last test."""
