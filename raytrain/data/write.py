"""Write one shard: decode image files once and store them in every prepared size.

`write_shard` depends on nothing but its argument, so the same task always writes the same
bytes, on any machine with the same library versions.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from raytrain.data.layout import Item
from raytrain.data.shards import PARTIAL, SCHEMA, ShardFile, Size, Skipped, size_name
from raytrain.errors import RaytrainError

Pixels = npt.NDArray[np.uint8]
"""RGB pixels of shape (height, width, 3)."""

MAX_FILE_BYTES = 256 * 2**20
MAX_PIXELS = 89_478_485
"""Pillow's own limit against decompression bombs; 268 MB as RGB."""
MAX_SIDE_PX = 65_500
"""The longest side that JPEG can store."""
SAME_SIZE_QUALITY = 95
"""JPEG quality of an image that keeps its size but can't keep its bytes."""
EXIF_ORIENTATION = 0x0112
STOP = "stop"
"""A file beside the shards that aren't finished: who writes one stops."""
_IMAGES_A_LOOK = 16  # images between two looks for it, which an NFS makes cost a millisecond


@dataclass(frozen=True)
class ShardTask:
    """All that `write_shard` needs to know.

    Attributes:
        source: folder to which the keys of the items are relative.
        out: folder of the ShardSet.
        split: ``train`` or ``val``.
        index: number of the shard in its split.
        items: the images, in the order in which they are to be stored.
        sizes: short sides to prepare in pixels, ascending, None (the original) last.
        quality: JPEG quality, 1 to 100, of resized images.
        block_rows: rows of a row group.
    """

    source: str
    out: str
    split: str
    index: int
    items: tuple[Item, ...]
    sizes: tuple[Size, ...]
    quality: int
    block_rows: int

    @property
    def name(self) -> str:
        """Split and number, as in ``train-00003``."""
        return f"{self.split}-{self.index:05d}"

    def relative_path(self, size: Size) -> str:
        """Return the path of the shard's file of `size`, relative to the ShardSet."""
        return f"{self.split}/{size_name(size)}/{self.index:05d}.parquet"


class ShardResult(BaseModel):
    """What became of a `ShardTask`; no files where no image was usable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rows: int
    files: dict[str, ShardFile]
    skipped: tuple[Skipped, ...]


class BadImageError(Exception):
    """An image that can't be used; the message is the reason."""


@dataclass(frozen=True)
class Picture:
    """A decoded image.

    Attributes:
        pixels: upright RGB pixels. They may be fewer than those of the file where only much
            smaller sizes are wanted.
        jpeg: the file's own bytes if they are a plain upright JPEG in RGB or grey.
        full_size: (width, height) of the upright image in pixels.
    """

    pixels: Pixels
    jpeg: bytes | None
    full_size: tuple[int, int]

    @property
    def short_side(self) -> int:
        """Short side of the whole image, in pixels."""
        return min(self.full_size)


@dataclass(frozen=True)
class StoredImage:
    """One cell of a shard: JPEG bytes, and the width and height in pixels that they hold."""

    jpeg: bytes
    width: int
    height: int


def write_shard(task: ShardTask) -> ShardResult:
    """Decode the images of `task` and write one Parquet file a size.

    Files appear whole or not at all. Unusable images are left out and named in the result.

    Raises:
        RaytrainError: a source file has vanished, a shard can't be written, or there is a file
            ``STOP`` in the folder of what isn't finished.
    """
    skipped: list[Skipped] = []
    rows = 0
    try:
        with ExitStack() as stack:
            writers = []
            for size in task.sizes:
                writers.append(_ShardWriter(task, size))
                stack.callback(writers[-1].discard)
            for item, picture in _load_items(task, skipped):
                rows += 1
                for writer in writers:
                    writer.append(item, store(picture, writer.size, task.quality))
            files = _commit(writers) if rows else {}
    except OSError as error:
        raise RaytrainError(
            f"{task.out}: cannot write shard {task.name} ({error.strerror or error}); make room "
            "or fix the permissions, then run the same command to go on"
        ) from error
    return ShardResult(rows=rows, files=files, skipped=tuple(skipped))


def _load_items(task: ShardTask, skipped: list[Skipped]) -> Iterator[tuple[Item, Picture]]:
    largest = None if None in task.sizes else max(size for size in task.sizes if size)
    stop = Path(task.out, PARTIAL, STOP)
    for i, item in enumerate(task.items):
        if i % _IMAGES_A_LOOK == 0 and stop.exists():
            raise RaytrainError(f"shard {task.name}: stopped; run the same command to go on")
        try:
            picture = decode(_read_source(Path(task.source, item.key)), largest)
        except BadImageError as reason:
            skipped.append(Skipped(split=task.split, key=item.key, reason=str(reason)))
            continue
        yield item, picture


def _read_source(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadImageError(f"the file is larger than {MAX_FILE_BYTES >> 20} MB")
        return path.read_bytes()
    except FileNotFoundError:
        raise RaytrainError(
            f"{path}: vanished since the folder was listed, or isn't mounted on every machine "
            "of the cluster; bring it back and run the same command to go on"
        ) from None
    except OSError as error:
        raise BadImageError(f"cannot be read: {error.strerror}") from None


def decode(data: bytes, largest: int | None = None) -> Picture:
    """Decode an image file by its content to upright RGB pixels.

    Alpha is composited on white, 16-bit grey scaled to 8 bits, an animation reduced to its
    first frame. Colour profiles are not applied.

    Args:
        data: the file.
        largest: largest short side in pixels that is wanted, None for the original size. JPEGs
            of at least four times that size are decoded at an eighth to a half, which is
            several times faster and leaves the resize at least a factor of 2 to filter.

    Raises:
        BadImageError: the data is damaged, of an unknown kind, or claims a size over `MAX_PIXELS`
            or `MAX_SIDE_PX` (then it is refused before memory is taken for it).
    """
    if not data:
        raise BadImageError("the file is empty")
    image = _open(data)
    # MPO is what phones write: a JPEG with further pictures behind it.
    if image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        turn = _orientation(image)
        pixels = _decode_jpeg(data, image.size, largest)
        if pixels is not None:
            plain = data if turn == 1 else None
            return _picture(pixels, turn, image.size, plain)
    pixels = _decode_with_pillow(image)
    # After loading: Pillow itself turns TIFF upright then and drops the mark.
    return _picture(pixels, _orientation(image), image.size, None)


def _picture(pixels: Pixels, turn: int, size: tuple[int, int], jpeg: bytes | None) -> Picture:
    full_size = size if turn < 5 else size[::-1]
    return Picture(turn_upright(pixels, turn), jpeg, full_size)


def _open(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Between its limit and twice its limit Pillow only warns.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise BadImageError(f"claims more than {MAX_PIXELS} pixels") from None
    except Exception as error:  # Pillow's readers let many kinds out on malformed headers
        raise BadImageError(_reason(error)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImageError(f"claims more than {MAX_PIXELS} pixels")
    if max(width, height) > MAX_SIDE_PX:
        raise BadImageError(f"a side is longer than {MAX_SIDE_PX} pixels")
    return image


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known kind"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) to 8."""
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:  # a broken EXIF block says nothing against the pixels
        return 1
    return value if value in range(1, 9) else 1


def _decode_jpeg(data: bytes, size: tuple[int, int], largest: int | None) -> Pixels | None:
    """Decode with libjpeg-turbo, or return None if only Pillow can forgive the file's faults."""
    scale = 1.0
    if largest is not None and min(size) >= 4 * largest:
        scale = 2 * largest / min(size)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, min_width=math.ceil(size[0] * scale), min_height=math.ceil(size[1] * scale)
        )
    except ValueError as error:
        if "premature end" in str(error).lower():
            raise BadImageError(f"truncated: {_reason(error)}") from None
        return None
    return pixels


def _decode_with_pillow(image: Image.Image) -> Pixels:
    try:
        image.load()
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
            grey = np.clip(np.asarray(image, dtype=np.float32) / 257 + 0.5, 0, 255)
            return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise BadImageError("32-bit pixels, whose range isn't known")
        if image.has_transparency_data:
            overlay = image.convert("RGBA")
            paper = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(paper, overlay)
        return np.asarray(image.convert("RGB"))
    except BadImageError:
        raise
    except Exception as error:  # Pillow's readers let many kinds out on damaged data
        raise BadImageError(_reason(error)) from None


_TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: p.transpose(1, 0, 2)[:, ::-1],
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda p: p.transpose(1, 0, 2)[::-1],
}


def turn_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo an EXIF orientation, 1 to 8, of pixels of shape (height, width, 3)."""
    return np.ascontiguousarray(_TURNS[orientation](pixels))


def store(picture: Picture, size: Size, quality: int) -> StoredImage:
    """Return `picture` as JPEG with its short side at most `size` pixels, aspect ratio kept.

    An image that already fits is not resized: a plain JPEG keeps its bytes, anything else is
    encoded at `SAME_SIZE_QUALITY` with full chroma. Otherwise areas are averaged and the result
    is encoded at `quality` with 4:2:0 chroma, which decodes fastest.
    """
    width, height = picture.full_size
    if size is None or picture.short_side <= size:
        jpeg = picture.jpeg or _encode(picture.pixels, SAME_SIZE_QUALITY, "444")
        return StoredImage(jpeg, width, height)
    scale = size / picture.short_side
    shape = (max(1, round(width * scale)), max(1, round(height * scale)))
    resized = cv2.resize(picture.pixels, shape, interpolation=cv2.INTER_AREA)
    return StoredImage(_encode(np.asarray(resized, np.uint8), quality, "420"), *shape)


def _encode(pixels: Pixels, quality: int, chroma: str) -> bytes:
    data: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=quality, colorsubsampling=chroma
    )
    return data


class _ShardWriter:
    """Writes one Parquet file, a row group whenever enough rows have come.

    The file is written under a unique temporary name (a worker that outlived a killed run may
    still be writing its own) and takes its place with `commit`.
    """

    def __init__(self, task: ShardTask, size: Size) -> None:
        self.size = size
        self._path = task.relative_path(size)
        self._final = Path(task.out, self._path)
        self._temporary = Path(task.out, PARTIAL, f"{uuid.uuid4().hex}.tmp")
        self._temporary.parent.mkdir(parents=True, exist_ok=True)
        self._block_rows = task.block_rows
        self._rows: list[tuple[bytes, int, int, int, str]] = []
        # Compressing JPEG or looking for repeats in it only costs time.
        self._parquet = pq.ParquetWriter(
            str(self._temporary),
            SCHEMA,
            compression={name: "ZSTD" if name == "key" else "NONE" for name in SCHEMA.names},
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )

    def append(self, item: Item, image: StoredImage) -> None:
        """Add a row."""
        self._rows.append((image.jpeg, item.label, image.width, image.height, item.key))
        if len(self._rows) == self._block_rows:
            self._write_block()

    def finish(self) -> ShardFile:
        """Write what is left to the disk; return the file as the manifest will name it."""
        if self._rows:
            self._write_block()
        self._parquet.close()
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        return describe_file(self._temporary, self._path)

    def commit(self) -> None:
        """Let the file take its place."""
        self._final.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(self._temporary, self._final)

    def discard(self) -> None:
        """Remove what was written and not committed."""
        try:
            self._parquet.close()
        finally:
            self._temporary.unlink(missing_ok=True)

    def _write_block(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [pa.array(c, field.type) for c, field in zip(columns, SCHEMA, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=SCHEMA)
        self._parquet.write_table(table, row_group_size=len(self._rows))
        self._rows.clear()


def _commit(writers: Sequence[_ShardWriter]) -> dict[str, ShardFile]:
    """Put the files in place, one for all sizes that came out the same."""
    files: dict[str, ShardFile] = {}
    by_sum: dict[str, ShardFile] = {}
    for writer in writers:
        file = writer.finish()
        if file.sha256 not in by_sum:
            writer.commit()
            by_sum[file.sha256] = file
        files[size_name(writer.size)] = by_sum[file.sha256]
    return files


def describe_file(file: Path, path: str) -> ShardFile:
    """Return the size and checksum of `file`, to be called `path` in the manifest."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return ShardFile(path=path, bytes=file.stat().st_size, sha256=digest)


def replace_durably(temporary: Path, final: Path) -> None:
    """Rename so that after a crash of the machine either the old or the new file is there."""
    temporary.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
