"""ShardSets made in the test's own process, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from raytrain.data.layout import Item, LayoutOptions, list_images
from raytrain.data.shards import (
    MANIFEST,
    JpegQuality,
    Manifest,
    Shard,
    ShardSet,
    Size,
    Split,
)
from raytrain.data.write import ShardTask, write_shard


def write_set(
    source: Path,
    out: Path,
    shard_images: Sequence[int] = (70,),
    sizes: tuple[Size, ...] = (16, None),
    block_rows: int = 16,
) -> ShardSet:
    """Make a ShardSet of a folder with train and val.

    Args:
        source: the folder.
        out: where.
        shard_images: images of each shard; the last number stands for all further shards.
        sizes: short sides in pixels, ascending, the original last.
        block_rows: rows of a block.
    """
    listing = list_images(source, LayoutOptions())
    splits: dict[Literal["train", "val"], Split] = {}
    for split in ("train", "val"):
        items = listing.splits[split]
        shards: list[Shard] = []
        first = 0
        while first < len(items):
            step = shard_images[min(len(shards), len(shard_images) - 1)]
            part: tuple[Item, ...] = items[first : first + step]
            task = ShardTask(str(source), str(out), split, len(shards), part, sizes, 92, block_rows)
            result = write_shard(task)
            shards.append(Shard(rows=result.rows, files=result.files))
            first += step
        counts = Counter(item.label for item in items)
        splits[split] = Split(
            num_images=len(items),
            class_counts=tuple(counts[label] for label in range(len(listing.classes))),
            shards=tuple(shards),
        )
    manifest = Manifest(
        raytrain_version="0",
        source=str(source),
        plan="0",
        options={"block_rows": block_rows},
        classes=listing.classes,
        sizes=sizes,
        jpeg_quality=JpegQuality(resized=92, same_size=95),
        block_rows=block_rows,
        splits=splits,
        skipped=(),
    )
    write_manifest(out, manifest)
    return ShardSet.open(out)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace a set's manifest."""
    (folder / MANIFEST).write_text(manifest.model_dump_json())


def flip_bit(file: Path, position: int) -> None:
    """Damage a file."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
