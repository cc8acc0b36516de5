"""Studies: many runs of the trainer, and what they show together. `python -m bench.studies --help`, docs/studies.md."""
