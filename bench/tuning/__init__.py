"""Measures how time and bytes of lookups and training steps scale with tables, batch, ids, columns, skew and format.

`python -m bench.tuning --help`; docs/tuning.md is made from what it measures.
"""
