"""Benchmarks on a GPU: `make bench-gpu`, or `python -m bench.gpu --help`.

`__main__.py` is the command and the loop over cases; `cases.py` says what is looked up and how many bytes that moves;
`implementations.py` who does it; `checks.py` that they do it right; `timing.py` how long it takes; `report.py` writes.
"""
