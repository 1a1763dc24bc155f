"""`prepare` on Ray: whole sets, resuming, refusals, and the awkward images."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from raytrain.data.layout import Item
from raytrain.data.shards import MANIFEST, PARTIAL, ShardSet
from raytrain.data.write import STOP, ShardTask, write_shard
from raytrain.errors import RaytrainError
from raytrain.orchestrate.prepare import PrepareOptions, parse_sizes, prepare

SHARED = Path(__file__).parents[2] / "shared" / "data"
OPTIONS = PrepareOptions(sizes=(8, 16), val_fraction=0.25, block_rows=4, shard_images=8)

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Draw 40 small images of each of two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for i in range(40):
            path = tmp_path / "source" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (12, 20, 3), np.uint8)).save(path)
    return tmp_path / "source"


def prepare_quietly(source: Path, out: Path, options: PrepareOptions = OPTIONS) -> ShardSet:
    return prepare(source, out, options, progress=False)


def error_of(source: Path, out: Path | str, options: PrepareOptions = OPTIONS) -> str:
    with pytest.raises(RaytrainError) as caught:
        prepare(source, out, options, progress=False)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows_of(shards: ShardSet, split: str) -> dict[str, tuple[int, bytes]]:
    """Return key -> (label, JPEG bytes) of the largest size."""
    return {
        row["key"]: (row["label"], row["image"])
        for block in shards.blocks(split)
        for row in shards.read_block(split, shards.sizes[-1], block, with_keys=True).to_pylist()
    }


def test_whole_set(source: Path, tmp_path: Path) -> None:
    shards = prepare_quietly(source, tmp_path / "out")
    train, val = rows_of(shards, "train"), rows_of(shards, "val")
    assert (len(train), len(val)) == (60, 20)
    assert set(train) | set(val) == {f"{c}/{i}.png" for c in ("cat", "dog") for i in range(40)}
    assert all(label == key.startswith("dog") for key, (label, _) in (train | val).items())
    assert shards.classes == ("cat", "dog")
    assert shards.sizes == (8, 16)
    manifest = shards.manifest
    assert manifest.splits["train"].class_counts == (30, 30)
    assert [shard.rows for shard in manifest.splits["train"].shards] == [8] * 7 + [4]
    assert manifest.options["seed"] == 0
    assert manifest.jpeg_quality.resized == 92
    assert manifest.source == str(source)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [MANIFEST, "train", "val"]


def test_each_block_mixes_the_classes(source: Path, tmp_path: Path) -> None:
    shards = prepare_quietly(source, tmp_path / "out", PrepareOptions(val_fraction=0.25))
    block = shards.blocks("train")[0]
    labels = shards.read_block("train", 160, block)["label"].to_pylist()
    assert block.rows == 60
    assert len(set(labels[:15])) == 2


def test_second_run_does_nothing(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = prepare(source, tmp_path / "out", OPTIONS)
    assert "60 train and 20 val images of 2 classes, 0 skipped" in " ".join(
        capfd.readouterr().err.split()
    )
    before = (tmp_path / "out" / MANIFEST).stat()
    assert prepare(source, tmp_path / "out", OPTIONS) == first
    assert "already prepared" in capfd.readouterr().err
    assert (tmp_path / "out" / MANIFEST).stat() == before


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown(
    source: Path,
    tmp_path: Path,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("raytrain.orchestrate.prepare.SECONDS_BETWEEN_LINES", 0.0)
    prepare(source, tmp_path / "out", OPTIONS)
    shown = capfd.readouterr().err
    assert "80/80" in shown
    assert "images/s" in shown
    assert ("\x1b[" in shown) == terminal


def test_other_options_and_other_sources_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_quietly(source, out)
    before = (out / MANIFEST).read_bytes()
    other = PrepareOptions(sizes=(8,), val_fraction=0.25, block_rows=4, shard_images=8)
    assert "sizes 8,16 there, 8 now" in error_of(source, out, other)
    os.utime(source / "cat" / "0.png", (1, 1))
    assert "other source files" in error_of(source, out)
    assert (out / MANIFEST).read_bytes() == before
    assert len(rows_of(ShardSet.open(out), "train")) == 60


def test_folders_that_are_not_ours(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    assert "not empty and no ShardSet" in error_of(source, tmp_path / "full")
    (tmp_path / "file").write_text("x")
    assert "is a file" in error_of(source, tmp_path / "file")
    assert "cannot be written" in error_of(source, tmp_path / "file" / "out")
    assert "lies inside" in error_of(source, source / "out")
    assert "local folder" in error_of(source, "s3://bucket/out")
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    holder = f"""
import fcntl, pathlib, sys
partial = pathlib.Path({str(tmp_path / "out" / PARTIAL)!r})
partial.mkdir(parents=True)
lock = (partial / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert "another `raytrain prepare`" in error_of(source, tmp_path / "out")
        process.kill()
    assert prepare_quietly(source, tmp_path / "out").num_images("train") == 60


def test_bad_images_over_the_limit_stop_and_a_higher_limit_goes_on(
    source: Path, tmp_path: Path
) -> None:
    for i in range(3):
        (source / "dog" / f"{i}.png").write_bytes(b"broken")
    message = error_of(source, tmp_path / "out")
    assert "images are unusable" in message
    assert "--max-bad 0.01" in message
    assert "(not an image of a known kind)" in message
    with pytest.raises(RaytrainError, match="isn't finished"):
        ShardSet.open(tmp_path / "out")
    generous = PrepareOptions(
        sizes=(8, 16), val_fraction=0.25, block_rows=4, shard_images=8, max_bad=0.2
    )
    shards = prepare_quietly(source, tmp_path / "out", generous)
    assert {item.key for item in shards.manifest.skipped} == {f"dog/{i}.png" for i in range(3)}
    assert sum(split.class_counts[1] for split in shards.manifest.splits.values()) == 37


def test_fault_in_a_worker_is_one_line(source: Path, tmp_path: Path) -> None:
    (source / "dog" / "0.png").write_bytes(b"broken")
    assert "--max-bad" in error_of(source, tmp_path / "out")  # begun, not finished
    (tmp_path / "out" / "val").rename(tmp_path / "val")
    (tmp_path / "out" / "val").write_text("a file where a folder should be")
    assert "cannot write shard val-0000" in error_of(source, tmp_path / "out")


RUN_AND_DIE = """
import os, pathlib, signal, sys, ray
from raytrain.orchestrate import prepare as module

def write_and_die(path, partial, model):
    write_json(path, partial, model)
    if len(list(partial.glob("*-*.json"))) == 10:
        os.kill(os.getpid(), signal.SIGKILL)

write_json, module._write_json = module._write_json, write_and_die
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
options = module.PrepareOptions(sizes=(8, 16), val_fraction=0.25, block_rows=4, shard_images=2)
module.prepare(sys.argv[1], sys.argv[2], options, progress=False)
"""


def test_killed_run_goes_on_and_ends_the_same(source: Path, tmp_path: Path) -> None:
    options = PrepareOptions(sizes=(8, 16), val_fraction=0.25, block_rows=4, shard_images=2)
    undisturbed = prepare_quietly(source, tmp_path / "undisturbed", options)

    out = tmp_path / "out"
    command = [sys.executable, "-c", RUN_AND_DIE, str(source), str(out)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    notes = sorted((out / PARTIAL).glob("train-*.json"))
    assert len(notes) == 10
    assert not (out / MANIFEST).exists()

    whole, damaged, lost = (out / f"train/16/{n.stem[-5:]}.parquet" for n in notes[:3])
    untouched = whole.stat().st_mtime_ns
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    lost.unlink()
    (out / PARTIAL / "abandoned.tmp").write_bytes(b"half a shard")
    resumed = prepare_quietly(source, out, options)
    assert resumed.manifest.splits == undisturbed.manifest.splits
    assert resumed.fingerprint == undisturbed.fingerprint
    assert rows_of(resumed, "train") == rows_of(undisturbed, "train")
    assert whole.stat().st_mtime_ns == untouched
    assert not (out / PARTIAL).exists()


def test_an_interrupted_run_stops_its_tasks_and_goes_on(source: Path, tmp_path: Path) -> None:
    """Their results arrive while it stops: it must not be cancelled, or Ray aborts the process."""
    out = tmp_path / "out"
    script = RUN_AND_DIE.replace("SIGKILL", "SIGINT").replace("num_cpus=1", "num_cpus=4")
    command = [sys.executable, "-c", script, str(source), str(out)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 1, "as Python ends, and not by a signal of its own"
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert (out / PARTIAL / STOP).exists()
    assert not list((out / PARTIAL).glob("*.tmp")), "nobody writes any more"
    options = PrepareOptions(sizes=(8, 16), val_fraction=0.25, block_rows=4, shard_images=2)
    resumed = prepare_quietly(source, out, options)
    assert resumed.fingerprint == prepare_quietly(source, tmp_path / "new", options).fingerprint
    assert not (out / PARTIAL).exists()


def test_who_is_stopped_leaves_no_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / STOP).touch()
    items = (Item("dog/0.png", 1),)
    task = ShardTask(str(source), str(tmp_path), "train", 0, items, (None,), 92, 4)
    with pytest.raises(RaytrainError, match="shard train-00000: stopped; run the same command"):
        write_shard(task)
    assert [path.name for path in (tmp_path / PARTIAL).iterdir()] == [STOP]
    assert not list(tmp_path.rglob("*.parquet"))


def test_parse_sizes() -> None:
    assert parse_sizes("352, original,160") == (160, 352, None)
    for wrong in ("", "160,", "0", "-1", "big", "1.5", "²"):
        with pytest.raises(RaytrainError, match="such as 160,352,original"):
            parse_sizes(wrong)


@pytest.mark.parametrize(
    "options",
    [{"quality": 0}, {"quality": 101}, {"max_bad": 1.5}, {"block_rows": 0}, {"shard_images": 0}],
)
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(RaytrainError, match=f"--{next(iter(options)).replace('_', '-')} "):
        PrepareOptions(**options)  # type: ignore[arg-type]


@pytest.fixture
def awkward(tmp_path: Path) -> Path:
    archive = SHARED / "awkward-images.tar"
    if not archive.exists():
        pytest.skip(f"{archive} is not here")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / "awkward-images"


GENEROUS = PrepareOptions(sizes=(100, None), max_bad=0.5)


def test_awkward_class_without_a_usable_image_is_named(awkward: Path, tmp_path: Path) -> None:
    message = error_of(awkward, tmp_path / "out", GENEROUS)
    assert "class n0002 has no usable training image" in message
    assert "only_broken.JPEG" in message
    assert "--max-bad 0.01" in error_of(
        awkward, tmp_path / "out", PrepareOptions(sizes=(100, None))
    )


def test_every_awkward_image(awkward: Path, tmp_path: Path) -> None:
    (awkward / "train/n0002/only_broken.JPEG").unlink()
    (awkward / "train/n0002").rmdir()
    shards = prepare_quietly(awkward, tmp_path / "out", GENEROUS)
    images = {**rows_of(shards, "train"), **rows_of(shards, "val")}
    reasons = {item.key: item.reason for item in shards.manifest.skipped}

    lines = (awkward / "EXPECTED.tsv").read_text().splitlines()
    expected = dict(line.split("\t") for line in lines)
    assert len(expected) == 29
    for key, verdict in expected.items():
        if verdict.startswith("kept"):
            pixels = simplejpeg.decode_jpeg(images[key][1])
            assert pixels.shape[2] == 3, key
            assert images[key][0] == int("/n0001/" in key)
        assert (key in reasons) == verdict.startswith("skipped"), key
        if verdict == "ignored":
            assert key not in images
    assert "truncated" in reasons["train/n0000/truncated_half.JPEG"]
    assert reasons["train/n0000/empty.JPEG"] == "the file is empty"

    def stored(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.asarray(simplejpeg.decode_jpeg(images[name][1]))

    def reference(name: str) -> Image.Image:
        return Image.open(io.BytesIO((awkward / name).read_bytes()))

    # The eagle before a bright sky: inverted it would be dark.
    assert stored("train/n0000/cmyk.JPEG")[:20].mean() > 150
    assert (
        stored("train/n0001/exif_rotated.JPEG").shape[:2]
        == reference("train/n0001/exif_rotated.JPEG").size
    )
    assert stored("train/n0001/one_pixel.png").shape == (1, 1, 3)
    assert stored("train/n0001/very_wide.JPEG").shape == (3, 3000, 3)
    for name in ("n0000/png_named.JPEG", "n0001/palette.png", "n0001/Ünïcode name (1).JPEG"):
        want = np.asarray(reference(f"train/{name}").convert("RGB"), np.int32)
        assert np.abs(stored(f"train/{name}") - want).mean() < 4, name
