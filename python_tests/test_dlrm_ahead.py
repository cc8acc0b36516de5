"""The reader's thread: prefetched items, exceptions, and the number of compute threads."""

from __future__ import annotations

import threading

import pytest
import torch
from dlrm_cases import Changed
from dlrm_tiny import TinyData

from rec_kernels.dlrm import DLRM, TrainConfig, train
from rec_kernels.dlrm.data import DataError, prefetch

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_an_exception_of_the_data_thread_arrives():
    def items():
        yield 1
        raise DataError("line 2 is bad")

    arrived = prefetch(items())
    assert next(arrived) == 1
    with pytest.raises(DataError, match="line 2 is bad"):
        next(arrived)


def test_the_data_thread_computes_alone():
    """The data thread computes with one thread; the training thread and later threads keep their numbers."""
    before, later = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        seen = []
        for number in prefetch(torch.get_num_threads() for _ in range(3)):
            seen.append((number, torch.get_num_threads()))
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [(1, 2)] * 3
    assert later == [2]


def test_readers_within_readers_leave_the_number_of_threads_alone():
    """Nested readers, and a caller with a number of threads of its own, leave that number unchanged."""
    before, seen = torch.get_num_threads(), []

    def look():
        seen.append(torch.get_num_threads())

    torch.set_num_threads(3)
    try:
        assert list(prefetch(prefetch(iter(range(5))))) == list(range(5))
        in_thread(look)  # a new thread
        in_thread(lambda: (torch.set_num_threads(2), list(prefetch(iter(range(2)))), look()))
        look()
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 2, 3]


def test_a_step_of_many_batches_begins_with_the_first(tmp_path, monkeypatch):
    """The reader prefetches one batch, not all batches of a step."""
    made, seen, forward = [], [], DLRM.forward

    def counted(batches):
        for batch in batches:
            made.append(batch)
            yield batch

    def look(model, batch):
        seen.append(len(made))
        return forward(model, batch)

    monkeypatch.setattr(DLRM, "forward", look)
    config = TrainConfig(batch_size=20, accumulate=8, runs_dir=str(tmp_path))
    train(config, Changed(TinyData(), counted), progress=False)
    assert len(seen) > 20
    assert all(count <= number + 3 for number, count in enumerate(seen[:20]))


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_leaving_early_ends_the_data_thread():
    for _ in prefetch(iter(range(100))):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]
