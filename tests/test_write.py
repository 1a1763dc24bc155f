"""Decoding by content to upright RGB, the sizes, and the bytes of a shard."""

from __future__ import annotations

import io
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image, ImageOps

from raytrain.data import write
from raytrain.data.layout import Item
from raytrain.data.shards import PARTIAL, Size
from raytrain.data.write import BadImageError, ShardTask, decode, store, turn_upright, write_shard
from raytrain.errors import RaytrainError


def draw(width: int = 60, height: int = 40) -> Image.Image:
    """Draw a smooth picture whose four corners differ: black, red, green and yellow."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    pixels[..., 2] = 60
    return Image.fromarray(pixels)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def difference(a: npt.NDArray[np.uint8], b: Image.Image) -> float:
    """Mean absolute difference of two images, of 255."""
    assert a.shape == (b.height, b.width, 3)
    return float(np.abs(a.astype(int) - np.asarray(b.convert("RGB")).astype(int)).mean())


def png_header(width: int, height: int) -> bytes:
    """Make a PNG that claims a size and holds no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data = b"IDAT" + zlib.compress(b"")
    tail = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return b"\x89PNG\r\n\x1a\n" + chunk + tail


KINDS: dict[str, bytes] = {
    "jpeg": encode(draw(), "JPEG", quality=95),
    "progressive": encode(draw(), "JPEG", quality=95, progressive=True),
    "cmyk": encode(draw().convert("CMYK"), "JPEG", quality=95),
    "png": encode(draw(), "PNG"),
    "palette": encode(draw().quantize(256), "PNG"),
    "palette with a clear colour": encode(draw().quantize(255), "PNG", transparency=255),
    "opaque alpha": encode(draw().convert("RGBA"), "PNG"),
    "webp": encode(draw(), "WEBP", lossless=True),
    "bmp": encode(draw(), "BMP"),
    "tiff": encode(draw(), "TIFF"),
    "animation": encode(draw(), "GIF", save_all=True, append_images=[Image.new("RGB", (60, 40))]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_becomes_rgb(kind: str) -> None:
    picture = decode(KINDS[kind])
    assert difference(picture.pixels, draw()) < 6
    assert picture.full_size == (60, 40)
    assert (picture.jpeg is not None) == (kind in ("jpeg", "progressive"))


def test_inverted_cmyk_of_adobe_has_the_right_colours() -> None:
    data = encode(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=95)
    assert b"Adobe" in data
    assert decode(data).pixels.reshape(-1, 3).mean(0) == pytest.approx([255, 0, 0], abs=6)


def test_grey_of_8_and_16_bits() -> None:
    ramp = np.linspace(0, 65535, 60 * 40).reshape(40, 60).astype(np.uint16)
    deep = decode(encode(Image.fromarray(ramp), "PNG"))
    flat = decode(encode(Image.fromarray((ramp // 257).astype(np.uint8)), "JPEG", quality=100))
    assert flat.jpeg is not None
    for picture in (deep, flat):
        assert difference(picture.pixels, Image.fromarray((ramp // 257).astype(np.uint8))) < 1


def test_alpha_lies_on_white() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert decode(encode(clear, "PNG")).pixels.min() == 255
    half = Image.new("LA", (4, 4), (0, 128))
    assert abs(int(decode(encode(half, "PNG")).pixels[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[write.EXIF_ORIENTATION] = orientation
    options = {"quality": 95} if kind == "JPEG" else {}
    data = encode(draw(), kind, exif=exif, **options)
    expected = draw()
    expected.getexif()[write.EXIF_ORIENTATION] = orientation
    picture = decode(data)
    assert difference(picture.pixels, ImageOps.exif_transpose(expected)) < 6
    assert picture.full_size == (picture.pixels.shape[1], picture.pixels.shape[0])
    assert (picture.jpeg is not None) == (kind == "JPEG" and orientation == 1)


def test_turning_keeps_every_pixel() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    results = {turn_upright(pixels, turn).tobytes() for turn in range(1, 9)}
    assert len(results) == 8


def test_broken_exif_does_not_matter() -> None:
    data = encode(draw(), "JPEG", exif=b"Exif\x00\x00nonsense that is no TIFF header")
    assert decode(data).jpeg == data


JPEG = KINDS["jpeg"]
LARGE = encode(draw(600, 400), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, this is text", "not an image of a known kind"),
        (LARGE[: len(LARGE) // 2], "truncated"),
        (LARGE[: len(LARGE) // 2] + b"\xff\xd9", "truncated"),
        (KINDS["png"][:100], "(?i)truncated"),
        (png_header(30_000, 30_000), "claims more than"),
        (png_header(10_000, 9_000), "claims more than"),
        (png_header(70_000, 2), "a side is longer than"),
        (encode(Image.new("F", (4, 4)), "TIFF"), "32-bit pixels"),
    ],
)
def test_unusable_files_have_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        decode(data)


def test_a_claimed_size_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for side in (9_500, 30_000, 60_000):
        with pytest.raises(BadImageError):
            decode(png_header(side, side))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_harmless_fault_is_forgiven_but_not_kept() -> None:
    data = JPEG[:-2] + b"stray bytes" + JPEG[-2:]
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(data)
    picture = decode(data)
    assert picture.jpeg is None
    simplejpeg.decode_jpeg(store(picture, None, 92).jpeg)  # the trainer's decoder takes it


@pytest.mark.parametrize(
    ("width", "height", "size", "expected"),
    [
        (60, 40, 20, (30, 20)),
        (40, 60, 20, (20, 30)),
        (61, 40, 39, (59, 39)),
        (60, 40, 40, (60, 40)),
        (60, 40, 100, (60, 40)),
        (60, 40, None, (60, 40)),
        (3000, 3, 2, (2000, 2)),
        (1, 1, 160, (1, 1)),
    ],
)
def test_short_side_shrinks_and_never_grows(
    width: int, height: int, size: Size, expected: tuple[int, int]
) -> None:
    stored = store(decode(encode(draw(width, height), "PNG")), size, 92)
    assert (stored.width, stored.height) == expected
    assert simplejpeg.decode_jpeg(stored.jpeg).shape == (expected[1], expected[0], 3)


def test_resizing_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    stored = store(decode(encode(Image.fromarray(stripes), "PNG")), 16, 95)
    assert np.abs(simplejpeg.decode_jpeg(stored.jpeg).astype(int) - 127).max() <= 3


def test_large_jpeg_is_decoded_smaller_and_looks_the_same() -> None:
    data = encode(draw(1200, 803), "JPEG", quality=95)
    fast, full = decode(data, largest=100), decode(data)
    assert full.pixels.shape == (803, 1200, 3)
    assert 200 <= min(fast.pixels.shape[:2]) <= 402
    assert fast.full_size == full.full_size == (1200, 803)
    small, reference = (simplejpeg.decode_jpeg(store(p, 100, 95).jpeg) for p in (fast, full))
    assert small.shape == reference.shape == (100, 149, 3)
    assert np.abs(small.astype(int) - reference.astype(int)).mean() < 1


def make_task(tmp_path: Path, files: dict[str, bytes], sizes: tuple[Size, ...]) -> ShardTask:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for name, data in files.items():
        (source / name).write_bytes(data)
    items = tuple(Item(name, label) for label, name in enumerate(files))
    return ShardTask(str(source), str(tmp_path / "out"), "train", 3, items, sizes, 92, 2)


def test_shard_rows_blocks_and_order(tmp_path: Path) -> None:
    plain = encode(draw(), "JPEG", quality=80)
    files = {"a.jpg": plain, "b.jpg": b"broken", "c ü.png": encode(draw(90, 90), "PNG")}
    task = make_task(tmp_path, files | {"d.jpg": plain}, (20, None))
    result = write_shard(task)
    assert result.rows == 3
    assert [(s.split, s.key) for s in result.skipped] == [("train", "b.jpg")]
    for name, shapes in {
        "20": [(30, 20), (20, 20), (30, 20)],
        "original": [(60, 40), (90, 90), (60, 40)],
    }.items():
        assert result.files[name].path == f"train/{name}/00003.parquet"
        parquet = pq.ParquetFile(tmp_path / "out" / result.files[name].path)
        assert [parquet.metadata.row_group(i).num_rows for i in range(2)] == [2, 1]
        rows = parquet.read().to_pylist()
        assert [row["key"] for row in rows] == ["a.jpg", "c ü.png", "d.jpg"]
        assert [row["label"] for row in rows] == [0, 2, 3]
        assert [(row["width"], row["height"]) for row in rows] == shapes
        assert (rows[0]["image"] == plain) == (name == "original")
        for row in rows:
            assert simplejpeg.decode_jpeg_header(row["image"])[:2] == (row["height"], row["width"])
    assert not list((tmp_path / "out" / PARTIAL).iterdir())


def test_same_task_same_bytes(tmp_path: Path) -> None:
    files = {"a.jpg": encode(draw(), "JPEG"), "b.png": encode(draw(50, 70), "PNG")}
    task = make_task(tmp_path, files, (20, 30))
    assert write_shard(task) == write_shard(task)


def test_sizes_that_change_nothing_share_one_file(tmp_path: Path) -> None:
    task = make_task(tmp_path, {"a.jpg": JPEG, "b.png": KINDS["png"]}, (30, 40, 80, None))
    files = write_shard(task).files
    assert [files[name].path for name in ("30", "40", "80", "original")] == [
        "train/30/00003.parquet",
        *["train/40/00003.parquet"] * 3,
    ]
    assert len(list((tmp_path / "out").rglob("*.parquet"))) == 2


def test_shard_without_a_usable_image_has_no_file(tmp_path: Path) -> None:
    result = write_shard(make_task(tmp_path, {"a.jpg": b"", "b.jpg": b"no"}, (20,)))
    assert (result.rows, result.files, len(result.skipped)) == (0, {}, 2)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_vanished_source_file_stops(tmp_path: Path) -> None:
    task = make_task(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG}, (20,))
    Path(task.source, "b.jpg").unlink()
    with pytest.raises(RaytrainError, match=r"b\.jpg: vanished since the folder was listed"):
        write_shard(task)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_full_disk_is_one_line_and_leaves_no_shard(tmp_path: Path) -> None:
    task = make_task(tmp_path, {f"{i}.jpg": JPEG for i in range(50)}, (20, None))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RaytrainError, match=r"cannot write shard train-00003 \(") as caught:
            write_shard(task)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
