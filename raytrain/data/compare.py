"""`raytrain data diff`: what changed from one ShardSet to another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrain.data.shards import SPLITS, Block, ShardSet, Size, size_name, sort_sizes

_NAMED = 10  # keys or classes of a kind of change that are named


@dataclass(frozen=True, slots=True)
class _Image:
    """Where a key is, what it is, and the hash of its stored JPEG."""

    split: str
    class_name: str
    jpeg: bytes


def compare_sets(old: ShardSet, new: ShardSet, threads: int | None = None) -> list[str]:
    """Say in lines what changed; no lines where the sets are equal.

    Keys, classes and images are compared one by one, images in the smallest size that both have.

    Args:
        old: the earlier version.
        new: the later version.
        threads: how many read; by default one a core.

    Raises:
        RaytrainError: a set can't be read or is damaged.
    """
    if old.fingerprint == new.fingerprint:
        return []
    lines = list(_compare_manifests(old, new))
    size = _common_size(old, new)
    before, after = (
        _read_images(shards, s, threads) for shards, s in zip((old, new), size, strict=True)
    )
    lines += _compare_images(before, after, with_jpegs=size[0] == size[1])
    return lines or ["the same images in another order or other blocks"]


def _compare_manifests(old: ShardSet, new: ShardSet) -> Iterator[str]:
    added = [name for name in new.classes if name not in set(old.classes)]
    removed = [name for name in old.classes if name not in set(new.classes)]
    if added:
        yield _named("classes added", added)
    if removed:
        yield _named("classes removed", removed)
    if not added and not removed and old.classes != new.classes:
        yield "classes: the same in another order, so labels mean something else"
    if old.sizes != new.sizes:
        yield f"sizes: {_written(old.sizes)} -> {_written(new.sizes)}"
    before, after = old.manifest.options, new.manifest.options
    for option in sorted({*before, *after} - {"sizes"}):
        if before.get(option) != after.get(option):
            yield f"option {option}: {before.get(option)} -> {after.get(option)}"
    for split in SPLITS:
        if old.num_images(split) != new.num_images(split):
            yield f"{split}: {old.num_images(split):,} -> {new.num_images(split):,} images"
        counts = [
            dict(zip(shards.classes, shards.manifest.splits[split].class_counts, strict=True))
            for shards in (old, new)
        ]
        changed = [
            f"{name} {counts[0][name]} -> {counts[1][name]}"
            for name in old.classes
            if name in counts[1] and counts[0][name] != counts[1][name]
        ]
        if changed:
            yield _named(f"{split}: images of classes", changed)


def _common_size(old: ShardSet, new: ShardSet) -> tuple[Size, Size]:
    """The smallest size that both have, twice; else the smallest of each."""
    common = sort_sizes([size for size in old.sizes if size in new.sizes])
    return (common[0], common[0]) if common else (old.sizes[0], new.sizes[0])


def _read_images(shards: ShardSet, size: Size, threads: int | None) -> dict[str, _Image]:
    """Key -> image, of both splits."""

    def read(job: tuple[str, Block]) -> list[tuple[str, _Image]]:
        split, block = job
        rows = shards.read_block(split, size, block, with_keys=True).to_pylist()
        return [
            (
                row["key"],
                _Image(
                    split,
                    shards.classes[row["label"]],
                    hashlib.blake2b(row["image"], digest_size=16).digest(),
                ),
            )
            for row in rows
        ]

    jobs = [(split, block) for split in SPLITS for block in shards.blocks(split)]
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        return {key: image for images in pool.map(read, jobs) for key, image in images}


def _compare_images(
    before: dict[str, _Image], after: dict[str, _Image], with_jpegs: bool
) -> Iterator[str]:
    both = [(key, image, after[key]) for key, image in before.items() if key in after]
    kinds = {
        "added": [f"{i.split} {key}" for key, i in after.items() if key not in before],
        "removed": [f"{i.split} {key}" for key, i in before.items() if key not in after],
        "moved": [f"{key} {a.split} -> {b.split}" for key, a, b in both if a.split != b.split],
        "relabelled": [
            f"{b.split} {key} {a.class_name} -> {b.class_name}"
            for key, a, b in both
            if a.class_name != b.class_name
        ],
        "stored otherwise": [
            f"{b.split} {key}" for key, a, b in both if with_jpegs and a.jpeg != b.jpeg
        ],
    }
    for kind, keys in kinds.items():
        if keys:
            yield _named(f"images {kind}", sorted(keys))


def _named(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{what} ({len(names):,}): {', '.join(names[:_NAMED])}{more}"


def _written(sizes: Sequence[Size]) -> str:
    return ",".join(map(size_name, sizes))
