"""What in a run's records is not the same when it is run again."""

TIMES = {"examples_per_second", "train_seconds", "seconds", "dedup_seconds", "peak_memory_bytes"}
