"""ShardSet: a prepared data set, a folder of Parquet shards under one manifest.

The folder, local or ``s3://``, holds ``manifest.json`` and, for each split and size, shards
such as ``train/160/00003.parquet``. A shard's rows are ``image`` (JPEG bytes), ``label``,
``width``, ``height`` and ``key`` (the source path); its row groups are the *blocks* in which a
trainer reads. The same images stand in the same order in every size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from raytrain.errors import RaytrainError

FORMAT_VERSION: Final = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
"""Folder inside an unfinished ShardSet that says what is already written."""

SPLITS: Final = ("train", "val")

Size = int | None
"""Short side of the stored images in pixels, or None for the original size."""

Options = dict[str, str | int | float | None]

SCHEMA = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
    ]
)


def size_name(size: Size) -> str:
    """Return how `size` is written in file names and on the command line."""
    return "original" if size is None else str(size)


def _inside_the_set(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError("a shard's path must stay inside the ShardSet")
    return path


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ShardFile(_Strict):
    """One Parquet file. Sizes whose files would be equal share one: nothing was shrunk."""

    path: Annotated[str, AfterValidator(_inside_the_set)]
    bytes: PositiveInt
    sha256: str


class Shard(_Strict):
    """A run of images in the same order in every size."""

    rows: PositiveInt
    files: dict[str, ShardFile]
    """Size name -> file."""


class JpegQuality(_Strict):
    """Quality, 1 to 100, at which images were encoded; plain JPEGs that fit kept their bytes."""

    resized: PositiveInt
    same_size: PositiveInt
    """Of images that kept their size but were no plain upright JPEG."""


class Split(_Strict):
    """The images of one split."""

    num_images: PositiveInt
    class_counts: tuple[NonNegativeInt, ...]
    """Images of each class, in the order of the manifest's classes."""
    shards: tuple[Shard, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> Split:
        rows = sum(shard.rows for shard in self.shards)
        if not rows == sum(self.class_counts) == self.num_images:
            raise ValueError(
                f"num_images {self.num_images}, class_counts {sum(self.class_counts)} and "
                f"shard rows {rows} differ"
            )
        return self


class Skipped(_Strict):
    """A source file that is not in the set, and why."""

    split: str
    key: str
    reason: str


class Manifest(_Strict):
    """What a ShardSet holds; written last, so that its presence means a whole set."""

    format: Literal["raytrain-shardset"] = "raytrain-shardset"
    format_version: Literal[1] = FORMAT_VERSION
    raytrain_version: str
    source: str
    """The folder that the images came from."""
    plan: str
    """SHA-256 over the source listing (keys, labels, file sizes and times) and the options."""
    options: Options
    """The options of `raytrain prepare`, seed included."""
    classes: tuple[str, ...]
    sizes: tuple[PositiveInt | None, ...]
    """Short sides in pixels, ascending, null (the original size) last. None was enlarged."""
    jpeg_quality: JpegQuality
    block_rows: PositiveInt
    """Rows of a row group; only a shard's last may have fewer."""
    splits: dict[Literal["train", "val"], Split]
    skipped: tuple[Skipped, ...]

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("a class is named twice")
        if not self.sizes or list(self.sizes) != sort_sizes(self.sizes):
            raise ValueError("sizes must be ascending, each once")
        names = {size_name(size) for size in self.sizes}
        for name in SPLITS:
            split = self.splits.get(name)
            if split is None:
                raise ValueError(f"split {name} is missing")
            if len(split.class_counts) != len(self.classes):
                raise ValueError(f"split {name} has other classes")
            if any(set(shard.files) != names for shard in split.shards):
                raise ValueError(f"split {name} lacks a shard in some size")
        return self


def sort_sizes(sizes: Sequence[Size]) -> list[Size]:
    """Return the distinct sizes ascending, the original last."""
    return sorted(set(sizes), key=lambda size: (size is None, size or 0))


@dataclass(frozen=True)
class Block:
    """A row group: the unit of reading.

    Attributes:
        index: number of the block in its split.
        shard: number of the shard that holds it.
        row_group: number of the row group in that shard.
        first_row: position of its first row in the split; positions run over the shards in
            order, from 0 to ``num_images - 1``.
        rows: number of rows.
    """

    index: int
    shard: int
    row_group: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class ShardSet:
    """A prepared data set, read-only. It pickles as its address and manifest alone.

    Attributes:
        uri: absolute local folder, or an address that pyarrow knows, such as
            ``s3://bucket/folder``.
        manifest: what it holds.
    """

    uri: str
    manifest: Manifest

    @classmethod
    def open(cls, uri: str | Path) -> ShardSet:
        """Open the ShardSet at a local folder or an ``s3://`` address.

        Raises:
            RaytrainError: there is no whole ShardSet, its manifest is damaged, or its format
                is newer than this version of raytrain reads.
        """
        where = str(uri) if "://" in str(uri) else str(Path(uri).expanduser().absolute())
        return cls(where, _parse_manifest(_read_manifest(where), f"{where}/{MANIFEST}"))

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into them."""
        return self.manifest.classes

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Prepared short sides in pixels, ascending; None, the original, comes last."""
        return self.manifest.sizes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides pixels, labels and their order."""
        content = self.manifest.model_dump(
            mode="json", include={"format_version", "classes", "sizes", "block_rows", "splits"}
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def num_images(self, split: str) -> int:
        """Return the number of images of `split`, ``train`` or ``val``."""
        return self._split(split).num_images

    def blocks(self, split: str) -> tuple[Block, ...]:
        """Return the blocks of `split` in the order of their rows."""
        return tuple(self._iter_blocks(split))

    def _iter_blocks(self, split: str) -> Iterator[Block]:
        index = first_row = 0
        for number, shard in enumerate(self._split(split).shards):
            for row_group, start in enumerate(range(0, shard.rows, self.manifest.block_rows)):
                rows = min(self.manifest.block_rows, shard.rows - start)
                yield Block(index, number, row_group, first_row, rows)
                index += 1
                first_row += rows

    def size_for(self, image_px: int, margin: float = 1.14) -> Size:
        """Return the smallest prepared size that is enough for training at `image_px` pixels.

        Enough is a short side of at least ``image_px * margin``; where no size is, the largest
        one serves. The default margin is that of the customary evaluation (resize the short
        side to 8/7 of the image, then crop the centre), so that a validation crop is never
        enlarged: 160 serves 128 px, 256 serves 224 and 352 serves 288.
        """
        return next(
            (size for size in self.sizes if size is None or size >= image_px * margin),
            self.sizes[-1],
        )

    def read_block(
        self, split: str, size: Size, block: Block, *, with_keys: bool = False
    ) -> pa.Table:
        """Read one block, with the checksums of its pages verified.

        A file is opened anew each time (0.2 ms of the 0.5 ms that a local block of 64 images
        of 160 px takes), so threads and forked processes share no file position.

        Returns:
            A table of ``block.rows`` rows with the columns image, label, width and height of
            `SCHEMA`, and key if `with_keys`.

        Raises:
            RaytrainError: the size was not prepared, or the file is missing or damaged.
        """
        file = self._file(split, size, block.shard)
        columns = [name for name in SCHEMA.names if with_keys or name != "key"]
        try:
            filesystem, root = _locate(self.uri)
            with (
                filesystem.open_input_file(f"{root}/{file.path}") as source,
                pq.ParquetFile(source, page_checksum_verification=True) as parquet,
            ):
                table = parquet.read_row_group(block.row_group, columns=columns, use_threads=False)
        except FileNotFoundError:
            raise RaytrainError(
                f"{self.uri}/{file.path}: missing, though the manifest names it; copy it again "
                "or prepare the set anew"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise RaytrainError(
                f"{self.uri}/{file.path}: cannot read block {block.row_group} "
                f"({_first_line(error)}); if the file is damaged, copy it again or prepare the "
                "set anew"
            ) from None
        if table.num_rows != block.rows:
            raise RaytrainError(
                f"{self.uri}/{file.path}: block {block.row_group} has {table.num_rows} rows, "
                f"the manifest says {block.rows}; copy the set again or prepare it anew"
            )
        return table

    def _split(self, name: str) -> Split:
        for known, split in self.manifest.splits.items():
            if known == name:
                return split
        raise RaytrainError(f"{self.uri}: no split called {name!r}; it has train and val")

    def _file(self, split: str, size: Size, shard: int) -> ShardFile:
        if size not in self.sizes:
            raise RaytrainError(
                f"{self.uri}: size {size_name(size)} was not prepared; it has "
                f"{', '.join(map(size_name, self.sizes))}"
            )
        return self._split(split).shards[shard].files[size_name(size)]


@lru_cache(maxsize=16)
def _locate(uri: str) -> tuple[pafs.FileSystem, str]:
    if "://" in uri:
        filesystem, root = pafs.FileSystem.from_uri(uri)
        return filesystem, root.rstrip("/")
    return pafs.LocalFileSystem(), uri


def _read_manifest(uri: str) -> bytes:
    try:
        filesystem, root = _locate(uri)
        with filesystem.open_input_file(f"{root}/{MANIFEST}") as source:
            content: bytes = source.read()
            return content
    except FileNotFoundError:
        if Path(uri, PARTIAL).is_dir():
            raise RaytrainError(
                f"{uri}: this ShardSet isn't finished; run `raytrain prepare` again with the "
                "same options and it goes on"
            ) from None
        raise RaytrainError(
            f"{uri}: no ShardSet here ({MANIFEST} is missing); make one with "
            "`raytrain prepare SRC OUT`"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise RaytrainError(f"{uri}: cannot be read ({_first_line(error)})") from None


def _parse_manifest(content: bytes, where: str) -> Manifest:
    repair = "copy it again or prepare the set anew"
    try:
        raw: Any = json.loads(content)
    except ValueError as error:
        raise RaytrainError(f"{where}: damaged, not JSON ({error}); {repair}") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise RaytrainError(
            f"{where}: format version {version} is newer than this raytrain knows "
            f"({FORMAT_VERSION}); upgrade raytrain"
        )
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RaytrainError(
            f"{where}: damaged: {place + ': ' if place else ''}{first['msg']}; {repair}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
