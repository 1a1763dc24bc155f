"""`raytrain bench input`: who is measured on what, how turns are taken, and what comes out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from raytrain.bench.contenders import StoredImages, crops_by, crops_by_torchvision, jpeg_libraries
from raytrain.bench.input import FLOOR, IMAGE_PX, OURS, BenchOptions, bench_input
from raytrain.bench.measure import Spread, images_per_core_second, ratios
from raytrain.bench.memory import watched_memory
from raytrain.bench.stream import measure_stream
from raytrain.cli import app
from raytrain.data.augment import Windows
from raytrain.data.decode import Pixels
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError

QUICK = BenchOptions(images=4, repeats=2, seconds=0)


def test_rivals_take_turns() -> None:
    calls: list[str] = []

    def work(name: str, images: int) -> int:
        calls.append(name)
        np.random.default_rng(0).random(200_000)  # some CPU time
        return images

    passes = {"a": lambda: work("a", 1000), "b": lambda: work("b", 1)}
    rates = images_per_core_second(passes, 3, 0)
    assert calls == ["a", "b"] + ["a", "b"] * 3
    assert all(len(values) == 3 for values in rates.values())
    assert min(rates["a"]) > max(rates["b"])


def test_a_turn_lasts_as_long_as_asked() -> None:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        np.random.default_rng(0).random(100_000)
        return 1

    images_per_core_second({"only": work}, 1, 0.05)
    assert len(calls) > 3


def test_ratios_are_taken_turn_by_turn() -> None:
    """A machine that slows down halfway changes both, and the ratio not at all."""
    assert ratios([100, 10, 60], [50, 5, 30]) == Spread(2, 2, 2)
    assert Spread.of([3, 1, 2, 10]) == Spread(2.5, 1, 10)


class _Remembers:
    """A decoder that keeps what it was given."""

    name = "remembers"
    reads = True
    in_worker = False
    given: ClassVar[list[tuple[int, Windows]]] = []

    def decode(self, jpegs: object, windows: Windows, image_px: int) -> Pixels:
        self.given.append((image_px, windows))
        return np.zeros((0, image_px, image_px, 3), dtype=np.uint8)


def test_our_decoder_sees_every_image_with_new_windows_in_each_pass(drawn_set: Path) -> None:
    images = StoredImages.read(ShardSet.open(drawn_set), 16, 100)
    assert len(images.jpegs) == 100
    one_pass = crops_by(_Remembers(), images, 24)
    assert [one_pass(), one_pass()] == [100, 100]
    given = _Remembers.given
    assert [(px, len(w.top)) for px, w in given] == [(24, 64), (24, 36)] * 2
    assert not np.array_equal(given[0][1].top, given[2][1].top)
    assert (given[1][1].top + given[1][1].height <= images.heights[64:]).all()


def test_rivals_see_every_image_too(drawn_set: Path, tmp_path: Path) -> None:
    images = StoredImages.read(ShardSet.open(drawn_set), None, 70)
    assert crops_by_torchvision(images.as_folder(tmp_path), 24)() == 70
    for decode in jpeg_libraries().values():
        shapes = {np.asarray(decode(jpeg)).shape for jpeg in images.jpegs}
        assert shapes == {(h, w, 3) for h, w in zip(images.heights, images.widths, strict=True)}


def test_a_shard_set_is_measured_in_all_its_sizes(drawn_set: Path) -> None:
    report = bench_input(str(drawn_set), QUICK)
    assert report.images == 4
    cases = [row.case for row in report.rows]
    assert {(c.size, c.image_px) for c in cases if c.what == OURS} == {
        ("original", px) for px in IMAGE_PX
    }  # 16 px is too little for all of them
    assert {(c.size, c.image_px) for c in cases if c.what == "torchvision"} == {
        ("original", px) for px in IMAGE_PX
    }
    assert {c.size for c in cases if c.what == FLOOR} == {"16", "original"}
    assert all(0 < r.images_per_s.low <= r.images_per_s.median for r in report.rows)
    compared = {(r.image_px, r.rival.what) for r in report.ratios}
    assert compared >= {(px, what) for px in IMAGE_PX for what in ("torchvision", FLOOR)}
    assert all(r.rival.what != OURS for r in report.ratios)


@pytest.fixture
def no_scratch_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    yield
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("ray_local", "no_scratch_left")
def test_a_folder_of_images_is_prepared_for_the_purpose(drawn_images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"  # neither classes nor splits
    for i, file in enumerate(sorted(drawn_images.rglob("*.png"))[:11]):
        target = folder / ("deep/er" if i % 2 else "") / f"{i}.PNG"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    report = bench_input(
        str(folder), BenchOptions(sizes=(16, None), images=4, repeats=1, seconds=0)
    )
    assert report.images == 4
    assert {row.case.size for row in report.rows} == {"16", "original"}


def test_nothing_to_measure_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match="no ShardSet and no images"):
        bench_input(str(tmp_path), QUICK)
    with pytest.raises(RaytrainError, match="no ShardSet here"):
        bench_input(str(tmp_path / "absent"), QUICK)


def test_the_command_prints_tables_and_writes_json(drawn_set: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--images", "2", "--repeats", "1", "--seconds", "0", "--json", str(numbers)]
    result = CliRunner().invoke(app, ["bench", "input", str(drawn_set), *options])
    assert result.exit_code == 0, result.output
    report = json.loads(numbers.read_text())
    for row in report["rows"]:
        assert row["case"]["what"] in result.output
    assert report["machine"]["cores"] == os.cpu_count()
    assert report["versions"]["simplejpeg"]
    assert report["stream"] is None
    first = report["rows"][0]
    assert first["case"] == {"what": OURS, "size": "original", "image_px": 224}
    assert first["images_per_s"]["low"] <= first["images_per_s"]["high"]


@pytest.mark.usefixtures("ray_local")
def test_the_stream_is_measured_beside_bare_processes(
    drawn_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    speed = measure_stream(ShardSet.open(drawn_set), repeats=1, seconds=0.3)
    assert speed.share.median == pytest.approx(speed.stream.median / speed.bare.median)
    assert speed.first_batch_s.median > 0
    assert speed.longest_gap.median >= 1
    assert speed.memory.low > 50e6  # Python alone holds more
    assert 0.3 < speed.memory_of_ten.median < 3
    console = Console(width=100)
    with console.capture() as captured:
        console.print(speed.table())
    assert "stream / bare" in captured.get()


def test_memory_of_a_process_and_its_children_is_seen() -> None:
    program = "held = bytearray(b'x') * 500_000_000; print(flush=True); input()"
    with watched_memory() as before:
        pass
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
        watched_memory() as peak,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        peak.look()
        child.stdin.close()
    assert 300e6 < peak.bytes - before.bytes < 800e6  # whatever else lives or ends meanwhile
