"""Keys of a run's records that differ when it is run again."""

TIMES = {"examples_per_second", "train_seconds", "seconds", "dedup_seconds", "peak_memory_bytes"}
