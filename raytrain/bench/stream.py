"""What Ray Data's stream delivers to a trainer, beside the same code in bare processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from threading import Barrier

from rich.table import Table

from raytrain.bench.measure import Spread, ratios
from raytrain.bench.memory import watched_memory
from raytrain.data.reader import Batch, TrainingImages
from raytrain.data.shards import ShardSet, Split
from raytrain.orchestrate.cluster import ensure_ray
from raytrain.orchestrate.stream import open_stream
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.run.feed import DeviceBatch, Feed

TURN_SECONDS = 8.0
_START_TURNS = 1.5  # turns that a stream has before it is looked at: its processes start
_TOP_SPEED = 20_000  # images a second that no core reaches: bounds how long a plan must be
_TRAINER_SHARE = 0.8  # of the stream's speed, taken by the trainer whose gaps are measured
_AHEAD = 4  # batches held ahead, as input.ahead_batches is by default


@dataclass(frozen=True)
class StreamSpeed:
    """The stream beside bare processes on all cores of this machine, in wall time, at 128 px.

    Attributes:
        bare: images a second of one process a core that reads and decodes, and hands over nothing.
        stream: images a second that come out of the trainer's iterator.
        share: stream over bare, turn by turn.
        first_batch_s: seconds from opening the stream to the first batch, with Ray up.
        longest_gap: longest time between two batches over the median one, for a trainer that uses
            80 % of the stream's speed, over epochs at 96 px and then at 128 px in smaller batches,
            once the stream's tasks have taken over from the worker's own threads.
        memory: most memory that this process and Ray's held while a stream ran, in bytes.
        memory_of_ten: the same with ten times the images over with these.
    """

    bare: Spread
    stream: Spread
    share: Spread
    first_batch_s: Spread
    longest_gap: Spread
    memory: Spread
    memory_of_ten: Spread

    def table(self) -> Table:
        """For a person."""
        table = Table(title="the stream through Ray Data, all cores, 128 px")
        for heading in ("", "median", "least", "most"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, spread, digits in (
            ("images/s of bare processes", self.bare, 0),
            ("images/s of the stream", self.stream, 0),
            ("stream / bare", self.share, 2),
            ("seconds to the first batch", self.first_batch_s, 2),
            ("longest gap / median batch time", self.longest_gap, 2),
            ("most memory, MB", self.memory.times(1e-6), 0),
            ("with 10 times the images / with these", self.memory_of_ten, 2),
        ):
            values = (spread.median, spread.low, spread.high)
            table.add_row(name, *(f"{value:,.{digits}f}" for value in values))
        return table


def measure_stream(shards: ShardSet, repeats: int, seconds: float = TURN_SECONDS) -> StreamSpeed:
    """Measure in turns of some seconds: bare processes, the stream, and a trainer's gaps."""
    cores = os.cpu_count() or 1
    ensure_ray()
    number = 2 * (_START_TURNS + 1) * seconds * _TOP_SPEED * cores
    images = _images(shards, [(128, 128)], number)
    ten = _images(_ten_times(shards), [(128, 128)], number)
    turns = []
    for turn in range(repeats):
        bare = _bare_speed(images, cores, seconds)
        speed, first = _stream_speed(images, cores, seconds)
        gap = _longest_gap(shards, speed, cores, seconds)
        peaks = {}  # apart from the speed: looking at memory takes CPU time
        for some in (images, ten) if turn % 2 == 0 else (ten, images):
            with watched_memory() as peak:
                _stream_speed(some, cores, seconds)
            peaks[some is ten] = peak.bytes
        turns.append((bare, speed, first, gap, peaks[False], peaks[True]))
    bares, speeds, firsts, gaps, held, held_of_ten = zip(*turns, strict=True)
    return StreamSpeed(
        bare=Spread.of(bares),
        stream=Spread.of(speeds),
        share=Spread.of(s / b for s, b in zip(speeds, bares, strict=True)),
        first_batch_s=Spread.of(firsts),
        longest_gap=Spread.of(gaps),
        memory=Spread.of(held),
        memory_of_ten=ratios(held_of_ten, held),
    )


def _ten_times(shards: ShardSet) -> ShardSet:
    """A set whose training split holds the same files ten times."""
    train = shards.manifest.splits["train"]
    larger = Split(
        num_images=10 * train.num_images,
        class_counts=tuple(10 * count for count in train.class_counts),
        shards=train.shards * 10,
    )
    splits = {**shards.manifest.splits, "train": larger}
    return replace(shards, manifest=shards.manifest.model_copy(update={"splits": splits}))


def _images(shards: ShardSet, phases: list[tuple[int, int]], images: float) -> TrainingImages:
    """A run of phases (image size, batch), each of at least that many images."""
    number = shards.num_images("train")
    recipe = {
        "model": {"name": "resnet50"},
        "schedule": {"lr": 0.1},
        "phases": [
            {"epochs": int(images / number) + 1, "image_px": px, "batch": batch}
            for px, batch in phases
        ],
    }
    return TrainingImages(shards, Plan(recipe_from_dict(recipe), number))


def _bare_speed(images: TrainingImages, processes: int, seconds: float) -> float:
    spawn = multiprocessing.get_context("spawn")
    units = list(images.units(0))
    with spawn.Manager() as manager, ProcessPoolExecutor(processes, spawn) as pool:
        ready = manager.Barrier(processes)
        parts = [
            pool.submit(_read_bare, images, units[i::processes], ready, seconds)
            for i in range(processes)
        ]
        return sum(part.result() for part in parts)


def _read_bare(images: TrainingImages, units: list[range], ready: Barrier, seconds: float) -> float:
    """One process's images a second, from when all of them are ready."""
    waiting = iter(units)
    for _ in images.read(next(waiting)):
        pass
    ready.wait()
    return _take((batch for unit in waiting for batch in images.read(unit)), seconds)


def _stream_speed(images: TrainingImages, decoders: int, seconds: float) -> tuple[float, float]:
    """(images a second once the tasks have taken over, seconds to the first batch)."""
    opened = time.perf_counter()
    with _trainer_iterator(images, decoders) as batches:
        next(batches)
        first = time.perf_counter() - opened
        _take(batches, _START_TURNS * seconds)
        return _take(batches, seconds), first


def _take(batches: Iterator[Batch | DeviceBatch], seconds: float) -> float:
    """Images a second of an iterator, over some seconds."""
    began, number, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        number += len(next(batches).labels)
        spent = time.perf_counter() - began
    return number / spent


def _longest_gap(shards: ShardSet, speed: float, decoders: int, seconds: float) -> float:
    """Over the median one, for a trainer that computes by sleeping; once the tasks have taken over
    and half a turn before image size and batch change."""
    pace = _TRAINER_SHARE * speed
    images = _images(shards, [(96, 96), (128, 64)], pace * (_START_TURNS + 0.5) * seconds)
    times = []
    with _trainer_iterator(images, decoders) as batches:
        for batch in batches:
            times.append(time.perf_counter())
            time.sleep(len(batch.labels) / pace)
    full = times[0] + _START_TURNS * seconds
    gaps = [after - before for before, after in pairwise(times) if before > full]
    return max(gaps) / median(gaps)


@contextmanager
def _trainer_iterator(images: TrainingImages, decoders: int) -> Iterator[Iterator[DeviceBatch]]:
    feed = Feed(open_stream(images, 0, decoders), "cpu", _AHEAD)
    try:
        yield iter(feed)
    finally:
        feed.close()
