"""Configuration files of training frameworks and serving engines: read as a job and a plan, and written from a plan.

Each framework has a table of keys (strategies/configs/*.yaml), by which `read.py` reads and `write.py` writes.
"""
