"""Layouts, redistributions and what follows from them; rule sets; ZeRO."""
