"""The stream through Ray Data: exact, ordered, and never further ahead than it says."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
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
from raytrain.orchestrate import stream
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


@pytest.fixture
def soon_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker decodes a step, waits for the tasks, and hands over a small unit later."""
    own_steps = stream._Stream.own_steps

    def one_step(self: stream._Stream, images: TrainingImages, start: int) -> Iterator[range]:
        steps = own_steps(self, images, start)
        yield next(steps)
        self.start()
        assert self._up is not None
        self._up.result()
        yield from steps

    monkeypatch.setattr(stream._Stream, "own_steps", one_step)
    monkeypatch.setattr(stream, "_UNIT_IMAGES", 400)  # of the worker; tasks have their own


@pytest.mark.usefixtures("soon_handed_over")
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


@pytest.mark.usefixtures("soon_handed_over")
def test_warnings_of_decoding_processes_reach_the_worker(
    drawn_set: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = make_images(drawn_set, (14, 16, 331), decoder=_Warning())
    assert len(list(open_stream(images, 0, 1))) == 14
    seen = [r for r in caplog.records if r.getMessage() == "166 images seen"]
    own = 1 + 2  # a step, and a "unit" of two
    assert [r.name for r in seen].count("raytrain.orchestrate.stream") == 14 - own
    assert len(seen) == 14


def test_the_worker_decodes_by_itself_until_the_tasks_are_there(drawn_set: Path) -> None:
    """A run that is over before then is exact as well, and waits for nothing."""
    images = make_images(drawn_set, (30, 16, 331))
    steps = [batch.step for batch in open_stream(images, 0, 2)]
    assert steps == list(range(30))


@pytest.mark.usefixtures("soon_handed_over")
def test_a_slow_worker_holds_the_stream_back(drawn_set: Path, tmp_path: Path) -> None:
    """However long the run is, and whatever memory there is."""
    decoder = _Counted(tmp_path)
    images = make_images(drawn_set, (3000, 16, 331), decoder=decoder)  # a step has 166 images
    own, steps_per_unit, ahead = 1 + 2, 3072 // 166, 2 + 1 + 1
    streamed = open_stream(images, 0, 1)
    used = [next(streamed).step for _ in range(own + 1)]
    assert decoder.calls() == own + ahead * steps_per_unit  # with the unit in use
    used += [next(streamed).step for _ in range(steps_per_unit)]
    assert decoder.calls() == own + (1 + ahead) * steps_per_unit
    streamed.close()  # type: ignore[attr-defined]
    assert used == list(range(own + 1 + steps_per_unit))
