"""One worker's part of the run as one ordered stream through Ray Data.

Each worker opens a stream of its own, at any step, without a word to the others. One task lists
what is to be read, in units of some steps each; others, as many at a time as the worker may have
and a quarter more, read, decode and crop a unit each in processes of their own. (Ray Data looks
every 0.1 s whether a task has ended; with more of them than cores, no core waits for that.) The
next epochs, image sizes and batch sizes are simply the next units. Ray Data runs the tasks, moves
their pixels and keeps their order.

Starting the tasks' processes takes seconds, most of it imports. So that the first step needn't wait
for CPU time, they start after it. Until they are there, the worker decodes for itself, with threads
that take the CPU time that is left; then it tells the listing task the step from which on others
shall.

A gate keeps the list a few units ahead of the worker. So the stream's start and its memory depend
on nothing but the number of decoders: with as many tasks t and decoders d, at most t + d + 1 units
of 96 MiB of pixels (or one step, where that is more) are being decoded or wait to be used, and
d + 1 steps while the worker decodes for itself.

What a decoding process logs as a warning (a damaged block, a cache that can't be written) comes
along with its pixels and is logged again by the worker, which the user hears.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import ray
import ray.data
from numpy.typing import NDArray
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raytrain.data.reader import Batch, Stretch, TrainingImages, read_with_threads
from raytrain.orchestrate.gate import gate_beside_me

# Starting a task and handing over an object each cost milliseconds of CPU time, whatever their
# size. These sizes make that a few per cent of the decoding.
_UNIT_IMAGES = 3072
_UNIT_BYTES = 96 << 20
_DECODERS_A_SPARE = 4  # tasks beside the decoders: one for each so many
_FETCHED_AHEAD = 2  # objects; Ray Data hands none over before it has as many more

_log = logging.getLogger(__name__)


def open_stream(images: TrainingImages, start: int, decoders: int) -> Iterator[Batch]:
    """This worker's batches from a step to the end of the run, in order.

    Args:
        images: what the worker reads.
        start: first step.
        decoders: cores that decode. The tasks take no CPU slot, so they never wait for one.

    Yields:
        A batch for each step. Its arrays may be views of shared memory: read, don't write.
    """
    unit = next(_units(images, start), None)
    if unit is None:
        return
    if images.decoder.in_worker or unit.stop == images.plan.num_steps:
        yield from read_with_threads(images, images.units(start, most_images=1), decoders)
        return
    # A batch beyond those that are held ahead is asked for as the one before them was used.
    first_step_over = start + images.plan.recipe.input.ahead_batches + 1
    with _Stream(ray.put(images), decoders) as stream:
        own = stream.own_steps(images, start)
        for batch in read_with_threads(images, own, decoders, gives_way=True):
            yield batch
            if batch.step == first_step_over:
                stream.start()
        for table in stream.tables():
            yield from _to_batches(table)


def _units(images: TrainingImages, start: int) -> Iterator[range]:
    return images.units(start, _UNIT_IMAGES, _UNIT_BYTES)


class _Stream:
    """Ray Data's tasks, which begin with the step that they are told. Use as a context.

    Args:
        images: serialised before threads of decoding change what they keep of the files read.
        decoders: cores that decode.
    """

    def __init__(self, images: ray.ObjectRef[TrainingImages], decoders: int) -> None:
        tasks = decoders + -(-decoders // _DECODERS_A_SPARE)
        self._ahead = tasks + decoders + 1
        self._tables = self._run(images, tasks)
        self._starting = ThreadPoolExecutor(1, thread_name_prefix="raytrain-stream")
        self._up: Future[pa.Table] | None = None
        self._begun = False

    def start(self) -> None:
        """Start the tasks' processes, in a thread; once."""
        self._up = self._up or self._starting.submit(next, self._tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._starting.shutdown(wait=False)
        if self._up is not None:
            self._up.add_done_callback(lambda _: self._tables.close())  # at once where it is up

    def own_steps(self, images: TrainingImages, start: int) -> Iterator[range]:
        """The steps that the worker decodes itself, one by one: until the tasks' processes are
        there, and as many more as a task makes at a time."""
        step, end = start, images.plan.num_steps
        while step < end:
            if not self._begun and self._up is not None and self._up.done():
                self._up.result()
                self._begun, end = True, next(_units(images, step)).stop
                self._gate.begin.remote(end)
            yield range(step, step + 1)
            step += 1

    def tables(self) -> Iterator[pa.Table]:
        """What the tasks made, in order, of all steps after the worker's own."""
        if not self._begun:  # it was quicker
            return
        used = -1
        for table in self._tables:
            unit = table["unit"][0].as_py()
            if unit < 0:
                continue
            if unit > used:
                used = unit
                self._gate.open.remote(used + self._ahead)
            for warning in table["warnings"][0].as_py():
                _log.warning(warning)
            yield table

    def _run(
        self, images: ray.ObjectRef[TrainingImages], tasks: int
    ) -> Generator[pa.Table, None, None]:
        """The tasks' tables; the first one comes once every task has its process."""
        self._gate = gate_beside_me(self._ahead)
        _configure(DataContext.get_current())
        listed = ray.data.read_datasource(
            _OneTask(partial(_list_units, images, tasks, self._ahead, self._gate)),
            num_cpus=0,
            override_num_blocks=1,
        )
        decoded = listed.map_batches(
            partial(_decode_unit, images),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=0,
            concurrency=tasks,
        )
        batches = decoded.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=_FETCHED_AHEAD
        )
        made = iter(batches)
        for _ in range(tasks - 1):
            next(made)
        yield from made


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
    images: ray.ObjectRef[TrainingImages], tasks: int, opened: int, gate: Any
) -> Iterator[pa.Table]:
    """Empty units, so that each task has one and is heard of; then the units from where the worker
    says, as one table each; the same again where Ray repeats the task."""
    for _ in range(tasks + _FETCHED_AHEAD):
        yield pa.table({"unit": [-1], "first": [0], "end": [0]})
    start: int = ray.get(gate.beginning.remote())
    for number, unit in enumerate(_units(_fetched(images), start)):
        if number >= opened:
            opened = ray.get(gate.wait.remote(number))
        yield pa.table({"unit": [number], "first": [unit.start], "end": [unit.stop]})


def _decode_unit(images: ray.ObjectRef[TrainingImages], listed: pa.Table) -> Iterator[pa.Table]:
    """A unit's stretches, each as a table."""
    unit, first, end = (listed[name][0].as_py() for name in ("unit", "first", "end"))
    warnings = _kept_warnings()
    fetched = _fetched(images)
    if first == end:
        yield _to_table(unit, _NOTHING, warnings.take())
    for stretch in fetched.stretches(range(first, end)):
        yield _to_table(unit, stretch, warnings.take())


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


_NONE = np.empty(0, dtype=np.int64)
_NOTHING = Stretch(0, _NONE, np.empty((0, 0, 0, 3), dtype=np.uint8), _NONE, _NONE)


@lru_cache(maxsize=4)
def _fetched(images: ray.ObjectRef[TrainingImages]) -> TrainingImages:
    fetched: TrainingImages = ray.get(images)
    return fetched


def _to_table(unit: int, stretch: Stretch, warnings: list[str]) -> pa.Table:
    """A stretch as one row, its arrays as bytes: nothing to unify between image sizes."""
    _, image_px, _, _ = stretch.pixels.shape
    return pa.table(
        {
            "unit": [unit],
            "warnings": pa.array([warnings], pa.list_(pa.string())),
            "first": [stretch.first],
            "image_px": [image_px],
            "counts": _as_binary(stretch.counts),
            "pixels": _as_binary(stretch.pixels),
            "labels": _as_binary(stretch.labels),
            "rows": _as_binary(stretch.rows),
        }
    )


def _as_binary(array: NDArray[Any]) -> pa.LargeBinaryArray:
    offsets = pa.py_buffer(np.array([0, array.nbytes], dtype=np.int64))
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, data])


def _to_batches(table: pa.Table) -> Iterator[Batch]:
    first, px = (table[name][0].as_py() for name in ("first", "image_px"))
    counts, labels, rows = (
        np.frombuffer(table[name][0].as_buffer(), dtype=np.int64)
        for name in ("counts", "labels", "rows")
    )
    pixels = np.frombuffer(table["pixels"][0].as_buffer(), dtype=np.uint8)
    yield from Stretch(first, counts, pixels.reshape(-1, px, px, 3), labels, rows).batches()
