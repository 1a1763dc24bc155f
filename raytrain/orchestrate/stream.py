"""One worker's part of the run as one ordered stream through Ray Data.

Each worker opens a stream of its own, at any step, without a word to the others. One task lists
what is to be read, in units of some steps each; others, as many at a time as the worker may have,
read, decode and crop a unit each in processes of their own. The next epochs, image sizes and batch
sizes are simply the next units. Ray Data runs the tasks, moves their pixels and keeps their order.

A gate keeps the list a few units ahead of the worker. So the stream's start and its memory depend
on nothing but the number of decoders: at most ``2 * decoders + 1`` units of 64 MiB of pixels
(or one step, where that is more) are being decoded or wait to be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.data.reader import Batch, TrainingImages, read_with_threads

# Starting a task and handing over an object each cost milliseconds of CPU time, whatever their
# size. These sizes make that a few per cent of the decoding.
_UNIT_IMAGES = 2048
_UNIT_BYTES = 64 << 20
_OBJECT_BYTES = 32 << 20


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
    if start >= images.plan.num_steps:
        return
    _configure(DataContext.get_current())
    reference = ray.put(images)
    ahead = 2 * decoders + 1
    gate = _gate_beside_me(ahead)
    listed = ray.data.read_datasource(
        _OneTask(partial(_list_units, reference, start, ahead, gate)),
        num_cpus=0,
        override_num_blocks=1,
    )
    decoded = listed.map_batches(
        partial(_decode_unit, reference),
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
        yield from _to_batches(table)


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


@ray.remote(num_cpus=0)
class _Gate:
    """Holds back whoever waits for a number until the gate is open up to it.

    Args:
        opened: numbers below this one may pass from the start.
    """

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._changed = asyncio.Event()

    async def wait(self, number: int) -> int:
        """Returns once ``number`` may pass: all below the result may."""
        while number >= self._opened:
            self._changed.clear()
            await self._changed.wait()
        return self._opened

    async def open(self, below: int) -> None:
        """Let all numbers below this one pass."""
        self._opened = max(self._opened, below)
        self._changed.set()


def _gate_beside_me(opened: int) -> Any:
    here = ray.get_runtime_context().get_node_id()
    node = NodeAffinitySchedulingStrategy(here, soft=False)
    make: Callable[..., Any] = _Gate.options(scheduling_strategy=node).remote  # type: ignore[attr-defined]
    return make(opened)


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
    group: list[Batch] = []
    for batch in _fetched(images).read(range(first, end)):
        group.append(batch)
        if sum(b.pixels.nbytes for b in group) >= _OBJECT_BYTES:
            yield _to_table(unit, group)
            group = []
    if group:
        yield _to_table(unit, group)


@lru_cache(maxsize=4)
def _fetched(images: ray.ObjectRef[TrainingImages]) -> TrainingImages:
    fetched: TrainingImages = ray.get(images)
    return fetched


def _to_table(unit: int, batches: Sequence[Batch]) -> pa.Table:
    """Batches as one row, their arrays joined as bytes: nothing to unify between image sizes."""
    shapes = np.array([(b.step, len(b.labels), b.pixels.shape[1]) for b in batches])
    pixels, labels, rows = (
        _join([getattr(b, name) for b in batches]) for name in ("pixels", "labels", "rows")
    )
    return pa.table(
        {
            "unit": [unit],
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
