"""Opening a ShardSet, its blocks, and what its manifest refuses."""

from __future__ import annotations

import io
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from raytrain.data.layout import Item
from raytrain.data.shards import (
    MANIFEST,
    PARTIAL,
    SCHEMA,
    JpegQuality,
    Manifest,
    Shard,
    ShardSet,
    Size,
    Split,
)
from raytrain.data.write import ShardTask, write_shard
from raytrain.errors import RaytrainError

SIZES: tuple[Size, ...] = (16, 24, None)


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 32), (shade, shade, shade)).save(buffer, "PNG")
    return buffer.getvalue()


def write_split(root: Path, split: str, images: int, shard_images: int) -> Split:
    """Write grey images of class 0 and 1 in turn; return the split for the manifest."""
    items = tuple(Item(f"{split}-{i}.png", i % 2) for i in range(images))
    for i, item in enumerate(items):
        (root / item.key).write_bytes(png(i * 8))
    shards = []
    for index, start in enumerate(range(0, images, shard_images)):
        part = items[start : start + shard_images]
        task = ShardTask(str(root), str(root / "set"), split, index, part, SIZES, 92, 3)
        result = write_shard(task)
        shards.append(Shard(rows=result.rows, files=result.files))
    counts = (images - images // 2, images // 2)
    return Split(num_images=images, class_counts=counts, shards=tuple(shards))


@pytest.fixture
def shardset(tmp_path: Path) -> Path:
    """Make a set of 19 training images in shards of 8, 8 and 3 rows, blocks of 3 rows."""
    manifest = Manifest(
        raytrain_version="0",
        source=str(tmp_path),
        plan="0",
        options={},
        classes=("a", "b"),
        sizes=SIZES,
        jpeg_quality=JpegQuality(resized=92, same_size=95),
        block_rows=3,
        splits={
            "train": write_split(tmp_path, "train", 19, 8),
            "val": write_split(tmp_path, "val", 3, 8),
        },
        skipped=(),
    )
    (tmp_path / "set" / MANIFEST).write_text(manifest.model_dump_json())
    return tmp_path / "set"


def error_of(path: Path | str) -> str:
    with pytest.raises(RaytrainError) as caught:
        ShardSet.open(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change(shardset: Path, **fields: Any) -> None:
    path = shardset / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_blocks_number_every_row_once(shardset: Path) -> None:
    shards = ShardSet.open(shardset)
    blocks = shards.blocks("train")
    assert [(b.shard, b.row_group, b.rows) for b in blocks] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 2),
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 2),
        (2, 0, 3),
    ]
    assert [b.index for b in blocks] == list(range(7))
    positions = [b.first_row + i for b in blocks for i in range(b.rows)]
    assert positions == list(range(shards.num_images("train"))) == list(range(19))
    assert shards.num_images("val") == 3


@pytest.mark.parametrize("size", SIZES)
def test_reading_gives_the_same_images_in_every_size(shardset: Path, size: Size) -> None:
    shards = ShardSet.open(shardset)
    for split in ("train", "val"):
        for block in shards.blocks(split):
            rows = shards.read_block(split, size, block, with_keys=True).to_pylist()
            assert len(rows) == block.rows
            for position, row in enumerate(rows, start=block.first_row):
                assert row["key"] == f"{split}-{position}.png"
                assert row["label"] == position % 2
                image = Image.open(io.BytesIO(row["image"]))
                assert image.size == (row["width"], row["height"])
                assert min(image.size) == (size or 32)
                assert image.getpixel((0, 0))[0] == pytest.approx(position * 8, abs=2)  # type: ignore[index]


def test_keys_are_read_only_when_asked(shardset: Path) -> None:
    shards = ShardSet.open(str(shardset))
    block = shards.blocks("val")[0]
    without = shards.read_block("val", 16, block)
    assert without.column_names == ["image", "label", "width", "height"]
    assert shards.read_block("val", 16, block, with_keys=True).schema.equals(SCHEMA)


def test_pickled_and_read_from_threads(shardset: Path) -> None:
    shards = ShardSet.open(shardset)
    copy: ShardSet = pickle.loads(pickle.dumps(shards))
    assert copy == shards
    assert copy.fingerprint == shards.fingerprint
    with ThreadPoolExecutor(4) as pool:
        tables = pool.map(lambda b: copy.read_block("train", 16, b), copy.blocks("train") * 5)
        assert sum(table.num_rows for table in tables) == 5 * 19


def test_opened_by_relative_path_from_elsewhere(
    shardset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shardset.parent)
    shards = ShardSet.open("set")
    monkeypatch.chdir("/")
    assert shards.read_block("val", 16, shards.blocks("val")[0]).num_rows == 3
    assert ShardSet.open(shardset.as_uri()).num_images("train") == 19


def test_fingerprint_stands_for_the_content(shardset: Path) -> None:
    before = ShardSet.open(shardset).fingerprint
    change(shardset, source="/elsewhere", raytrain_version="9", plan="1")
    assert ShardSet.open(shardset).fingerprint == before
    change(shardset, classes=["a", "c"])
    assert ShardSet.open(shardset).fingerprint != before


@pytest.mark.parametrize(
    ("sizes", "image_px", "expected"),
    [
        ((160, 256, 352), 128, 160),
        ((160, 256, 352), 140, 160),
        ((160, 256, 352), 144, 256),
        ((160, 256, 352), 224, 256),
        ((160, 256, 352), 288, 352),
        ((160, 256, 352), 320, 352),
        ((160, None), 224, None),
        ((160, 352, None), 128, 160),
    ],
)
def test_size_for(shardset: Path, sizes: tuple[Size, ...], image_px: int, expected: Size) -> None:
    shards = ShardSet.open(shardset)
    other = shards.manifest.model_copy(update={"sizes": sizes})
    assert ShardSet(shards.uri, other).size_for(image_px) == expected


def test_nothing_to_open(tmp_path: Path) -> None:
    assert "no ShardSet here" in error_of(tmp_path)
    assert "raytrain prepare SRC OUT" in error_of(tmp_path / "missing")
    (tmp_path / PARTIAL).mkdir()
    assert "isn't finished" in error_of(tmp_path)
    assert "cannot be read" in error_of("nosuchscheme://bucket/set")


def test_newer_format(shardset: Path) -> None:
    change(shardset, format_version=2, unheard_of="field")
    assert error_of(shardset) == (
        f"{shardset}/manifest.json: format version 2 is newer than this raytrain knows (1); "
        "upgrade raytrain"
    )


def test_damaged_manifest(shardset: Path) -> None:
    path = shardset / MANIFEST
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert "manifest.json: damaged, not JSON" in error_of(shardset)
    path.write_text("[]")
    assert "manifest.json: damaged" in error_of(shardset)
    path.write_bytes(b"\xff\x00")
    assert "manifest.json: damaged" in error_of(shardset)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda m: m.update(classes=["a", "a"]), "a class is named twice"),
        (lambda m: m.update(classes=["a", "b", "c"]), "split train has other classes"),
        (lambda m: m.update(sizes=[24, 16, None]), "sizes must be ascending"),
        (lambda m: m.update(sizes=[16, 24]), "split train lacks a shard in some size"),
        (lambda m: m["splits"].pop("val"), "split val is missing"),
        (lambda m: m["splits"]["train"].update(num_images=20), "shard rows 19 differ"),
        (lambda m: m["splits"]["train"]["shards"].pop(), "shard rows 16 differ"),
        (lambda m: m.update(block_rows="3"), "block_rows"),
        (
            lambda m: m["splits"]["val"]["shards"][0]["files"]["16"].update(path="../../etc/x"),
            "must stay inside the ShardSet",
        ),
    ],
)
def test_manifest_that_does_not_add_up(shardset: Path, edit: Any, complaint: str) -> None:
    path = shardset / MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    assert complaint in error_of(shardset)


def read_all(shards: ShardSet, size: Size) -> None:
    for block in shards.blocks("train"):
        shards.read_block("train", size, block)


def read_error(shards: ShardSet, size: Size = 16) -> str:
    with pytest.raises(RaytrainError) as caught:
        read_all(shards, size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flipped_bit_is_found_when_it_is_read(shardset: Path) -> None:
    shards = ShardSet.open(shardset)
    file = shardset / "train/16/00001.parquet"
    data = bytearray(file.read_bytes())
    data[300] ^= 1  # inside the first JPEG
    file.write_bytes(data)
    message = read_error(shards)
    assert str(file) in message
    assert "CRC checksum verification failed" in message


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_cut_file_is_an_error(shardset: Path, keep: float) -> None:
    shards = ShardSet.open(shardset)
    file = shardset / "train/16/00002.parquet"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    assert str(file) in read_error(shards)


def test_missing_file_and_foreign_file(shardset: Path) -> None:
    shards = ShardSet.open(shardset)
    train = shardset / "train/16"
    (train / "00000.parquet").unlink()
    assert "00000.parquet: missing, though the manifest names it" in read_error(shards)
    (train / "00000.parquet").write_bytes((train / "00002.parquet").read_bytes())
    assert "00000.parquet: cannot read block 0 (the file has" in read_error(shards)


def test_what_is_not_there(shardset: Path) -> None:
    shards = ShardSet.open(shardset)
    assert "size 160 was not prepared; it has 16, 24, original" in read_error(shards, 160)
    with pytest.raises(RaytrainError, match="no split called 'dev'"):
        shards.num_images("dev")
