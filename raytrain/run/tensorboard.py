"""TensorBoard scalars, written with tensorboard's own record format: no torch, no thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
    Event,
    SessionLog,
)
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
    RecordWriter,
)

from raytrain.run.rows import StepRow, ValidationRow

log = logging.getLogger(__name__)

STEP_TAGS = {
    "loss": "train/loss",
    "top1": "train/top1",
    "lr": "schedule/lr",
    "momentum": "schedule/momentum",
    "weight_decay": "schedule/weight_decay",
    "batch": "schedule/batch",
    "image_px": "schedule/image_px",
    "images_per_s": "speed/images_per_s",
    "data_wait_s": "speed/data_wait_s",
    "loss_scale": "speed/loss_scale",
    "world_size": "speed/world_size",
}
VALIDATION_TAGS = {
    "top1": "validation/top1",
    "top5": "validation/top5",
    "loss": "validation/loss",
    "ema_top1": "validation/ema_top1",
    "ema_top5": "validation/ema_top5",
}


class TensorBoard:
    """Appends scalars to one new event file in `folder`.

    TensorBoard is a view, not the record: when its file cannot be written, the user is told (by
    a logged warning, where nobody else tells) and the run goes on without it.
    """

    def __init__(self, folder: Path, told: Callable[[str], None] | None = None) -> None:
        self._told = told or log.warning
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.raytrain.{os.getpid()}"
        self._path = folder / name
        self._broken = False

    def restart(self, step: int) -> None:
        """Tell TensorBoard to forget what earlier files say from `step` on."""
        start = SessionLog(status=SessionLog.START)
        self._append([Event(wall_time=time.time(), step=step, session_log=start)])

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Add the scalars of training steps."""
        # Rows come in groups; the clock of each places it in time before the newest.
        self._append(
            [
                _scalars(asdict(row), STEP_TAGS, row.step, row.seconds - rows[-1].seconds)
                for row in rows
            ]
        )

    def validation(self, row: ValidationRow) -> None:
        """Add the scalars of a validation."""
        self._append([_scalars(asdict(row), VALIDATION_TAGS, row.step, 0.0)])

    def _append(self, events: Sequence[Event]) -> None:
        if self._broken:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                writer = RecordWriter(file)
                version = Event(wall_time=time.time(), file_version="brain.Event:2")
                for event in [*([version] if file.tell() == 0 else []), *events]:
                    writer.write(event.SerializeToString())
        except OSError as error:
            self._broken = True
            self._told(f"no more TensorBoard events: cannot write {self._path} ({error})")


def _scalars(
    values: Mapping[str, float | None], tags: Mapping[str, str], step: int, seconds: float
) -> Event:
    summary = Summary()
    for key, tag in tags.items():
        if (value := values[key]) is not None:
            summary.value.add(tag=tag, simple_value=value)
    return Event(wall_time=time.time() + seconds, step=step, summary=summary)
