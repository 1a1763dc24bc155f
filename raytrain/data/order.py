"""Which rows a step uses, and which of them a worker reads. Pure: numpy only.

A ShardSet stores rows in blocks, the unit of reading. An epoch's order is made in three moves:

1. the blocks of the whole set are shuffled and cut into windows of about ``window_blocks``;
2. the rows inside each block are shuffled;
3. the blocks of a window are interleaved, so that any stretch of the window holds about the
   same share of each of its blocks.

So a step mixes rows of up to ``window_blocks`` random blocks, every block is needed for one
window only, and workers can divide a step *by block*: the rows of a step are listed by their
block's slot in the window, and each worker takes a contiguous share of that list. A worker thus
reads its own few blocks of each window, in whole and in sequence, for any number of workers.
The set of rows in a step never depends on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raytrain.data.hashing import uniforms

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class BlockLayout:
    """How a split's rows lie in blocks: block ``b`` holds rows ``starts[b]`` to ``starts[b+1]``.

    Attributes:
        starts: first row of each block, and the number of rows as a last entry; ascending.
    """

    starts: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @property
    def num_blocks(self) -> int:
        return len(self.starts) - 1

    def block_of(self, rows: Rows) -> Rows:
        """The block of each row; same shape as ``rows``."""
        found: Rows = np.searchsorted(np.asarray(self.starts), rows, side="right") - 1
        return found


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a split's rows in every epoch of a run.

    Attributes:
        layout: the blocks of the split.
        seed: the recipe's seed.
        window_blocks: blocks mixed with each other. The windows of an epoch are made equal, so
            the last isn't a small, badly mixed remainder.
    """

    layout: BlockLayout
    seed: int
    window_blocks: int

    def step_rows(self, epoch: int, first: int, count: int) -> Rows:
        """The rows at positions ``first`` to ``first + count`` of an epoch, by their block's slot.

        Returns:
            int64, shape (count,). Workers take contiguous shares of it (``plan.share``).

        Raises:
            IndexError: the positions aren't all in the epoch.
        """
        if first < 0 or count < 1 or first + count > self.layout.num_rows:
            raise IndexError(f"positions {first} to {first + count} of {self.layout.num_rows}")
        return _epoch_order(self, epoch).step_rows(first, count)


class _EpochOrder:
    """One epoch of an Order: the windows, and where each begins."""

    def __init__(self, order: Order, epoch: int) -> None:
        self._seed, self._epoch = order.seed, epoch
        starts = np.asarray(order.layout.starts, dtype=np.int64)
        self._block_starts, self._block_sizes = starts[:-1], np.diff(starts)
        blocks = np.arange(order.layout.num_blocks)
        shuffled = np.argsort(uniforms(order.seed, _stream(epoch, 0), blocks, 1)[:, 0])
        num_windows = max(1, round(len(blocks) / order.window_blocks))
        self._windows = np.array_split(shuffled, num_windows)
        sizes = [int(self._block_sizes[w].sum()) for w in self._windows]
        self._window_starts = np.concatenate([[0], np.cumsum(sizes)])

    def step_rows(self, first: int, count: int) -> Rows:
        begin = int(np.searchsorted(self._window_starts, first, side="right")) - 1
        rows, slots = [], []
        for w in range(begin, len(self._windows)):
            start = int(self._window_starts[w])
            if start >= first + count:
                break
            part = slice(max(first - start, 0), first + count - start)
            window_rows, window_slots = _window_order(self, w)
            rows.append(window_rows[part])
            slots.append(window_slots[part])
        by_slot = np.argsort(np.concatenate(slots), kind="stable")
        ordered: Rows = np.concatenate(rows)[by_slot]
        return ordered

    def window(self, w: int) -> tuple[Rows, NDArray[np.float64]]:
        """Rows of window ``w`` in their order, and each row's slot as a share of the window."""
        blocks = self._windows[w]
        sizes = self._block_sizes[blocks]
        slot = np.repeat(np.arange(len(blocks)), sizes)
        within = np.arange(len(slot)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = self._block_starts[blocks][slot] + within
        u = uniforms(self._seed, _stream(self._epoch, 1), rows, 2)
        rows = rows[np.lexsort((u[:, 0], slot))]  # shuffled inside each block
        evenly = (within + u[:, 1]) / sizes[slot]  # each block's rows spread over the window
        interleaved = np.argsort(evenly, kind="stable")
        return rows[interleaved], slot[interleaved] / len(blocks)


def _stream(epoch: int, use: int) -> int:
    """Random streams of the order, apart from each other and from the crops' (``epoch``)."""
    return (1 << 32) + 2 * epoch + use


@lru_cache(maxsize=4)
def _epoch_order(order: Order, epoch: int) -> _EpochOrder:
    return _EpochOrder(order, epoch)


@lru_cache(maxsize=8)
def _window_order(epoch_order: _EpochOrder, w: int) -> tuple[Rows, NDArray[np.float64]]:
    return epoch_order.window(w)
