"""One worker's part of the run as one ordered stream through Ray Data.

Each worker opens a stream of its own, at any step, without a word to the others. One task lists
what is to be read, in units of some steps each; others, as many at a time as the worker may have,
read, decode and crop a unit each in processes of their own. The next epochs, image sizes and batch
sizes are simply the next units. Ray Data runs the tasks, moves their pixels and keeps their order.

Starting the tasks' processes takes seconds, most of it imports. So the worker decodes the first
unit itself, with threads, while they start.

A gate keeps the list a few units ahead of the worker. So the stream's start and its memory depend
on nothing but the number of decoders: at most ``2 * decoders + 1`` units of 64 MiB of pixels
(or one step, where that is more) are being decoded or wait to be used, and at first as many steps
more as there are decoders.

What a decoding process logs as a warning (a damaged block, a cache that can't be written) comes
along with its pixels and is logged again by the worker, which the user hears.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from numpy.typing import NDArray
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raytrain.data.reader import Batch, TrainingImages, read_with_threads
from raytrain.orchestrate.gate import gate_beside_me

# Starting a task and handing over an object each cost milliseconds of CPU time, whatever their
# size. These sizes make that a few per cent of the decoding.
_UNIT_IMAGES = 2048
_UNIT_BYTES = 64 << 20
_OBJECT_BYTES = 32 << 20

_log = logging.getLogger(__name__)


def open_stream(images: TrainingImages, start: int, decoders: int) -> Iterator[Batch]:
    """This worker's batches from a step to the end of the run, in order.

    Args:
        images: what the worker reads.
        start: first step.
        decoders: decoding tasks at a time. They take no CPU slot, so they never wait for one.

    Yields:
        A batch for each step. Its arrays may be views of shared memory: read, don't write.
    """
    if images.decoder.in_worker:
        yield from read_with_threads(images, images.units(start), decoders)
        return
    mine = next(images.units(start, _UNIT_IMAGES, _UNIT_BYTES), None)
    if mine is None:
        return
    # Serialised here, before its threads of decoding change what it keeps of the files read.
    stored = ray.put(images)
    left = range(mine.stop, images.plan.num_steps)
    tables = _tables(stored, left, decoders)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="raytrain-stream") as starting:
            first = starting.submit(next, tables, None)
            yield from read_with_threads(images, [range(s, s + 1) for s in mine], decoders)
        table = first.result()
        while table is not None:
            yield from _to_batches(table)
            table = next(tables, None)
    finally:
        tables.close()


def _tables(
    images: ray.ObjectRef[TrainingImages], steps: range, decoders: int
) -> Generator[pa.Table, None, None]:
    """What Ray Data's tasks make of the steps to the end of the run, in order."""
    if not steps:
        return
    _configure(DataContext.get_current())
    ahead = 2 * decoders + 1
    gate = gate_beside_me(ahead)
    listed = ray.data.read_datasource(
        _OneTask(partial(_list_units, images, steps.start, ahead, gate)),
        num_cpus=0,
        override_num_blocks=1,
    )
    decoded = listed.map_batches(
        partial(_decode_unit, images),
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        num_cpus=0,
        concurrency=decoders,
    )
    used = -1
    for table in decoded.iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=decoders
    ):
        unit = table["unit"][0].as_py()
        if unit > used:
            used = unit
            gate.open.remote(used + ahead)
        for warning in table["warnings"][0].as_py():
            _log.warning(warning)
        yield table


def _configure(context: DataContext) -> None:
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # every row is an object of its own
    context.print_on_execution_start = False


class _OneTask(Datasource):
    """A single read task.

    Args:
        read: gives its tables.
    """

    def __init__(self, read: Callable[[], Iterable[pa.Table]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002 (it is one task)
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None)
        return [ReadTask(self._read, metadata, per_task_row_limit=per_task_row_limit)]


def _list_units(
    images: ray.ObjectRef[TrainingImages], start: int, opened: int, gate: Any
) -> Iterator[pa.Table]:
    """The units from a step on, as one table each; the same again where Ray repeats the task."""
    units = _fetched(images).units(start, _UNIT_IMAGES, _UNIT_BYTES)
    for number, unit in enumerate(units):
        if number >= opened:
            opened = ray.get(gate.wait.remote(number))
        yield pa.table({"unit": [number], "first": [unit.start], "end": [unit.stop]})


def _decode_unit(images: ray.ObjectRef[TrainingImages], listed: pa.Table) -> Iterator[pa.Table]:
    """A unit's batches, as many in each table as make an object large enough."""
    unit, first, end = (listed[name][0].as_py() for name in ("unit", "first", "end"))
    warnings = _kept_warnings()
    group: list[Batch] = []
    for batch in _fetched(images).read(range(first, end)):
        group.append(batch)
        if sum(b.pixels.nbytes for b in group) >= _OBJECT_BYTES:
            yield _to_table(unit, group, warnings.take())
            group = []
    if group:
        yield _to_table(unit, group, warnings.take())


class _Warnings(logging.Handler):
    """Keeps the texts of raytrain's warnings until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def take(self) -> list[str]:
        """The texts since the last call."""
        return [self._texts.popleft() for _ in range(len(self._texts))]


@lru_cache(maxsize=1)
def _kept_warnings() -> _Warnings:
    """Those of this process, from the first call on."""
    kept = _Warnings()
    logging.getLogger("raytrain").addHandler(kept)
    return kept


@lru_cache(maxsize=4)
def _fetched(images: ray.ObjectRef[TrainingImages]) -> TrainingImages:
    fetched: TrainingImages = ray.get(images)
    return fetched


def _to_table(unit: int, batches: Sequence[Batch], warnings: list[str]) -> pa.Table:
    """Batches as one row, their arrays joined as bytes: nothing to unify between image sizes."""
    shapes = np.array([(b.step, len(b.labels), b.pixels.shape[1]) for b in batches])
    pixels, labels, rows = (
        _join([getattr(b, name) for b in batches]) for name in ("pixels", "labels", "rows")
    )
    return pa.table(
        {
            "unit": [unit],
            "warnings": pa.array([warnings], pa.list_(pa.string())),
            "shapes": _as_binary(shapes),
            "pixels": _as_binary(pixels),
            "labels": _as_binary(labels),
            "rows": _as_binary(rows),
        }
    )


def _join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([a.reshape(-1) for a in arrays])


def _as_binary(array: NDArray[Any]) -> pa.LargeBinaryArray:
    offsets = pa.py_buffer(np.array([0, array.nbytes], dtype=np.int64))
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, data])


def _to_batches(table: pa.Table) -> Iterator[Batch]:
    shapes, labels, rows = (
        np.frombuffer(table[name][0].as_buffer(), dtype=np.int64)
        for name in ("shapes", "labels", "rows")
    )
    pixels = np.frombuffer(table["pixels"][0].as_buffer(), dtype=np.uint8)
    image, byte = 0, 0
    for step, number, px in shapes.reshape(-1, 3).tolist():
        part, byte_end = slice(image, image + number), byte + number * px * px * 3
        crops = pixels[byte:byte_end].reshape(number, px, px, 3)
        yield Batch(step, crops, labels[part], rows[part])
        image, byte = image + number, byte_end
