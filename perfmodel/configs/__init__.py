"""Configuration files of training frameworks and serving engines: read as a job and a plan, and written from a plan.

A framework is a table of keys (strategies/configs/*.yaml); `read.py` reads by it and `write.py` writes by it.
"""
