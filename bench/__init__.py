"""Benchmarks: every op beside its peers, with bytes moved and the measured limit. `python -m bench.run --help`."""
