"""Benchmarks: every op beside its peers, with bytes moved and the measured limit.

On the CPU: `python -m bench.run --help`. On a GPU: `python -m bench.gpu --help`.
"""
