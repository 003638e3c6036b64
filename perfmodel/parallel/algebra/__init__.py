"""Sharding algebra: layouts, redistributions, rule sets and ZeRO."""
