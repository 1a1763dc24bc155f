"""A worker's part of the run as batches of pixels: order -> rows -> blocks -> decoded crops.

``TrainingImages.read`` is a pure function of (ShardSet, plan, rank, world size, steps). Whoever
calls it, threads of this process or Ray Data's read tasks anywhere in a cluster, gets the same
batches, so the engines differ in speed only.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raytrain.data.augment import (
    CropRule,
    Windows,
    centre_rectangles,
    centre_windows,
    random_windows,
    rectangle_shapes,
)
from raytrain.data.decode import DamagedImageError, Decoder, Pixels
from raytrain.data.decode_cpu import CpuDecoder
from raytrain.data.order import BlockLayout, Order, Rows
from raytrain.data.shards import Block, ShardSet, Size
from raytrain.errors import RaytrainError
from raytrain.recipe.plan import Plan, Step

_UNIT_BYTES = 16 << 20  # most pixels decoded by one task, for memory's sake
_UNIT_IMAGES = 512  # most images decoded by one task: enough to hide what starting it costs
# Arrays of less than 32 MiB come from memory that the C library has had before; larger ones are
# mapped anew each time, and each of their pages costs a fault.
_STRETCH_BYTES = 24 << 20
_GROUP_BATCHES = 4  # rows of this many batches are sorted by shape together
_CACHE_BYTES = 256 << 20  # compressed blocks kept by each process that reads


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One worker's share of one step.

    Attributes:
        step: the step's number.
        pixels: uint8, shape (n, image_px, image_px, 3), RGB; where validation images keep their
            aspect ratio, (n, height, width, 3).
        labels: int64, shape (n,).
        rows: int64, shape (n,): which rows of the training split these are.
    """

    step: int
    pixels: Pixels
    labels: NDArray[np.int64]
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Neighbouring steps of one epoch and image size, read in one go.

    Attributes:
        first: number of the first step.
        counts: images of each step, int64; they follow each other in the arrays.
        pixels: uint8, shape (all images, image_px, image_px, 3), RGB.
        labels: int64, shape (all images,).
        rows: int64, shape (all images,).
    """

    first: int
    counts: NDArray[np.int64]
    pixels: Pixels
    labels: NDArray[np.int64]
    rows: Rows

    def batches(self) -> Iterator[Batch]:
        """Its steps one by one; views of the same arrays."""
        end = 0
        for step, count in enumerate(self.counts.tolist(), self.first):
            part = slice(end, end := end + count)
            yield Batch(step, self.pixels[part], self.labels[part], self.rows[part])


@dataclass(frozen=True, eq=False)
class TrainingImages:
    """What one worker reads in a run.

    Attributes:
        shards: the data.
        plan: the run.
        rank: the worker.
        world_size: how many workers share each step.
        decoder: what makes pixels of the stored images.
    """

    shards: ShardSet
    plan: Plan
    rank: int = 0
    world_size: int = 1
    decoder: Decoder = field(default_factory=CpuDecoder)

    @cached_property
    def _stored(self) -> _StoredSplit:
        return _StoredSplit(self.shards, "train")

    @cached_property
    def _order(self) -> Order:
        recipe = self.plan.recipe
        return Order(self._stored.layout, recipe.seed, recipe.input.window_blocks)

    def rows(self, step: Step) -> Rows:
        """The rows of this worker's share of a step; int64, shape (share,)."""
        rows = self._order.step_rows(step.epoch, step.first, step.count)
        offset, size = self.plan.share_of(step, self.rank, self.world_size)
        return rows[offset : offset + size]

    def units(
        self, start: int, most_images: int = _UNIT_IMAGES, most_bytes: int = _UNIT_BYTES
    ) -> Iterator[range]:
        """The steps from ``start`` to the end, cut into runs that one task decodes in one go.

        Args:
            start: first step.
            most_images: this worker's images in a run, unless one step alone has more.
            most_bytes: likewise their pixels.
        """
        first, images, size = start, 0, 0
        for s in range(start, self.plan.num_steps):
            step = self.plan.step(s)
            more = self.plan.share_of(step, self.rank, self.world_size)[1]
            more_bytes = more * step.image_px**2 * 3
            full = images + more > most_images or size + more_bytes > most_bytes
            if s > first and full:
                yield range(first, s)
                first, images, size = s, 0, 0
            images, size = images + more, size + more_bytes
        if first < self.plan.num_steps:
            yield range(first, self.plan.num_steps)

    def read(self, steps: Iterable[int]) -> Iterator[Batch]:
        """The batches of the given steps, in their order; raises as ``stretches`` does."""
        for stretch in self.stretches(steps):
            yield from stretch.batches()

    def stretches(self, steps: Iterable[int]) -> Iterator[Stretch]:
        """The same, neighbours together where they may be, up to 24 MiB of pixels.

        Raises:
            RaytrainError: a shard can't be read or an image can't be decoded.
        """
        augment = self.plan.recipe.augment
        for alike in self._alike(steps):
            step, parts = alike[0], [self.rows(step) for step in alike]
            rows = np.concatenate(parts)
            stored = self._fetch(self.shards.size_for(step.image_px), rows)
            rule = CropRule(step.crop_area, augment.aspect, augment.flip)
            windows = random_windows(rule, self.plan.recipe.seed, step.epoch, rows, stored.sizes)
            with _naming_damaged(rows):
                pixels = self.decoder.decode(stored.jpegs, windows, step.image_px)
            counts = np.array([len(part) for part in parts], dtype=np.int64)
            yield Stretch(step.index, counts, pixels, stored.labels, rows)

    def _alike(self, steps: Iterable[int]) -> Iterator[list[Step]]:
        """The steps in groups of neighbours of one epoch, of a bounded size."""
        group: list[Step] = []
        size = 0
        for step in map(self.plan.step, steps):
            count = self.plan.share_of(step, self.rank, self.world_size)[1]
            more = count * step.image_px**2 * 3
            goes_on = group and (step.index, step.epoch) == (group[-1].index + 1, group[0].epoch)
            if group and not (goes_on and size + more <= _STRETCH_BYTES):
                yield group
                group, size = [], 0
            group.append(step)
            size += more
        if group:
            yield group

    def _fetch(self, size: Size, rows: Rows) -> _Stored:
        if self.decoder.reads:
            return self._stored.fetch(size, rows)
        ones = np.ones_like(rows)
        return _Stored([memoryview(b"")] * len(rows), rows % len(self.shards.classes), ones, ones)


@dataclass(frozen=True, slots=True)
class View:
    """How validation images are seen.

    Attributes:
        image_px: side of the square, or short side of the rectangle, that the model sees.
        crop_ratio: side of the centre crop as a share of the image's own.
        rectangular: whether images keep their aspect ratio.
    """

    image_px: int
    crop_ratio: float
    rectangular: bool = False


@dataclass(frozen=True, eq=False)
class ValidationImages:
    """What one process validates on: rows of the validation split, in the set's own order.

    Always decoded on the CPU, so that scores don't depend on how the training images are. Images
    that keep their aspect ratio are batched by shape.

    Attributes:
        shards: the data.
        view: how they are seen.
        batch: most images at a time.
        rows: which rows.
    """

    shards: ShardSet
    view: View
    batch: int
    rows: range

    @cached_property
    def _stored(self) -> _StoredSplit:
        return _StoredSplit(self.shards, "val")

    def read(self, steps: Iterable[int]) -> Iterator[Batch]:
        """The given groups of rows: group ``i`` has rows ``i * group`` to ``(i + 1) * group``, in
        one batch, or in some for each shape of its images."""
        size = self.shards.size_for(self.view.image_px)
        for i in steps:
            rows = np.asarray(self.rows[i * self._group : (i + 1) * self._group], dtype=np.int64)
            stored = self._stored.fetch(size, rows)
            if self.view.rectangular:
                yield from self._by_shape(i, stored, rows)
            else:
                px = self.view.image_px
                windows = centre_windows(self.view.crop_ratio, stored.sizes)
                yield self._batch(i, stored, rows, (px, px), windows)

    def units(self) -> list[range]:
        return [range(i, i + 1) for i in range(-(-len(self.rows) // self._group))]

    @property
    def _group(self) -> int:
        return self.batch * (_GROUP_BATCHES if self.view.rectangular else 1)

    def _by_shape(self, i: int, stored: _Stored, rows: Rows) -> Iterator[Batch]:
        heights, widths = rectangle_shapes(self.view.image_px, stored.sizes)
        for height, width in sorted(set(zip(heights.tolist(), widths.tolist(), strict=True))):
            (alike,) = np.nonzero((heights == height) & (widths == width))
            for first in range(0, len(alike), self.batch):
                some = alike[first : first + self.batch]
                part, shape = stored.some(some), (heights[some], widths[some])
                windows = centre_rectangles(self.view.crop_ratio, part.sizes, shape)
                yield self._batch(i, part, rows[some], (height, width), windows)

    @staticmethod
    def _batch(
        i: int, stored: _Stored, rows: Rows, shape: tuple[int, int], windows: Windows
    ) -> Batch:
        with _naming_damaged(rows):
            pixels = CpuDecoder().decode_to(shape, stored.jpegs, windows)
        return Batch(i, pixels, stored.labels, rows)


def read_with_threads(
    images: TrainingImages | ValidationImages,
    units: Iterable[range],
    threads: int | None = None,
    gives_way: bool = False,
) -> Iterator[Batch]:
    """Read units with threads of this process; batches come in order.

    At most ``threads + 1`` units are held. Closing the iterator ends the threads.

    Args:
        images: what to read.
        units: runs of steps, as ``images.units`` cuts them.
        threads: how many; by default one a core.
        gives_way: whether all else on this machine goes before them.
    """
    count = threads or os.cpu_count() or 1
    pool = ThreadPoolExecutor(
        count, "raytrain-decode", initializer=_give_way if gives_way else None
    )
    ahead: deque[Future[list[Batch]]] = deque()
    waiting = iter(units)
    try:
        for unit in waiting:
            ahead.append(pool.submit(lambda u: list(images.read(u)), unit))
            if len(ahead) > count:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _give_way() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Rows as they are stored: JPEG bytes, and int64 arrays of shape (n,)."""

    jpegs: list[memoryview]
    labels: NDArray[np.int64]
    widths: NDArray[np.int64]
    heights: NDArray[np.int64]

    @property
    def sizes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(widths, heights)."""
        return self.widths, self.heights

    def some(self, at: NDArray[np.int64]) -> _Stored:
        """The rows at these positions."""
        jpegs = [self.jpegs[i] for i in at]
        return _Stored(jpegs, self.labels[at], self.widths[at], self.heights[at])


class _StoredSplit:
    """A split of a ShardSet, read block by block."""

    def __init__(self, shards: ShardSet, split: str) -> None:
        self._shards, self._split = shards, split
        self._blocks = shards.blocks(split)
        starts = (block.first_row for block in self._blocks)
        self.layout = BlockLayout((*starts, shards.num_images(split)))

    def fetch(self, size: Size, rows: Rows) -> _Stored:
        """The given rows, each of their blocks read at most once."""
        needed, nth = np.unique(self.layout.block_of(rows), return_inverse=True)
        blocks = [self._blocks[b] for b in needed]
        opened = [self._open(size, block) for block in blocks]
        within = rows - np.array([block.first_row for block in blocks], dtype=np.int64)[nth]
        lengths = [len(block.labels) for block in opened]
        at = (np.cumsum(lengths) - lengths)[nth] + within
        labels, widths, heights = (
            np.concatenate([getattr(block, name) for block in opened])[at].astype(np.int64)
            for name in ("labels", "widths", "heights")
        )
        jpegs = [opened[b].jpeg(i) for b, i in zip(nth.tolist(), within.tolist(), strict=True)]
        return _Stored(jpegs, labels, widths, heights)

    def _open(self, size: Size, block: Block) -> _OpenBlock:
        shards = self._shards
        key = (shards.uri, shards.fingerprint, self._split, size, block.index)
        return _cache.get(key, lambda: _open(self._shards.read_block(self._split, size, block)))


@contextmanager
def _naming_damaged(rows: Rows) -> Iterator[None]:
    try:
        yield
    except DamagedImageError as error:
        raise RaytrainError(
            f"the image in row {rows[error.position]} is damaged ({error}); "
            "prepare the ShardSet again"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class _OpenBlock:
    jpegs: memoryview
    ends: list[int]
    labels: NDArray[np.int32]
    widths: NDArray[np.int32]
    heights: NDArray[np.int32]
    nbytes: int

    def jpeg(self, i: int) -> memoryview:
        """The file of the block's row ``i``."""
        return self.jpegs[self.ends[i] : self.ends[i + 1]]


_Key = tuple[str, str, str, Size, int]  # address, fingerprint, split, size, block


class _BlockCache:
    """The blocks that a process has read last, up to a number of bytes.

    Neighbouring steps use rows of the same blocks (see order.py): each is read once, not once a
    step.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._blocks: OrderedDict[_Key, _OpenBlock] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key, read: Callable[[], _OpenBlock]) -> _OpenBlock:
        """The block of this key, from ``read`` where it isn't held."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        block = read()
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = block
                self._bytes += block.nbytes
            while self._bytes > self._max_bytes and len(self._blocks) > 1:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return block


def _open(table: pa.Table) -> _OpenBlock:
    labels, widths, heights = (
        table.column(name).to_numpy() for name in ("label", "width", "height")
    )
    jpegs = table.column("image").combine_chunks()
    if isinstance(jpegs, pa.ChunkedArray):
        jpegs = jpegs.chunk(0)
    _, offsets, data = jpegs.buffers()
    wide = np.int64 if pa.types.is_large_binary(jpegs.type) else np.int32
    ends = np.frombuffer(offsets, dtype=wide)[jpegs.offset : jpegs.offset + len(jpegs) + 1]
    return _OpenBlock(
        memoryview(data).cast("B"), ends.tolist(), labels, widths, heights, table.nbytes
    )


_cache = _BlockCache(_CACHE_BYTES)
