"""Benchmarks on a GPU: `make bench-gpu`, or `python -m bench.gpu --help`.

`__main__.py` is the command and the loop over cases; `cases.py` says what is looked up and how many bytes that moves;
`implementations.py` who does it; `checks.py` that they do it right; `timing.py` how long it takes; `report.py` writes.
`apart.py` has it done by another process where a GPU is lost to one (`context.py`).
`python -m bench.gpu.predict` says beforehand how long it takes: `model.py` is the model, `expected.py` what it knows
of a case, `code_paths.py` what it reads in the machine code; `published.py` has the figures of others.
"""
