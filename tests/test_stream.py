"""The stream through Ray Data: exact, ordered, and never further ahead than it says."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from raytrain.data.augment import Windows
from raytrain.data.decode import Decoder, Pixels
from raytrain.data.decode_cpu import CpuDecoder
from raytrain.data.reader import TrainingImages
from raytrain.data.shards import ShardSet
from raytrain.orchestrate.stream import open_stream
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan

pytestmark = pytest.mark.usefixtures("ray_local")


def make_images(
    drawn_set: Path, *phases: tuple[int, int, int], decoder: Decoder | None = None
) -> TrainingImages:
    """Of worker 1 of 2, in phases of (epochs, image size, batch)."""
    shards = ShardSet.open(drawn_set)
    recipe = {
        "model": {"name": "resnet18"},
        "phases": [{"epochs": e, "image_px": px, "batch": b} for e, px, b in phases],
        "schedule": {"lr": 0.1},
    }
    plan = Plan(recipe_from_dict(recipe), shards.num_images("train"))
    return TrainingImages(shards, plan, 1, 2, decoder or CpuDecoder())


@pytest.mark.parametrize(("decoders", "start"), [(1, 0), (3, 0), (2, 17)])
def test_batches_are_those_of_the_plan_in_its_order(
    drawn_set: Path, decoders: int, start: int
) -> None:
    """Across epochs, image sizes, batch sizes, tasks and objects, and from any step on."""
    images = make_images(drawn_set, (8, 16, 64), (8, 24, 20), (9, 64, 331))
    steps = range(start, images.plan.num_steps)
    streamed = open_stream(images, start, decoders)
    for batch, expected in zip(streamed, images.read(steps), strict=True):
        assert batch.step == expected.step
        np.testing.assert_array_equal(batch.rows, expected.rows)
        np.testing.assert_array_equal(batch.labels, expected.labels)
        np.testing.assert_array_equal(batch.pixels, expected.pixels)


def test_nothing_is_read_after_the_last_step(drawn_set: Path) -> None:
    images = make_images(drawn_set, (1, 16, 64))
    assert list(open_stream(images, images.plan.num_steps, 2)) == []


@dataclass(frozen=True)
class _Counted:
    """A decoder that leaves a file for each of its calls, wherever it runs."""

    folder: Path
    name: ClassVar[str] = "counted"
    reads: ClassVar[bool] = True
    in_worker: ClassVar[bool] = False

    def decode(
        self, jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int
    ) -> Pixels:
        (self.folder / uuid.uuid4().hex).touch()
        return CpuDecoder().decode(jpegs, windows, image_px)

    def calls(self) -> int:
        """How many there have been, once there are no more for two seconds."""
        before = -1
        while (now := len(list(self.folder.iterdir()))) > before:
            before = now
            time.sleep(2)
        return now


@dataclass(frozen=True)
class _Warning:
    """A decoder that logs a warning at each call, in the process that decodes."""

    name: ClassVar[str] = "warning"
    reads: ClassVar[bool] = True
    in_worker: ClassVar[bool] = False

    def decode(
        self, jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int
    ) -> Pixels:
        logging.getLogger("raytrain.data.here").warning("%d images seen", len(jpegs))
        return CpuDecoder().decode(jpegs, windows, image_px)


def test_warnings_of_decoding_processes_reach_the_worker(
    drawn_set: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = make_images(drawn_set, (14, 16, 331), decoder=_Warning())  # 12 steps a unit
    assert len(list(open_stream(images, 0, 1))) == 14
    seen = [r for r in caplog.records if r.getMessage() == "166 images seen"]
    assert [r.name for r in seen].count("raytrain.orchestrate.stream") == 2
    assert len(seen) == 14


def test_a_slow_worker_holds_the_stream_back(drawn_set: Path, tmp_path: Path) -> None:
    """However long the run is, and whatever memory there is."""
    decoder = _Counted(tmp_path)
    images = make_images(drawn_set, (3000, 16, 331), decoder=decoder)  # a step has 166 images
    steps_per_unit = 12
    stream = open_stream(images, 0, 1)
    used = [batch.step for batch in itertools.islice(stream, 2 * steps_per_unit + 1)]
    assert decoder.calls() == (2 + 3) * steps_per_unit  # the unit in use, and two ahead
    used += [batch.step for batch in itertools.islice(stream, steps_per_unit)]
    assert decoder.calls() == (3 + 3) * steps_per_unit
    stream.close()  # type: ignore[attr-defined]
    assert used == list(range(3 * steps_per_unit + 1))
