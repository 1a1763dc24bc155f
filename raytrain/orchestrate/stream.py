"""One worker's part of the run as one ordered stream through Ray Data.

Each worker opens a stream of its own, at any step, without a word to the others. Its read tasks,
one a run of steps, read, decode and crop in processes of their own; the next epochs, image sizes
and batch sizes are read ahead like any next steps. Ray Data keeps the order and holds back tasks
when finished batches pile up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

_BLOCK_BYTES = 256 << 10  # a task hands over batches as they are done, small ones together

_BLOCK_BYTES = 256 << 10  # a task hands over batches as they are done, small ones together

_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64()),
        pa.field("image_px", pa.int64()),
        pa.field("pixels", pa.large_binary()),
        pa.field("labels", pa.large_binary()),
        pa.field("rows", pa.large_binary()),
    ]
)


def open_stream(images: TrainingImages, start: int, decoders: int) -> Iterator[Batch]:
    """This worker's batches from a step to the end of the run, in order.

    Args:
        images: what the worker reads.
        start: first step.
        decoders: read tasks at a time. They take no CPU slot, so they never wait for one.

    Yields:
        A batch for each step. Its arrays may be views of shared memory: read, don't write.
    """
    units = images.units(start)
    if not units:
        return
    if images.decoder.in_worker:
        yield from read_with_threads(images, units, decoders)
        return
    _configure(DataContext.get_current())
    dataset = ray.data.read_datasource(
        _Steps(ray.put(images), units),
        num_cpus=0,
        concurrency=decoders,
        override_num_blocks=len(units),
    )
    for table in dataset.iter_batches(
        batch_size=None, batch_format="pyarrow", prefetch_batches=decoders
    ):
        yield from _to_batches(table)


class _Steps(Datasource):
    """Runs of steps as read tasks.

    Args:
        images: reference to the TrainingImages, fetched once by each process that reads.
        units: runs of steps.
    """

    def __init__(self, images: ray.ObjectRef[TrainingImages], units: list[range]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._images = images
        self._units = units

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002 (units are cut by the plan)
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        return [
            ReadTask(
                partial(_read, self._images, unit),
                BlockMetadata(num_rows=len(unit), size_bytes=None, exec_stats=None),
                schema=_SCHEMA,
                per_task_row_limit=per_task_row_limit,
            )
            for unit in self._units
        ]


def _configure(context: DataContext) -> None:
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.target_max_block_size = _BLOCK_BYTES
    context.print_on_execution_start = False


def _read(images: ray.ObjectRef[TrainingImages], unit: range) -> Iterable[pa.Table]:
    for batch in _fetched(images).read(unit):
        yield _to_table(batch)


@lru_cache(maxsize=4)
def _fetched(images: ray.ObjectRef[TrainingImages]) -> TrainingImages:
    fetched: TrainingImages = ray.get(images)
    return fetched


def _to_table(batch: Batch) -> pa.Table:
    """A batch as one row, its arrays as bytes: nothing to unify between image sizes."""
    arrays = [
        pa.array([batch.step]),
        pa.array([batch.pixels.shape[1]]),
        *(_as_binary(a) for a in (batch.pixels, batch.labels, batch.rows)),
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _as_binary(array: NDArray[Any]) -> pa.LargeBinaryArray:
    offsets = pa.py_buffer(np.array([0, array.nbytes], dtype=np.int64))
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, data])


def _to_batches(table: pa.Table) -> Iterator[Batch]:
    for i in range(table.num_rows):
        px = table["image_px"][i].as_py()
        pixels = np.frombuffer(table["pixels"][i].as_buffer(), dtype=np.uint8)
        yield Batch(
            step=table["step"][i].as_py(),
            pixels=pixels.reshape(-1, px, px, 3),
            labels=np.frombuffer(table["labels"][i].as_buffer(), dtype=np.int64),
            rows=np.frombuffer(table["rows"][i].as_buffer(), dtype=np.int64),
        )
