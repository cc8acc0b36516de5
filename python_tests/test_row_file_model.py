"""Row files against a plain model: any order of loads, prefetches, changes, flushes, crashes, generations."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_file_cases import BLOCK, LAYOUT, contents, host_or_skip, noise, open_file, resident_blocks

RowFile = host_or_skip().RowFile


class Model(RuleBasedStateMachine):
    """The expected contents, now and of each generation that can be opened, and the file."""

    BLOCKS, BUDGET = 23, 6
    NUM_BYTES = BLOCKS * BLOCK - 1000

    @initialize(threads=st.integers(1, 3))
    def begin(self, threads):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "file"
        self.budget = self.BUDGET * BLOCK + 100
        self.file = RowFile.create(self.path, self.NUM_BYTES, layout=LAYOUT, memory_budget=self.budget, threads=threads)
        self.now = np.zeros(self.NUM_BYTES, np.uint8)
        self.generation, self.flushed, self.before = 0, self.now.copy(), None
        self.prefetched: set[int] = set()
        self.seed = 0

    def teardown(self):
        if hasattr(self, "file"):
            self.whole()
            self.file.close()
            self.folder.cleanup()

    def whole(self):
        self.file.cancel_prefetch()
        self.prefetched.clear()
        assert np.array_equal(contents(self.file), self.now)

    ranges = st.lists(st.tuples(st.integers(0, NUM_BYTES - 1), st.integers(0, 2 * BLOCK)), max_size=4)

    def arrays(self, ranges):
        starts = np.array([s for s, _ in ranges], np.int64)
        sizes = np.array([min(n, self.NUM_BYTES - s) for s, n in ranges], np.int64)
        spans = [(s // BLOCK, -(-(s + n) // BLOCK)) for s, n in zip(starts, sizes, strict=True) if n]
        touched = {block for first, end in spans for block in range(first, end)}
        return starts, sizes, touched

    @rule(ranges=ranges, write=st.sampled_from(["", "load", "mark"]))
    def load(self, ranges, write):
        starts, sizes, touched = self.arrays(ranges)
        if len(touched | self.prefetched) > self.BUDGET:
            with pytest.raises(MemoryError, match=f"load needs {len(touched) * BLOCK} bytes"):
                self.file.load(starts, sizes, write=write == "load")
            return
        self.file.load(starts, sizes, write=write == "load")
        self.prefetched -= touched
        if write == "mark":
            self.file.mark_dirty(starts, sizes)
        for s, n in zip(starts, sizes, strict=True):
            assert np.array_equal(self.file.window[s : s + n], self.now[s : s + n])
        for s, n in zip(starts, sizes, strict=True):
            if write:
                self.seed += 1
                self.now[s : s + n] = self.file.window[s : s + n] = noise(self.seed, n)

    @rule(ranges=ranges)
    def prefetch(self, ranges):
        starts, sizes, touched = self.arrays(ranges)
        self.file.unpin()
        if len(touched | self.prefetched) > self.BUDGET:
            with pytest.raises(MemoryError, match=f"prefetch needs {len(touched) * BLOCK} bytes"):
                self.file.prefetch(starts, sizes)
            return
        self.file.prefetch(starts, sizes)
        self.prefetched |= touched

    @rule()
    def cancel_prefetch(self):
        self.file.cancel_prefetch()
        self.prefetched.clear()

    @rule()
    def read_all(self):
        self.whole()

    @rule(apply=st.booleans())
    def flush(self, apply):
        assert self.file.flush(apply=apply) == self.generation + 1 == self.file.generation
        self.generation += 1
        self.before = None if apply else self.flushed
        self.flushed = self.now.copy()
        assert self.file.stats()["dirty_bytes"] == 0

    @precondition(lambda self: self.before is not None)
    @rule()
    def apply(self):
        self.file.apply()
        self.before = None
        # Changes since the last flush may be in a new log to free memory: they belong to no generation yet.
        if np.array_equal(self.now, self.flushed):
            assert self.file.stats()["log_bytes"] == 0

    @rule(back=st.booleans(), close=st.booleans())
    def open_again(self, back, close):
        """Reopens without a flush, after close or, as after a crash, from a copy of the files."""
        applied = self.file.stats()["log_bytes"] == 0 or self.before is None
        if close:
            self.file.close()
        else:
            self.file.cancel_prefetch()
            copy = self.path.with_name(self.path.name + "+")
            for suffix in ("", ".log"):
                Path(f"{copy}{suffix}").write_bytes(Path(f"{self.path}{suffix}").read_bytes())
            self.file.close()
            self.path = copy
        self.prefetched.clear()
        generation = None
        if back and self.before is not None and not applied:
            # Unless a load has applied it meanwhile, which generation() does not show.
            try:
                self.file = open_file(self.path, memory_budget=self.budget, generation=self.generation - 1)
                self.generation -= 1
                self.flushed = self.before
            except ValueError as error:
                assert re.search(f"has {self.generation} only", str(error))  # noqa: PT017
                self.file = open_file(self.path, memory_budget=self.budget, generation=self.generation)
        else:
            self.file = open_file(self.path, memory_budget=self.budget, generation=generation)
        left = self.file.stats()["log_bytes"] > 0
        assert not (applied and left)
        if not left:
            self.before = None  # otherwise it can still be opened
        self.now = self.flushed.copy()
        assert self.file.generation == self.generation

    @invariant()
    def within_budget(self):
        if hasattr(self, "file"):
            assert resident_blocks(self.file.window) <= self.BUDGET
            stats = self.file.stats()
            assert stats["dirty_bytes"] <= stats["resident_bytes"] <= self.BUDGET * BLOCK


Model.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_model = Model.TestCase
