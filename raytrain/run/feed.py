"""The next batches, on the device before they are asked for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytrain.data.order import Rows
from raytrain.data.reader import Batch
from raytrain.world import World


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBatch:
    """One worker's share of a step, on its device.

    Attributes:
        step: the step's number.
        pixels: uint8, shape (n, image_px, image_px, 3).
        labels: int64, shape (n,).
        rows: int64 numpy array, shape (n,).
        waited: seconds that the worker waited for this batch.
    """

    step: int
    pixels: Tensor
    labels: Tensor
    rows: Rows
    waited: float


class Feed:
    """Takes batches from an iterator in a thread and hands them over on the device.

    Args:
        batches: ends where the work ends; closed when the feed is.
        device: torch device name.
        ahead: how many finished batches are held.
    """

    def __init__(self, batches: Iterator[Batch], device: str, ahead: int) -> None:
        self._batches = batches
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(device) if self._device.type == "cuda" else None
        self._queue: queue.Queue[_Loaded | BaseException | None] = queue.Queue(maxsize=ahead)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raytrain-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[DeviceBatch]:
        while True:
            began = time.perf_counter()
            item = self._queue.get()
            waited = time.perf_counter() - began
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item.hand_over(waited)

    def close(self) -> None:
        """End the thread and what feeds it. Safe to call more than once."""
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)  # so that a thread waiting for room goes on
            except queue.Empty:
                continue
        self._thread.join()

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            for batch in self._batches:
                if not self._put(_Loaded(batch, self._device, self._stream)):
                    break
        except BaseException as error:
            end = error
        finally:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()
        self._put(end)

    def _put(self, item: _Loaded | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


class ShareFeed:
    """This worker's share of any step: a Feed that is opened anew where its share changes.

    Args:
        batches: gives the batches from a step to the end, of the worker that the World says.
        ahead: how many finished batches are held.
    """

    def __init__(self, batches: Callable[[int, World], Iterator[Batch]], ahead: int) -> None:
        self._batches = batches
        self._ahead = ahead
        self._feed: Feed | None = None
        self._next: tuple[int, World] | None = None
        self._closing: list[threading.Thread] = []

    def open(self, step: int, world: World) -> None:
        """Begin to read from a step on, unless that is what comes next anyway."""
        if self._next == (step, world):
            return
        self._let_go()
        self._feed = Feed(self._batches(step, world), world.device, self._ahead)
        self._next = step, world

    def at(self, step: int, world: World) -> DeviceBatch:
        """The batch of a step.

        Raises:
            Whatever the reading raised.
        """
        self.open(step, world)
        assert self._feed is not None
        batch = next(iter(self._feed))
        assert batch.step == step
        self._next = step + 1, world
        return batch

    def close(self) -> None:
        """End all threads. Safe to call more than once."""
        self._let_go()
        for thread in self._closing:
            thread.join()

    def _let_go(self) -> None:
        """Close the feed beside what goes on: a thread that decodes ends only after its unit."""
        if self._feed is not None:
            thread = threading.Thread(target=self._feed.close, name="raytrain-feed-closing")
            thread.start()
            self._closing = [t for t in self._closing if t.is_alive()] + [thread]
            self._feed = self._next = None


class _Loaded:
    """A batch on its way to the device: on GPUs a copy on a stream of its own."""

    def __init__(
        self, batch: Batch, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._batch = batch
        pinned = stream is not None
        pixels, labels = _to_tensor(batch.pixels, pinned), _to_tensor(batch.labels, pinned)
        self._copied: torch.cuda.Event | None = None
        if stream is not None:
            with torch.cuda.stream(stream):
                pixels = pixels.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record(stream)
        self._pixels, self._labels = pixels, labels

    def hand_over(self, waited: float) -> DeviceBatch:
        """The batch, ordered after its copy on the stream that asks for it."""
        if self._copied is not None:
            current = torch.cuda.current_stream(self._pixels.device)
            current.wait_event(self._copied)
            self._pixels.record_stream(current)
            self._labels.record_stream(current)
        batch = self._batch
        return DeviceBatch(batch.step, self._pixels, self._labels, batch.rows, waited)


def _to_tensor(array: NDArray[Any], pinned: bool) -> Tensor:
    """The array as a tensor; copied, once, to pinned memory on its way to a GPU, or where it is a
    view of shared memory that can't be written."""
    if array.flags.writeable and not pinned:
        return torch.from_numpy(array)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    tensor = torch.empty(array.shape, dtype=dtype, pin_memory=pinned)
    np.copyto(tensor.numpy(), array)
    return tensor
