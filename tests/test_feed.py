from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from raytrain.data.reader import Batch
from raytrain.errors import RaytrainError
from raytrain.run.feed import Feed


def batches(number: int, closed: threading.Event | None = None) -> Iterator[Batch]:
    try:
        for i in range(number):
            pixels = np.full((2, 4, 4, 3), i, dtype=np.uint8)
            yield Batch(i, pixels, np.array([i, i]), np.array([2 * i, 2 * i + 1]))
    finally:
        if closed is not None:
            closed.set()


def test_batches_come_in_order_and_end() -> None:
    feed = Feed(batches(9), "cpu", ahead=2)
    got = list(feed)
    assert [b.step for b in got] == list(range(9))
    assert all(b.waited >= 0 for b in got)
    assert torch.equal(got[3].pixels, torch.full((2, 4, 4, 3), 3, dtype=torch.uint8))
    feed.close()


def test_views_of_shared_memory_are_copied() -> None:
    pixels = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    (got,) = Feed(iter([Batch(0, pixels, np.array([1]), np.array([0]))]), "cpu", ahead=1)
    got.pixels.fill_(7)
    assert pixels.max() == 0


def test_an_error_of_the_reader_is_raised_where_the_batch_is_asked_for() -> None:
    def broken() -> Iterator[Batch]:
        yield from batches(1)
        raise RaytrainError("shard 3 is damaged")

    feed = Feed(broken(), "cpu", ahead=2)
    with pytest.raises(RaytrainError, match="shard 3"):
        list(feed)
    feed.close()


def test_closing_early_ends_the_thread_and_the_reader() -> None:
    closed = threading.Event()
    feed = Feed(batches(1000, closed), "cpu", ahead=2)
    next(iter(feed))
    feed.close()
    feed.close()
    assert closed.is_set()
    assert not any(t.name == "raytrain-feed" and t.is_alive() for t in threading.enumerate())
